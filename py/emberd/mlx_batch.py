"""The sequences whose answers run together on MLX, over mlx-lm's caches for batches.

Each pass reads one token of every sequence. A sequence alone keeps its own caches, for which attention needs no mask; two and more
are merged, and padded on the left to the longest. The next pass can be under way while Python still handles
the tokens of this one (`step`). Who the sequences are, and how a token is drawn, is decided elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from emberd.mlx_caches import compute, compute_after, copied

if TYPE_CHECKING:
    from collections.abc import Sequence

    from emberd.mlx_model import Caches, Model


class Batch:
    """Sequences at the places `0..len(batch)`, in the order in which they came."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._caches: Caches = []
        self._lengths: list[int] = []
        """Tokens that the caches hold of each."""
        self._next: list[int] = []
        """The token of each that the next pass reads, unless the pass is under way."""
        self._ahead: tuple[mx.array, mx.array] | None = None
        """The logits of the next pass and the likeliest tokens, where it has been started."""
        self._logits: mx.array | None = None
        self._rows: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def under_way(self) -> bool:
        """Whether the next pass has been started."""
        return self._ahead is not None

    def length(self, place: int) -> int:
        """Tokens of a sequence that its caches hold."""
        return self._lengths[place]

    def join(self, caches: Caches, length: int, token: int) -> None:
        """Adds a sequence of `length` tokens in caches of its own, which are the batch's from now on, and its next token."""
        if self._ahead is not None:  # the others have had their next pass
            logits = self._model(mx.array([[token]]), caches)[:, -1]
            compute_after(logits, caches)
            own = logits, mx.argmax(logits, axis=-1)
            self._ahead, length = tuple(map(mx.concatenate, zip(self._ahead, own, strict=True))), length + 1
        if not self._lengths:
            self._caches = caches
        else:
            if len(self._lengths) == 1:
                self._caches = _merged([self._caches])
            for held, new in zip(self._caches, _merged([caches]), strict=True):
                held.extend(new)
        self._lengths.append(length)
        self._next.append(token)

    def leave(self, places: list[int]) -> None:
        """Removes the sequences at these places; those behind them move up."""
        gone = set(places)
        keep = [place for place in range(len(self._lengths)) if place not in gone]
        if len(keep) == len(self._lengths):
            return
        if not keep:
            self._caches, self._ahead = [], None
        elif len(keep) == 1:
            self._caches = self._taken_out(keep[0])
        else:
            for cache in self._caches:
                cache.filter(keep)
        if self._ahead is not None:
            logits, best = self._ahead
            self._ahead = logits[mx.array(keep)], best[mx.array(keep)]
        self._lengths = [self._lengths[place] for place in keep]
        self._next = [self._next[place] for place in keep]
        self._logits = self._rows = None

    def step(self, ahead: bool) -> list[int]:
        """Runs the next token of every sequence, and returns the likeliest one after each.

        With `ahead`, these tokens are what the sequences go on with, and the pass that reads them is started before
        they are known here; `feed` must not be called then.
        """
        started, self._ahead = self._ahead, None
        self._logits, best = started or self._start(mx.array(self._next))
        self._rows = None
        if ahead:
            self._ahead = self._start(best)
        # What is waited for here is this pass: the next one was handed over after it, and for itself.
        self._next = best.tolist()
        return list(self._next)

    def check(self, guesses: Sequence[int]) -> list[int]:
        """Runs the next token of the only sequence and guesses of those after it. Returns the likeliest token after each.

        `logits` gives the logits after each. `cut` takes those back that are wrong, and `feed` says how it goes on.
        """
        logits = self._model(mx.array([[*self._next, *guesses]]), self._caches)[0]
        self._lengths[0] += 1 + len(guesses)
        self._logits, self._rows = logits, None
        tokens: list[int] = mx.argmax(logits, axis=-1).tolist()
        return tokens

    def cut(self, count: int) -> None:
        """Takes the last `count` tokens of the only sequence back."""
        for cache in self._caches if count else ():
            cache.trim(count)
        self._lengths[0] -= count

    def feed(self, place: int, token: int) -> None:
        """Sets the token that a sequence goes on with, where it is not the likeliest."""
        self._next[place] = token

    def logits(self, place: int) -> NDArray[np.float32]:
        """The logits `[vocab]` of a sequence after a step, until one leaves."""
        rows = self._rows
        if rows is None:
            assert self._logits is not None
            rows = self._rows = np.array(self._logits.astype(mx.float32))
        row: NDArray[np.float32] = rows[place]
        return row

    def copy(self, place: int) -> Caches:
        """Caches of its own that hold what those of the batch hold of a sequence."""
        return self._taken_out(place, own=True)

    def close(self) -> None:
        """Frees everything."""
        self.leave(list(range(len(self._lengths))))

    def _start(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """Starts a pass over one token of each sequence: its logits, and the likeliest tokens."""
        self._lengths = [length + 1 for length in self._lengths]
        logits = self._model(tokens[:, None], self._caches)[:, -1]
        best = mx.argmax(logits, axis=-1)
        mx.async_eval(logits, best)
        return logits, best

    def _taken_out(self, place: int, own: bool = False) -> Caches:
        if len(self._lengths) == 1:
            return copied(self._caches) if own else self._caches
        caches = [cache.extract(place) for cache in self._caches]
        compute(caches)
        return caches


def _merged(sequences: list[Caches]) -> Caches:
    return [layers[0].merge(layers) for layers in (list(each) for each in zip(*sequences, strict=True))]
