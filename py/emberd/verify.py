"""Checks guessed tokens in one pass, where that is likely to be faster than a pass for each of them.

A pass that reads a row's next token and `k` guessed ones after it gives the logits that a plain run would have after
each. From these tokens are chosen one by one, each as a plain run would choose it; as long as they are the guessed
ones, the next logits are right too. So a guess changes the pace and never the answer, sampled or not. What is guessed
is in `speculate`; here is decided what is checked, from what passes have taken.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

from emberd.speculate import Drafter, Rates

if TYPE_CHECKING:
    from emberd.engine import Request
    from emberd.parts import Rows

MARGIN = 1.6
"""How many times faster than plain passes a check has to promise to be: estimates err."""

PATIENCE = 1.2
"""How long checks for one answer may make others wait between two of their tokens, in plain passes."""

_SAMPLES = 5
_ENOUGH = 3
"""Samples of one kind of pass that are believed."""

LOOKED_AT = 4
"""Answers that are looked at for a guess between two plain passes, in turn where more run: what comes after a pass finds
the processor's caches full of weights, and to look at 16 answers then takes 0.3 ms of the default model's 48."""

_FORGET = 256
"""Plain passes after which a sample of a check is forgotten: one that was slow for other reasons is tried again."""


class Costs:
    """Seconds that passes take. What has not been seen yet is taken to cost, beside what has, what it does on two cores of an x86 server."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._plain: dict[int, deque[float]] = {}
        self._checks: dict[int, deque[float]] = {}
        """Of checks by the bits of the tokens guessed: as multiples of `_usual_check`, like those of `_plain`."""
        self._unit: deque[float] = deque(maxlen=_SAMPLES)
        self._medians: dict[tuple[bool, int], float] = {}
        self._age = 0

    @property
    def known(self) -> bool:
        """Whether enough passes have been seen to say anything."""
        return len(self._unit) >= _ENOUGH

    def plain(self, rows: int) -> float:
        """Of a pass over the next tokens of so many rows."""
        return self._multiple((False, rows)) * _usual_plain(rows)

    def check(self, tokens: int) -> float:
        """Of a pass over so many tokens of one row, at least 2."""
        return self._multiple((True, (tokens - 1).bit_length())) * _usual_check(tokens)

    def note_plain(self, rows: int, seconds: float) -> None:
        """Learns from a pass over rows."""
        self._unit.append(seconds / _usual_plain(rows))
        samples = self._plain.setdefault(rows, deque(maxlen=_SAMPLES))
        samples.append(seconds / _usual_plain(rows))
        self._medians[False, rows] = median(samples)
        self._age += 1
        if self._age % _FORGET == 0:
            for kind, checks in self._checks.items():
                if checks:
                    checks.popleft()
                self._believe(kind)

    def note_check(self, tokens: int, seconds: float) -> None:
        """Learns from a check."""
        kind = (tokens - 1).bit_length()
        self._checks.setdefault(kind, deque(maxlen=_SAMPLES)).append(seconds / _usual_check(tokens))
        self._believe(kind)

    def _believe(self, kind: int) -> None:
        samples = self._checks[kind]
        if len(samples) >= _ENOUGH:
            self._medians[True, kind] = median(samples)
        else:
            self._medians.pop((True, kind), None)

    def _multiple(self, kind: tuple[bool, int]) -> float:
        """What passes of a kind take beside the usual; what all passes do where it is not known."""
        known = self._medians.get(kind)
        return known if known is not None else median(self._unit) if self._unit else 0.0


def _usual_plain(rows: int) -> float:
    """In passes over one row: 2 rows take 2.3, 8 take 3.9 (kernels for one row are others)."""
    return 1.0 if rows == 1 else 1.75 + 0.27 * rows


def _usual_check(tokens: int) -> float:
    """In passes over one row: 2 tokens take 2.2, 8 take 3.3, 32 take 7.3."""
    return 1.9 + 0.17 * tokens


