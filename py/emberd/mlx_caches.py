"""What mlx-lm's caches of one sequence can do: be copied, be cut, and say how many bytes they take.

A model has one cache a layer, of several kinds. One of keys and values holds every token and can be cut to any length; one of a sliding
window can until it has lost its first token; a recurrent layer has one state, of all tokens so far, and cannot. An
array of MLX may be changed in place by any of its holders (`+=`, an assignment to a slice), so nothing is shared: a copy has arrays of
its own. Their memory is shared until one side writes.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from emberd.mlx_model import Caches, Model


def copied(caches: Caches, length: int | None = None) -> Caches:
    """A copy that lives on its own; with `length`, of no more than that many tokens (`can_cut`). Computed already."""
    copies = [_copied(each) for each in caches]
    if length is not None:
        for each in copies:
            _cut(each, length)
    compute(copies)
    return copies


def can_cut(caches: Caches) -> bool:
    """Whether every shorter beginning of the tokens can be had from these caches."""
    # One that is kept in chunks drops the first of them, and says nothing.
    return all(each.is_trimmable() and not getattr(each, "start_position", 0) for each in leaves(caches))


def always_cut(caches: Caches) -> bool:
    """Whether that will be so however many tokens these caches, still empty, come to hold."""
    windows = ("max_size", "chunk_size")
    return can_cut(caches) and not any(hasattr(each, name) for each in leaves(caches) for name in windows)


def size(caches: Caches) -> int:
    """Bytes."""
    return sum(array.nbytes for array in _arrays(caches))


def compute(caches: Caches) -> None:
    """Computes all that the caches hold: until then they hold on to what it is made from."""
    mx.eval(_arrays(caches))


class Sizes:
    """How many bytes the caches of a model take at most, by the number of tokens."""

    def __init__(self, model: Model, longest: int) -> None:
        """`longest` is the most tokens that one pass reads."""
        caches = model.new_caches()
        compute_after(model(mx.array([[0]]), caches), caches)
        self._longest = longest
        self._fixed = 0
        self._growing: list[tuple[int, int, int | None]] = []
        """Bytes a token, how many tokens memory is taken for at a time, and how many are held at most."""
        for cache in leaves(caches):
            self._measure(cache)

    def of(self, tokens: int) -> int:
        """Bytes for one sequence of so many tokens."""
        total = self._fixed
        for each, step, most in self._growing:
            held = tokens + step - 1
            total += each * (held if most is None else min(held, most))
        return total

    def _measure(self, cache: Any) -> None:
        keys = getattr(cache, "keys", None)
        if keys is None or isinstance(keys, tuple | list) or keys.ndim != 4:
            self._fixed += size([cache])
            return
        window = getattr(cache, "max_size", None)
        # What a pass reads stands behind the window until the next one.
        most = None if window is None else window + self._longest
        self._growing.append((-(-size([cache]) // keys.shape[2]), getattr(cache, "step", 1), most))


def compute_after(logits: mx.array, caches: Caches) -> None:
    """Computes the logits of a pass, and what it left in the caches."""
    mx.eval(logits, _arrays(caches))


def leaves(caches: Caches) -> list[Any]:
    """The caches without those that only hold others."""
    found: list[Any] = []
    for cache in caches:
        found += leaves(list(cache.caches)) if hasattr(cache, "caches") else [cache]
    return found


def _arrays(caches: Caches) -> list[mx.array]:
    arrays: list[mx.array] = []
    for cache in leaves(caches):
        for value in vars(cache).values():
            parts = value if isinstance(value, tuple | list) else (value,)
            arrays += [part for part in parts if isinstance(part, mx.array)]
    return arrays


def _copied(cache: Any) -> Any:
    twin = copy.copy(cache)
    for name, value in vars(cache).items():
        setattr(twin, name, _own(value))
    return twin


def _own(value: Any) -> Any:
    if isinstance(value, mx.array):
        return mx.contiguous(value)
    if isinstance(value, tuple | list):
        return type(value)(_own(each) for each in value)
    # A cache within a cache; all else (lengths, sizes) never changes in place.
    return _copied(value) if hasattr(value, "is_trimmable") else value


def _cut(cache: Any, length: int) -> None:
    if hasattr(cache, "caches"):
        for each in cache.caches:
            _cut(each, length)
        return
    if cache.offset > length:
        cache.trim(cache.offset - length)
    keys = cache.keys
    if isinstance(keys, mx.array) and not hasattr(cache, "max_size") and keys.shape[2] > length:
        # Room for more tokens is not worth keeping, and the copy shall not hold on to the whole.
        cache.keys, cache.values = (each[..., :length, :] + 0 for each in (keys, cache.values))
