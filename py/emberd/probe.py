"""Finds out by running it how a graph keeps its cache, and what it can be trusted with: a few passes over six tokens, once at load.

What a graph's inputs are called does not tell whether it writes into shared buffers, reads a prompt in pieces, or
leaves padding alone; its numbers do. All comparisons are of logits, by the size of their difference relative to their
own spread: kernels for one token and for several differ by up to a few hundredths in it (four-bit weights with
activations rounded to eight bits), a cache that is read wrongly by one or so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from emberd.binding import Binding
from emberd.engine import EngineError
from emberd.layout import HINT

if TYPE_CHECKING:
    from pathlib import Path

    import onnxruntime as ort
    from numpy.typing import NDArray

    from emberd.layout import Inputs

    Arrays = list[NDArray[np.generic]]

PROMPT = 5
"""Tokens that are read in one pass, and in pieces of 3 and 2; one more follows them."""

CAPACITY = 16
"""Tokens, of the shared buffers that are tried."""

UNUSED = 3.0
"""What shared buffers hold where there is no token. A graph that computes with a copy of its cache, in another type say,
would write all of it with every pass, to the last token that there is room for: that is not sharing."""

PADS = 11
"""Places before the first token in the padded run: more than tokens, so that whatever leaks out of them shows."""

SAME_PASS = 0.02
"""The largest difference between passes of the same tokens and shapes: kernels are the same, and the cache alone is another."""

SAME_TEXT = 0.2
"""The largest difference between a prompt in one pass and in pieces that is laid to kernels; beyond, one pass reads it."""

SAME_LAYOUT = 0.5
"""The same for a token after a prompt, which any layout must get right: beyond, it is not the graph's. Weights of eight
bits with one scale for all tokens of a pass differ much where the first token's is far from the others'."""


class Found(NamedTuple):
    """What a graph does, beside what its inputs say."""

    shared: bool
    """Its present may be written into the memory of its past."""
    chunks: bool
    """A prompt may be read in several passes of several tokens, and so continued from where an earlier one was left."""
    padding: bool
    """Sequences of several lengths may decode together, padded on the left."""
    wide: bool
    """It gives logits for every token of a pass, not of the last one alone."""
    vocab_size: int


class _Outcome(NamedTuple):
    logits: NDArray[np.generic]
    """`[rows, tokens or 1, vocab]`."""
    past: Arrays
    states: Arrays

    @property
    def last(self) -> NDArray[np.float64]:
        """The logits of the last token, `[rows, vocab]`."""
        return self.logits[:, -1].astype(np.float64)


class Probe:
    """Passes over one graph with caches of either layout."""

    def __init__(self, session: ort.InferenceSession, inputs: Inputs, vocab_size: int | None) -> None:
        """`vocab_size` bounds the token ids that are tried, where it is known."""
        self._session = session
        self._inputs = inputs
        self._outputs = [each.name for each in session.get_outputs()]
        self._ids = (1 + 7 * np.arange(PROMPT + 1)) % (vocab_size or 8)

    def find(self, graph: Path) -> Found:
        """Tries the layouts. Raises `EngineError` where the graph runs in neither, with what became of each."""
        faults: dict[str, str] = {}
        model = None
        try:
            first = self._concatenated(0, PROMPT)
            model = first, self._concatenated(PROMPT, 1, first)
        except Exception as error:  # onnxruntime raises a different private type for each way a graph can be wrong
            faults["concatenated caches"] = " ".join(str(error).split())
        for name, shared in (("shared buffers", True), ("concatenated caches", False)):
            if name in faults or (shared and not self._can_share):
                continue
            try:
                found = self._find(shared, model)
            except Exception as error:
                faults[name] = " ".join(str(error).split())
            else:
                if found is not None:
                    return found
                faults[name] = "its logits after a prompt are not those of one pass over all"
        raise EngineError(
            f"{graph} cannot be run{''.join(f'; with {name}: {why}' for name, why in faults.items())}", HINT
        )

    @property
    def _can_share(self) -> bool:
        inputs = self._inputs
        # One value of these holds for all rows, whose lengths differ.
        return inputs.mask and not inputs.cache_position and not inputs.branch

    def _find(self, shared: bool, model: tuple[_Outcome, _Outcome] | None) -> Found | None:
        """What the graph does in one layout; `None` where it is not the graph's own.

        `model` is a pass over a prompt and one over the next token with concatenated caches, where they ran.
        """
        run = self._shared if shared else self._concatenated
        prompt = run(0, PROMPT)
        last = prompt.last
        after = run(PROMPT, 1, prompt)
        if shared and not all((buffer[:, :, PROMPT + 1 :] == UNUSED).all() for buffer in prompt.past):
            raise ValueError("all of the past is written anew")
        if shared and model is not None:
            # The same passes: kernels are no excuse.
            if not (_alike(last, model[0].last, SAME_PASS) and _alike(after.last, model[1].last, SAME_PASS)):
                return None
        elif not _alike(after.last, run(0, PROMPT + 1).last, SAME_LAYOUT):
            return None
        try:
            chunks = _alike(run(3, PROMPT - 3, run(0, 3)).last, last, SAME_TEXT)
        except Exception:  # a graph that reads several tokens only where there is no past
            chunks = False
        padding = not shared and self._padding(run(0, PROMPT))
        return Found(shared, chunks, padding, wide=prompt.logits.shape[1] > 1, vocab_size=prompt.logits.shape[2])

    def _padding(self, past: _Outcome) -> bool:
        """Whether the next token of two rows has the same logits with padding before them as without."""
        if not self._inputs.mask:
            return False
        noise = np.random.Generator(np.random.PCG64(1))
        bare, padded = [], []
        for array in past.past:
            twice = np.concatenate([array, array])
            pads = noise.standard_normal((2, twice.shape[1], PADS, twice.shape[3])).astype(array.dtype)
            bare.append(twice)
            padded.append(np.concatenate([pads, twice], axis=2))
        states = [np.concatenate([array, array]) for array in past.states]
        try:
            one = self._concatenated(PROMPT, 1, _Outcome(past.logits, bare, states), rows=2)
            other = self._concatenated(PROMPT + PADS, 1, _Outcome(past.logits, padded, states), rows=2, pads=PADS)
        except Exception:  # a graph that is made for one row
            return False
        return _alike(other.last, one.last, SAME_PASS)

    def _concatenated(
        self, start: int, count: int, after: _Outcome | None = None, rows: int = 1, pads: int = 0
    ) -> _Outcome:
        """A pass with tensors of just the length in use; `start` counts the padding."""
        inputs = self._inputs
        past, states = self._empty(0) if after is None else (after.past, after.states)
        feeds = inputs.beside(start, count, np.full(rows, pads))
        feeds["input_ids"] = np.tile(self._ids[start - pads : start - pads + count], (rows, 1))
        feeds |= {each.past: array for each, array in zip(inputs.layers, past, strict=True)}
        feeds |= {each.past: array for each, array in zip(inputs.states, states, strict=True)}
        given = dict(zip(self._outputs, self._session.run(None, feeds), strict=True))
        present = [given[each.present] for each in inputs.layers]
        for array in present:
            if array.shape[0] != rows or array.shape[2] != start + count:
                raise ValueError(f"a present of shape {array.shape} after {start + count} tokens")
        return _Outcome(given["logits"], present, [given[each.present] for each in inputs.states])

    def _shared(self, start: int, count: int, after: _Outcome | None = None) -> _Outcome:
        """A pass that writes into the buffers that it reads."""
        inputs = self._inputs
        past, states = self._empty(CAPACITY, UNUSED) if after is None else (after.past, after.states)
        binding = Binding(self._session)
        width = CAPACITY if count == 1 else 0  # as in a batch, where the rows' lengths differ, and as alone
        for name, value in inputs.beside(start, count, np.zeros(1, np.int64), width).items():
            binding.read(name, value)
        binding.read("input_ids", self._ids[None, start : start + count].copy())
        for each, buffer in zip(inputs.layers, past, strict=True):
            binding.read(each.past, buffer)
            binding.write(each.present, buffer)
        present = [np.empty_like(array) for array in states]
        for state, array, fresh in zip(inputs.states, states, present, strict=True):
            binding.read(state.past, array)
            binding.write(state.present, fresh)
        return _Outcome(binding.run_and_read("logits"), past, present)

    def _empty(self, capacity: int, value: float = 0.0) -> tuple[Arrays, Arrays]:
        inputs = self._inputs
        past: Arrays = [np.full((1, each.heads, capacity, each.width), value, each.dtype) for each in inputs.layers]
        return past, [np.zeros((1, *each.shape), each.dtype) for each in inputs.states]


def _alike(one: NDArray[np.float64], other: NDArray[np.float64], tolerance: float) -> bool:
    spread = float(np.linalg.norm(other - other.mean(axis=-1, keepdims=True)))
    # Not `>`: what is no number is not alike.
    return one.shape == other.shape and float(np.linalg.norm(one - other)) <= tolerance * spread
