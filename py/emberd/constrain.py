"""Holds answers to a constraint: draws among the allowed tokens, and reads those that are certain in one pass.

What is allowed is known to the `Constraint` (the core compiled it); a mask comes as bits. Nearly always some of the
highest logits that the graph has sorted are allowed, and then the others need not be looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from emberd._core import Sampling
from emberd.sampling import draw, highest

if TYPE_CHECKING:
    from emberd._core import Constraint
    from emberd.engine import Made, Request
    from emberd.parts import Rows
    from emberd.sampling import Room

GREEDY = Sampling(0.0, 1.0, 0, 0)
"""Of a request that asks for nothing but has a constraint: its tokens are not the graph's own argmax."""

FEW = 1024
"""So many allowed tokens are gathered and sorted; a row of all logits costs more than that."""

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_COUNTS = _BITS.sum(axis=1, dtype=np.uint8)
"""How many tokens each byte of a mask allows."""
_BARRED = np.where(_BITS, np.float32(0.0), np.float32(-np.inf)).astype(np.float32)
"""What is added to the eight logits that a byte of a mask stands for: to mask by bools takes four times as long."""

PAYS = {1: 2, 2: 4}
"""By how many answers run: the fewest certain tokens that are worth a pass of their own.

A pass over n tokens of one row costs what one token of n rows costs, most of it for the weights: alone, three passes over
one token cost more than one over three. Beside two others or more a row's token is nearly free, and the pass is not.
"""


def hold(request: Request) -> None:
    """Lets the tokens of a request with a constraint be drawn under it, greedy ones too."""
    if request.constraint is not None:
        request.held = Held(request.constraint)
        request.sampling = request.sampling or GREEDY


class Held:
    """Draws the tokens of one request under its constraint. Every call raises `ValueError` when the constraint cannot go on."""

    def __init__(self, constraint: Constraint) -> None:
        self.accept = constraint.accept
        self.forced = constraint.forced
        self._mask = constraint.mask

    def draw(
        self,
        values: NDArray[np.floating],
        ids: NDArray[np.int64],
        logits: NDArray[np.floating],
        sampling: Sampling,
        u: float,
        room: Room,
    ) -> int:
        """The token id that `u` falls on among those that are allowed; otherwise as `emberd.sampling.draw`."""
        certain = self.forced()
        if certain:
            return certain[0]
        if not np.isfinite(values[0]):
            raise ValueError(f"the highest logit is {values[0]}")
        mask = np.frombuffer(self._mask(), np.uint8)
        known = np.flatnonzero((mask[ids >> 3] >> (ids & 7).astype(np.uint8)) & 1)
        if sampling.temperature == 0 and len(known):
            return int(ids[known[0]])
        count = int(_COUNTS[mask].sum(dtype=np.int64))
        if len(known) == count:
            return draw(values[known], ids[known], values[known], sampling, u)
        if count <= FEW:
            tokens = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            few = logits[tokens]
            order = np.lexsort((tokens, -few))
            return draw(few[order], tokens[order], few[order], sampling, u)
        np.take(_BARRED, mask, axis=0, out=room.barred, mode="clip")
        np.add(logits, room.barred.reshape(-1)[: len(logits)], out=room.masked)
        best, best_ids = (values[known], ids[known]) if len(known) else highest(room.masked)
        return draw(best, best_ids, room.masked, sampling, u, room.weights)


class FastForward:
    """Reads what is certain to come in an answer in one pass, where that is faster than token by token.

    One row at a time, and never twice without a step of all rows between, so that the others wait for one short pass.
    """

    def __init__(self, rows: Rows, longest: int, pays: Mapping[int, int] = PAYS) -> None:
        """`longest` is the most tokens that one pass over a row takes; `pays` as `PAYS`."""
        self._rows = rows
        self._longest = longest
        self._pays = pays
        self._last = False
        self.ran = 0
        """Tokens of the last pass; 0 where the answer ended without one."""

    def next(self, running: list[Request]) -> int | None:
        """The row whose certain tokens are worth a pass now, if there is one."""
        least = self._pays.get(len(running))
        if self._last or least is None:
            self._last = False
            return None
        for row, request in enumerate(running):
            if len(self.certain(request)) >= least:
                self._last = True
                return row
        return None

    def run(self, row: int, request: Request, eos: frozenset[int]) -> Made:
        """Takes the certain tokens of a row, and the one after them unless the answer ends first.

        Raises `ValueError` as `Rows.draw`.
        """
        rows, sampler = self._rows, request.sampler
        assert sampler is not None  # its first token has been drawn
        left = request.max_tokens - request.made
        made = self.certain(request)[: min(left, self._longest - 1)]
        last, finish, self.ran = request.answer[-1], None, 0
        for token in made:
            sampler.take(token)
            request.answer.append(token)
            finish = request.finish(token, eos)
        if finish is None:  # else nobody needs the logits after them
            self.ran = 1 + len(made)
            rows.extend(row, [last, *made])
            token = rows.draw(row, request)
            request.answer.append(token)
            finish = request.finish(token, eos)
            rows.feed(row, token)
            made.append(token)
        return request.step(made, finish)

    @staticmethod
    def certain(request: Request) -> list[int]:
        """The tokens that are certain to come next in an answer and may be read at once."""
        # The logits of each token that is told are needed, and a pass over many gives the last one's.
        if request.held is None or request.sampling is None or request.sampling.top_logprobs is not None:
            return []
        try:
            return request.held.forced()
        except ValueError:  # told where its next token is drawn
            return []
