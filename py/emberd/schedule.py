"""What an engine that batches runs next, and how much of it: the order in which prompts are read, and the pace between answers.

A running answer gets its next token once in a pass over all of them, and what is read of prompts between two passes
makes it wait. `Pace` says how many tokens may be read there, from what passes have taken; `Queue` says of which
prompt. Nothing is run here, and time comes from a clock that the caller may replace.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emberd.engine import Request

BOUND = 2.2
"""How long a gap between two tokens of an answer may last beside a usual one; 2.5 is promised of 99 in 100."""

LEAST = 8
"""Tokens of a prompt that are worth a pass of their own. Of the default model one token takes 5 ms and eight take 14 (with
the operators of onnxruntime 12, and 30): in shorter pieces a prompt takes many times the work, and answers wait all the more."""

LONG_EVERY = 200
"""Passes over the answers after which one gap may be long, for a prompt of which less than `LEAST` may be read between
any two: 1 gap in 200 is not among 99 of 100, and beside one or two answers it is both the least work and soonest done."""

LONG_CHUNKS = 4
"""Chunks of prompts in a long gap: with 4 of 128 tokens of the default model it lasts 0.9 s."""

SHORT = 64
"""Tokens of a prompt that is read at once, whatever waits (110 ms of the default model): in pieces of what the bound
allows it would take twice the work, and as many passes over few answers. Eight clients that chat lose a fifth so."""

BURST_CHUNKS = 8
"""Chunks of prompts that are read before answers that have all just begun go on: what came together starts together."""

_RECENT = 512
"""Gaps between tokens that tell what is usual now."""

_USUAL = 0.25
"""Share of the recent gaps that may be shorter than the usual one."""

_GROWTH = 1.4
"""How much longer than the usual gap one may last where the usual one has a prompt in it."""

_FORGET = 0.95
"""What a pass still counts for after the next one, where the cost of passes is fitted."""

_ALIKE = 1e-6
"""A spread of the tokens of past passes, in squares, that says nothing of what one token more takes."""

_OUTLIER = 3.0
"""A pass that takes more than so many times what it should says more of other processes than of itself."""


class _Cost:
    """Seconds of a pass over tokens of a prompt as `fixed + each * tokens`: least squares older ones count ever less.

    Passes of one token are left out: of the runtime's own kernels those take half of what this would say.
    """

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._square = self._product = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        """Learns from a pass, or from the mean of some: the law is linear."""
        if tokens == 1:
            return
        if self._square > _ALIKE:
            seconds = min(seconds, _OUTLIER * self(tokens))
        self._weight = _FORGET * self._weight + 1.0
        off = tokens - self._tokens
        self._tokens += off / self._weight
        self._seconds += (seconds - self._seconds) / self._weight
        self._square = _FORGET * self._square + off * (tokens - self._tokens)
        self._product = _FORGET * self._product + off * (seconds - self._seconds)

    def __call__(self, tokens: float) -> float:
        """Seconds that a pass will take."""
        return max(self._seconds + self.each * (tokens - self._tokens), 0.0)

    @property
    def each(self) -> float:
        """Seconds of one token more. In proportion to the whole where all passes have been alike, and never far below."""
        whole = self._seconds / self._tokens if self._tokens else 0.0
        if self._square <= _ALIKE:
            return whole
        return min(max(self._product / self._square, 0.05 * whole), whole)

    @property
    def fixed(self) -> float:
        """Seconds that a pass takes beside its tokens."""
        return self(0)

    @property
    def known(self) -> bool:
        """Whether there has been a pass to learn from."""
        return self._weight > 0


class Pace:
    """How many tokens of prompts may be read between two passes over the running answers.

    No gap is to last longer than `bound` times a usual one. While prompts come one by one, the usual gap is a pass over
    the answers alone; where several wait, a pass over these answers and theirs. Where three in four of the recent gaps
    have had a prompt in them, the shortest of these is the usual one: under load the pieces grow little by little, since
    they cost the less a token the longer they are, and gaps stay even. After an idle time no load is known. Where the
    bound leaves too little to read, a prompt waits for a long gap, which there is once in `LONG_EVERY`.
    """

    def __init__(self, longest: int, bound: float = BOUND, clock: Callable[[], float] = time.perf_counter) -> None:
        """At most `longest` tokens; with a `bound` of infinity always so many. `clock` gives seconds."""
        self._longest = longest
        self._bound = bound
        self._clock = clock
        self._started = 0.0
        self._cost = _Cost()
        self._decodes: deque[float] = deque(maxlen=5)
        """Seconds of the last passes over the answers."""
        self._rows = 0
        """Answers in the last of them."""
        self._gaps: deque[float] = deque(maxlen=_RECENT)
        """Recent gaps, each as a multiple of the pass over the answers at its end."""
        self._waited = 0.0
        """Seconds of reading since the last pass over the answers."""
        self._last = LEAST // 2
        """Tokens of the last piece."""
        self._credit = 1.0
        """Long gaps that may be; at most one."""
        self._long = False
        """Whether this gap is a long one."""
        self._left: int | None = None
        """Tokens that may still be read before the next pass over the answers; `None` as long as nothing has been."""

    def start(self) -> None:
        """A pass begins."""
        self._started = self._clock()

    def rest(self) -> None:
        """No answer is running: nobody waits."""
        self._gaps.clear()
        self._decodes.clear()
        self._credit = 1.0
        self._next_gap()

    def decoded(self, rows: int) -> None:
        """The pass that began was one over so many answers."""
        seconds = self._clock() - self._started
        self._rows = rows
        self._decodes.append(seconds)
        usual = median(self._decodes)
        self._gaps.append((self._waited + seconds) / usual if usual else 1.0)
        if self._long and self._left:  # a prompt that took less than a long gap allows leaves some of it to the next
            self._credit += self._left / (LONG_CHUNKS * self._longest)
        self._credit = min(self._credit + 1.0 / LONG_EVERY, 1.0)
        self._next_gap()

    def checked(self, tokens: int, alone: bool) -> None:
        """The pass that began checked guesses of one answer, over so many tokens; `alone`, when no other answer waited."""
        seconds = self._clock() - self._started
        self._cost.add(tokens, seconds)
        if alone:  # a gap of its own, in which more than one token came
            self._credit = min(self._credit + tokens / LONG_EVERY, 1.0)
            self._next_gap()
        else:
            self._waited += seconds

    def read(self, passes: list[int]) -> None:
        """What began were passes that read so many tokens each."""
        seconds = self._clock() - self._started
        self._cost.add(sum(passes) / len(passes), seconds / len(passes))
        self._waited += seconds
        self._left = max((self._left or 0) - sum(passes), 0)

    def tokens(self, unread: int, prompts: int, fresh: bool) -> int:
        """How many tokens may be read now, while answers are running, of a prompt that has `unread` left.

        `prompts` is how many wait, with this one, and `fresh` says that it has not begun. 0: the answers are to go on.
        """
        if self._left is not None:
            return min(self._left, self._longest)
        cost = self._cost
        if self._bound == math.inf or not self._decodes or (cost.known and not cost.each):
            return self._longest
        if fresh and unread <= SHORT:
            return min(SHORT, self._longest)
        piece = self._piece(prompts) if cost.known else 0
        if piece >= min(LEAST, unread, self._longest):
            return piece
        if self._credit < 1.0:
            return 0
        self._credit, self._long = 0.0, True
        self._left = LONG_CHUNKS * self._longest
        return self._longest

    @property
    def reading(self) -> bool:
        """Whether something has been read since the last pass over the answers."""
        return self._left is not None

    def another(self) -> int:
        """The tokens that could be read for what it takes to begin one more pass."""
        return 0 if self._bound == math.inf or not self._cost.each else int(self._cost.fixed / self._cost.each)

    def _piece(self, prompts: int) -> int:
        """The tokens for which there is time in a gap within the bound."""
        cost, decode = self._cost, median(self._decodes)
        # Prompts that wait behind this one will be answers, too, and make the passes longer that are usual then.
        more = prompts - 1
        usual = max(decode + cost.each * more, cost(self._rows + more) if more else 0.0)
        gap = max(self._bound * usual, _GROWTH * self._usual() * decode)
        count = int((gap - decode - self._waited - cost.fixed) / cost.each)
        # At most twice as many as the last time: an estimate that is far off is seen before it is followed.
        count = min(count, 2 * self._last, self._longest)
        self._last = max(count, LEAST // 2)
        return count

    def _usual(self) -> float:
        """How long a usual gap is, as a multiple of a pass over the answers. The unknown ones were no longer than that."""
        index = int(_USUAL * _RECENT) - (_RECENT - len(self._gaps))
        return max(sorted(self._gaps)[index], 1.0) if index >= 0 else 1.0

    def _next_gap(self) -> None:
        self._waited, self._long = 0.0, False
        self._left = None


class Queue:
    """The prompts that are being read or wait for it: first those that had to make room, each in order of arrival.

    The shortest and the oldest take turns, so that long ones hold no short one up and are not held up for ever.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._arrivals = 0
        self._shortest_next = False

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """Queues a request that has come."""
        self._arrivals += 1
        request.arrival = self._arrivals
        self._requests.append(request)

    def add_again(self, request: Request) -> None:
        """Queues a request that had to make room: before all that did not."""
        request.waits_again = True
        insort(self._requests, request, key=lambda each: (not each.waits_again, each.arrival))

    def remove(self, request: Request) -> None:
        """Takes out a request, which is in it."""
        self._requests.remove(request)
        request.waits_again = False

    def clear(self) -> None:
        """Takes out all."""
        self._requests.clear()

    def begun(self) -> list[Request]:
        """Those that have a row."""
        return [each for each in self._requests if each.row is not None]

    def turn(self) -> None:
        """What `next` gave is read."""
        self._shortest_next = not self._shortest_next

    def next(
        self, may_begin: Callable[[Request], bool], longest: int | None = None, fresh: bool = False
    ) -> Request | None:
        """The prompt to read next; with `longest`, one that has no more tokens left than that; or one that is `fresh`.

        `may_begin` says whether a request that has no row could have one. While the first of them could not, no other
        one begins either: what it needs would go to those that need less.
        """
        waiting = next((each for each in self._requests if each.row is None), None)
        begins = waiting is not None and may_begin(waiting)
        prompts = []
        for each in self._requests:
            if each.row is not None or each is waiting:
                fits = each is not waiting or begins
            else:
                fits = begins and not (waiting and waiting.waits_again) and may_begin(each)
            if fits and (longest is None or each.unread <= longest) and not (fresh and each.row is not None):
                prompts.append(each)
        if self._shortest_next or longest is not None:
            return min(prompts, key=lambda each: each.unread, default=None)
        return prompts[0] if prompts else None