class Speculation:
    """Decides between plain passes and checks for the rows of an engine, and runs both."""

    def __init__(self, rows: Rows, longest: int, costs: Costs | None = None, beside: bool = True) -> None:
        """`longest` is the most guessed tokens that a pass can check; below 1: it can check none. Without `beside` an
        answer is guessed only while no other one runs.
        """
        self._rows = rows
        self._beside = beside
        self._longest = longest
        self._costs = costs or Costs()
        self._rates = Rates()
        self._waited = 0.0
        """Seconds of checks since the last plain pass."""
        self._checked: set[int] = set()
        """The requests that they were for."""
        self._passes = 0
        """Plain passes so far: they tell whose turn it is."""

    def decode(self, count: int) -> None:
        """A plain pass over the rows `0..count`."""
        start = self._costs.clock()
        self._rows.decode(count)
        self._costs.note_plain(count, self._costs.clock() - start)
        self._waited = 0.0
        self._passes += 1
        self._checked.clear()

    def guess(self, running: list[Request]) -> tuple[int, list[int]] | None:
        """The row whose answer goes on by a check, and the tokens to check; `None` where a plain pass over all is better.

        Of answers that run side by side each has at most one check between two plain passes, and no more are made than
        the others can wait for. Of more than `LOOKED_AT` they take turns.
        """
        if self._longest < 1 or not self._costs.known or (len(running) > 1 and not self._beside):
            return None
        plain = self._costs.plain(len(running))
        patience = PATIENCE * plain - self._waited if len(running) > 1 else None
        best: tuple[float, int, list[int]] | None = None
        turns = -(-len(running) // LOOKED_AT)
        for row in range(self._passes % turns, len(running), turns):
            request = running[row]
            limit = min(self._longest, request.max_tokens - request.made - 1)
            if request.speculation is not None:
                limit = min(limit, request.speculation)
            if limit < 1 or (patience is not None and request.id in self._checked):
                continue
            drafter = request.drafter
            if drafter is None:
                drafter = request.drafter = Drafter(request.prompt, self._rates)
            drafter.follow(request.answer)
            depth, gain = self._depth(drafter, limit, plain / len(running), patience)
            if depth and (best is None or gain > best[0]):
                best = (gain, row, drafter.draft(depth))
        return best and best[1:]

    def check(self, row: int, request: Request, draft: list[int], eos: frozenset[int]) -> tuple[list[int], str | None]:
        """Runs a check: the tokens that a plain run would make, the first `len(draft) + 1` of them or up to the first that was not
        guessed, and the finish. Raises `ValueError` when the logits after the row's own token are NaN.
        """
        rows, start = self._rows, self._costs.clock()
        length = rows.length(row)
        rows.check(row, draft)
        seconds = self._costs.clock() - start
        self._costs.note_check(len(draft) + 1, seconds)
        self._waited += seconds
        self._checked.add(request.id)
        made: list[int] = []
        finish: str | None = None
        for place in range(len(draft) + 1):
            rows.look(row, place)
            try:
                token = rows.draw(row, request)
            except ValueError:
                if not made:
                    raise
                break  # the next plain pass comes to the same logits, and says so
            made.append(token)
            request.answer.append(token)
            finish = request.finish(token, eos)
            if finish is not None or draft[place : place + 1] != [token]:
                break
        rows.keep(row, length + len(made))
        rows.feed(row, made[-1])
        return made, finish

    def _depth(self, drafter: Drafter, limit: int, price: float, patience: float | None) -> tuple[int, float]:
        """How many guessed tokens to check, 0 for none, and how much faster than plain passes that promises to be."""
        best, gain = 0, MARGIN
        if not drafter.agreed:
            return best, gain
        chance = expected = 1.0
        for depth in range(1, limit + 1):
            chance *= drafter.rates.chance(drafter.agreed + depth - 1)
            expected += chance
            cost = self._costs.check(depth + 1)
            if chance < 0.05 or (patience is not None and cost > patience):
                break
            if expected * price > gain * cost:
                best, gain = depth, expected * price / cost
        return best, gain
