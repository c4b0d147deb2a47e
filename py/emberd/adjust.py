"""Changes the logits of single tokens before one is chosen: penalties on what has been said, and biases.

What each does, and in which order, is in `docs/port.md`. A request touches few tokens: those of its prompt, its answer
and its biases. All others keep the order that the graph has sorted them into, which is why its highest logits are
still enough after the change (`Adjustments.highest`). How a token is chosen is in `sampling`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from emberd._core import Sampling


class Adjustments:
    """The tokens that one request touches, and what becomes of their logits."""

    @classmethod
    def of(cls, sampling: Sampling, prompt: list[int]) -> Adjustments | None:
        """What `sampling` changes in the answer to `prompt`; `None` where that is nothing."""
        penalties = sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
        bias = sampling.logit_bias
        return None if penalties == (1.0, 0.0, 0.0) and not bias else cls(*penalties, bias, prompt)

    def __init__(
        self, repetition: float, presence: float, frequency: float, bias: dict[int, float], prompt: list[int]
    ) -> None:
        self._repetition, self._presence, self._frequency = repetition, presence, frequency
        self._penalises = repetition != 1.0 or presence != 0.0 or frequency != 0.0
        seen = dict.fromkeys(prompt if repetition != 1.0 else ())
        tokens = list(dict.fromkeys([*bias, *seen]))
        self._place = {token: place for place, token in enumerate(tokens)}
        size = len(tokens)
        # One entry for each token that is touched; the arrays are longer, so that tokens of the answer find room.
        self._ids = np.zeros(size + 64, np.int64)
        self._ids[:size] = tokens
        self._bias = np.zeros(size + 64, np.float32)
        self._bias[: len(bias)] = list(bias.values())
        self._counts = np.zeros(size + 64, np.float32)
        """How often each has come in the answer."""
        self._seen = np.array([*(token in seen for token in tokens), *[False] * 64])
        """Whether each has come in prompt or answer."""
        self._touched: NDArray[np.bool_] | None = None
        """`[vocab]`: whether a token has an entry."""

    def count(self, token: int) -> None:
        """Adds a token to the answer."""
        if not self._penalises:
            return
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids, self._bias, self._counts = (
                np.concatenate([each, np.zeros_like(each)]) for each in (self._ids, self._bias, self._counts)
            )
            self._seen = np.concatenate([self._seen, np.zeros_like(self._seen)])
        self._ids[place] = token
        self._counts[place] += 1
        self._seen[place] = True
        if self._touched is not None:
            self._touched[token] = True

    def apply(self, logits: NDArray[np.floating], out: NDArray[np.float32]) -> NDArray[np.float32]:
        """Writes the adjusted row of `logits` `[vocab]` to `out`, and returns it. Some 20 µs for 49,152 logits."""
        np.copyto(out, logits)
        size = len(self._place)
        ids, counts = self._ids[:size], self._counts[:size]
        changed = out[ids]
        if self._repetition != 1.0:
            penalty = np.float32(self._repetition)
            weaker = np.where(changed > 0, changed / penalty, changed * penalty)
            changed = np.where(self._seen[:size], weaker, changed)
        if self._frequency:
            changed -= np.float32(self._frequency) * counts
        if self._presence:
            changed -= np.float32(self._presence) * (counts > 0)
        changed += self._bias[:size]
        out[ids] = changed
        return out

    def highest(
        self, values: NDArray[np.floating], ids: NDArray[np.int64], row: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The highest logits of the adjusted `row`, in descending order, of equal ones the lower id first, and their ids.

        `values` and `ids` are the highest logits of the row as it was, in the same order. Tokens that are neither among
        them nor touched come after the last of them in this order. So the untouched ones among them, with every touched one
        that now comes before the last, begin the order of the whole row. How many that are depends on what is touched; it
        can be none.
        """
        if self._touched is None:
            self._touched = np.zeros(len(row), np.bool_)
            self._touched[self._ids[: len(self._place)]] = True
        touched = self._ids[: len(self._place)]
        if len(ids) < len(row):
            last, level = ids[-1], row[touched]
            touched = touched[(level > values[-1]) | ((level == values[-1]) & (touched < last))]
        tokens = np.concatenate([ids[~self._touched[ids]], touched])
        logits = row[tokens]
        order = np.lexsort((tokens, -logits))
        return logits[order], tokens[order]
