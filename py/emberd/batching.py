"""Continuous batching: what a step runs, for engines whose answers decode together and whose prompts are read piece by piece.

Runs in each step either some of somebody's prompt or one token for every running answer; the two take turns. Only
answers that have all just begun wait for more: for short prompts that came with theirs. How much of a prompt is read,
and of which, is in `schedule`; how much memory requests may take in `budget`; how a token is drawn in `sampling`. How
a pass is run, where its keys and values lie, and what is kept of them for later prompts is each engine's own (`onnx`, `mlx`).
One answer may get several tokens in a pass of its own: certain ones (`constrain`), or guessed ones that are checked (`verify`).

Where the memory for keys and values is used up, prompts wait; and when the running answers outgrow it, the newest of
them makes room: its tokens are read again when there is more, and it goes on as if nothing had been. Its keys and
values are a function of its tokens, and what its sampler knows stays with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from emberd.constrain import hold
from emberd.engine import Request, is_admit, is_cancel, is_forget
from emberd.schedule import BURST_CHUNKS, SHORT, Queue

if TYPE_CHECKING:
    from collections.abc import Iterable

    from emberd._core import Capabilities
    from emberd.constrain import FastForward
    from emberd.engine import Fail, Made, Order, Step
    from emberd.parts import Budget, Rows, Snapshots
    from emberd.schedule import Pace
    from emberd.verify import Speculation

SAVES = 2
"""Running answers of which more is kept in one step: over onnxruntime a copy of 64 tokens of the default model takes 2 ms."""

PREFILL_CHUNK = 128
"""The most prompt tokens in one step: what is cancelled is seen after it."""


class BatchEngine(ABC):
    """Prompts are read chunk by chunk, and then their answers decode together. Request `_running[i]` is in row `i`."""

    read_again: int
    """Tokens at the end of a prompt that are run even where they are kept: the last one at least, for its logits."""

    def __init__(
        self,
        capabilities: Capabilities,
        rows: Rows,
        snapshots: Snapshots,
        budget: Budget,
        speculation: Speculation,
        forward: FastForward,
        pace: Pace,
        chunk: int,
        fail: Fail,
    ) -> None:
        """At most `chunk` tokens of prompts are read in a step while answers run."""
        self.capabilities = capabilities
        self._eos = frozenset(capabilities.eos_ids)
        self._max_batch = capabilities.max_batch
        self._chunk = chunk
        self._fail = fail
        self._rows = rows
        self._snapshots = snapshots
        self._budget = budget
        self._speculation = speculation
        self._forward = forward
        self._pace = pace
        self._prompts = Queue()
        """Those that are being read have a row."""
        self._running: list[Request] = []
        self._burst = 0
        """Chunks read since an answer had more than its first token."""

    @property
    def busy(self) -> bool:
        """Whether any request is in flight."""
        return bool(self._running or self._prompts)

    def take(self, order: Order) -> None:
        """Queues a request, or forgets one."""
        if is_admit(order):
            self._take(Request(order))
        elif is_forget(order):
            self._snapshots.forget(order.snapshot)
        elif is_cancel(order):
            self.drop((order.id,))

    def step(self) -> list[Step]:
        """Some of the prompts or one token for every running answer, in turn where there are both.

        As long as every answer is at its first token, prompts that fit into a chunk go first, for `BURST_CHUNKS`:
        requests that came together then run in rows of like lengths, on which attention is fastest.
        """
        if not self._running:
            self._burst = 0
            self._pace.rest()
        request, count = self._next_prompt(), self._chunk
        if request is not None and self._running:
            if self._burst:
                request = self._next_prompt(self._chunk) if self._burst < BURST_CHUNKS else None
            else:
                request, count = self._between(request)
        self._pace.start()
        if request is not None:
            if self._burst or not self._running:
                self._burst += 1
            return self._prefill(request, count)
        self._burst = 0
        self._make_room()
        if not self._running:
            return []
        alone = len(self._running) == 1
        if (forced := self._forced()) is not None:
            steps = self._force(forced)
            if self._forward.ran:
                self._pace.checked(self._forward.ran, alone)
            return steps
        if (guess := self._guess()) is not None:
            steps = self._check(*guess)
            self._pace.checked(len(guess[1]) + 1, alone)
            return steps
        if steps := self._decode():
            self._pace.decoded(len(steps))
        return steps

    def drop(self, gone: Iterable[int]) -> None:
        """Forgets requests and frees their rows."""
        ids = set(gone)
        if not ids:
            return
        for request in [each for each in self._prompts if each.id in ids]:
            if request.row is not None:
                self._save(request, request.row)
            self._forget(request)
        left = [row for row, each in enumerate(self._running) if each.id in ids]
        for row in left:  # a stop string ends an answer so, and it may be continued
            self._save(self._running[row], row)
        self._leave(left)

    @abstractmethod
    def close(self) -> None:
        """Frees the model and everything in flight."""

    def _take(self, request: Request) -> None:
        """Queues a request, or fails it where it could never have room."""
        tokens = len(request.prompt)
        if not self._budget.could_hold(tokens):
            self._fail(request.id, self._budget.no_room(f"the prompt of {tokens} tokens", tokens))
            return
        hold(request)
        self._look_up(request)
        self._prompts.add(request)

    def _may_begin(self, request: Request) -> bool:
        """Whether a request that has no row could have one: a row, and room for its text and for answers to grow."""
        others = len(self._running) + len(self._prompts.begun())
        if others >= self._max_batch:
            return False
        return not others or self._budget.has(len(request.text) + 1, others)

    def _next_prompt(self, longest: int | None = None, fresh: bool = False) -> Request | None:
        """The prompt to read next, as `Queue.next` has it."""
        return self._prompts.next(self._may_begin, longest, fresh) if len(self._prompts) else None

    def _between(self, request: Request) -> tuple[Request | None, int]:
        """What to read, and how many tokens of it, before running answers go on; `None` where they are to go on now."""
        self._look_up(request)
        reading = self._pace.reading
        count = self._pace.tokens(request.unread, len(self._prompts), request.row is None)
        if count:
            return request, count
        return None if reading else self._next_prompt(SHORT, fresh=True), min(SHORT, self._chunk)

    def _prefill(self, first: Request, budget: int) -> list[Step]:
        """Reads so many tokens of prompts: more of the first one and, where they fit, the whole of others."""
        steps: list[Step] = []
        paced = bool(self._running) and not self._burst
        self._look_up(first)
        passes: list[int] = []
        request: Request | None = first
        self._prompts.turn()
        while request is not None:
            count = min(budget, request.unread)
            if request.unread == count + 1 and count < min(budget + 1, self._chunk):
                count += 1  # A single token is no shorter than two, and over onnxruntime its logits are others.
            budget -= count + (self._pace.another() if paced else 0)
            passes.append(count)
            try:
                step = self._read(request, count)
            except Exception as fault:  # alone in its pass, so alone at fault: the others go on
                self._forget(request)
                self._fail(request.id, f"the prompt cannot be read: {fault}")
            else:
                if step is not None:
                    if request.cached and request.made == 1:
                        steps.append((request.id, request.cached))
                    steps.append(step)
            # A prompt is not split just to fill a chunk up: two short passes cost more than one.
            request = self._next_prompt(budget) if budget > 0 else None
            if request is not None:
                self._look_up(request)
        self._pace.read(passes)
        return steps

    def _read(self, request: Request, count: int) -> Made | None:
        """Reads the next `count` tokens of a prompt; at its end, its first token, or as before it made room."""
        rows = self._rows
        if (row := request.row) is None:
            row = request.row = self._row_for(request, count)
            self._budget.hold(request, len(request.text))
            kept = self._restore(request, row, request.text[: request.done]) if request.done else 0
            if not request.waits_again:  # else it is its own, from before it made room
                request.cached = kept
            request.kept = request.done = kept
            self._end_lease(request)
        self._extend(request, row, count)
        if request.unread:
            self._keep_more(request, row, rows.length(row), count)
            return None
        resumed = bool(request.answer)
        token = request.answer[-1] if resumed else rows.draw(row, request)
        finish = None if resumed else request.finish(token, self._eos)
        self._keep_read(request, row, count)
        if not resumed:
            request.answer.append(token)
            if finish is not None:
                self._forget(request)
                return request.step([token], finish)
        rows.feed(row, token)
        self._join(row)
        self._prompts.remove(request)
        request.row = None
        self._running.append(request)
        return None if resumed else request.step([token], None)

    def _forget(self, request: Request) -> None:
        """Drops a prompt and frees its row."""
        self._prompts.remove(request)
        self._end_lease(request)
        self._put_out(request)

    def _put_out(self, request: Request) -> None:
        """Frees the row and the room of a prompt that has them."""
        if request.row is not None:
            self._rows.release(request.row)
            request.row = None
        self._budget.give_back(request)

    def _decode(self) -> list[Step]:
        """One token for every running answer, all in one pass."""
        running, rows, eos = self._running, self._rows, self._eos
        self._speculation.decode(len(running))
        steps: list[Step] = []
        ended: list[int] = []
        saves = SAVES
        tokens, lengths = rows.greedy(len(running)), rows.lengths(len(running))
        rows.feed_greedy(len(running))
        for row, (request, token, length) in enumerate(zip(running, tokens, lengths, strict=True)):
            if request.sampling is not None:
                try:
                    token = rows.draw(row, request)
                except ValueError as fault:  # the row's own logits: no fault of the others
                    ended.append(row)
                    self._fail(request.id, f"no token can be drawn: {fault}")
                    continue
                rows.feed(row, token)
            finish = request.finish(token, eos)
            request.answer.append(token)
            steps.append(request.step([token], finish))
            if finish is not None:
                ended.append(row)
                self._save(request, row)
            elif saves and self._keep_more(request, row, length, 1):
                saves -= 1
        self._leave(ended)
        return steps

    def _forced(self) -> int | None:
        """The row of an answer of which more tokens are certain, where a pass over them pays and there is room."""
        if (row := self._forward.next(self._running)) is not None:
            request = self._running[row]
            certain = len(self._forward.certain(request))
            tokens = 1 + min(certain, self._chunk - 1, request.max_tokens - request.made)
            if self._budget.hold(request, self._rows.length(row) + tokens):
                return row
        return None

    def _guess(self) -> tuple[int, list[int]] | None:
        """The row of an answer that goes on by a check, and the tokens to check, where that pays and there is room."""
        guess = self._speculation.guess(self._running)
        if guess is not None:
            row, draft = guess
            if self._budget.hold(self._running[row], self._rows.length(row) + 1 + len(draft)):
                return guess
        return None

    def _check(self, row: int, draft: list[int]) -> list[Step]:
        """Tokens for one running answer: the guessed ones that are right, and one more."""
        request = self._running[row]
        try:
            tokens, finish = self._speculation.check(row, request, draft, self._eos)
        except ValueError as fault:
            self._leave([row])
            self._fail(request.id, f"no token can be drawn: {fault}")
            return []
        if finish is None:
            self._keep_more(request, row, self._rows.length(row), 1)
        else:
            self._save(request, row)
            self._leave([row])
        return [request.step(tokens, finish)]

    def _force(self, row: int) -> list[Step]:
        """What is certain to come in one row, read in one pass, and the token after it."""
        request = self._running[row]
        try:
            step = self._forward.run(row, request, self._eos)
        except ValueError as fault:
            self._fail(request.id, f"no token can be drawn: {fault}")
            self._leave([row])
            return []
        if step[2] is not None:
            self._save(request, row)
            self._leave([row])
        return [step]

    def _make_room(self, ahead: int = 1) -> None:
        """Sees to it that every running answer has room for `ahead` more tokens: the newest requests make it."""
        running, budget = self._running, self._budget
        lengths = self._rows.lengths(len(running))
        if all(length + ahead <= each.room for length, each in zip(lengths, running, strict=True)):
            return
        row = 0
        while row < len(running):
            request = running[row]
            tokens = self._rows.length(row) + ahead
            if tokens <= request.room or budget.hold(request, tokens):
                row += 1
                continue
            holders = [*running, *self._prompts.begun()]
            if len(holders) > 1:
                self._preempt(max(holders, key=lambda each: each.arrival))
            else:
                self._leave([row])
                self._fail(
                    request.id,
                    self._budget.no_room(f"an answer that has come to {tokens} tokens with its prompt", tokens),
                )
            row = 0  # Another may have taken its place.

    def _preempt(self, request: Request) -> None:
        """Lets a request make room. What it has read is kept as long as there is room for that among the snapshots."""
        if request.row is not None:
            self._save(request, request.row)
            self._prompts.remove(request)
            self._put_out(request)
        else:
            row = self._running.index(request)
            self._save(request, row)
            self._leave([row])
        # The last token of an answer has yet to go through the model.
        request.text = request.prompt + request.answer[:-1]
        self._look_up(request)
        self._prompts.add_again(request)

    def _look_up(self, request: Request) -> None:
        """Finds what need not be read of a prompt that has not begun: more than when it came, or less."""
        if request.row is None:
            request.done = self._kept(request)

    def _kept(self, request: Request) -> int:
        """How many tokens of a text need not be read."""
        tokens = request.text[: -self.read_again]
        # What is read again after it made room is the request's own.
        if request.start_from is not None and not request.answer:
            if request.source is None:
                request.source = self._snapshots.lease(request.start_from, request.salt)
            if request.source is None:
                return 0
        return self._snapshots.find(tokens, request.salt, request.source)

    def _end_lease(self, request: Request) -> None:
        """Lets the snapshot go that a request has started from, or will not start from."""
        if request.source is not None:
            self._snapshots.release(request.source)
            request.source = None

    @abstractmethod
    def _row_for(self, request: Request, count: int) -> int:
        """A row for a prompt of which `count` tokens will be read now."""

    @abstractmethod
    def _extend(self, request: Request, row: int, count: int) -> None:
        """Reads the next `count` tokens of a prompt, and counts them. After its last one `rows.draw` chooses the next."""

    @abstractmethod
    def _restore(self, request: Request, row: int, tokens: list[int]) -> int:
        """Fills an empty row with what is kept of `tokens`, and returns how many of them that is."""

    @abstractmethod
    def _join(self, row: int) -> None:
        """Makes the prompt in a row the last of the running answers, in the row after theirs."""

    @abstractmethod
    def _leave(self, ended: list[int]) -> None:
        """Ends the answers in these rows (ascending), and closes the gaps."""

    @abstractmethod
    def _save(self, request: Request, row: int) -> None:
        """Keeps what a row holds of a request that ends here or makes room, under the name that it was given if it has finished."""

    @abstractmethod
    def _keep_read(self, request: Request, row: int, count: int) -> None:
        """Keeps of a prompt what has been read of it, to its end, the last `count` tokens just now."""

    @abstractmethod
    def _keep_more(self, request: Request, row: int, length: int, count: int) -> bool:
        """Keeps more of what goes on, of now `length` tokens, `count` of them new, where that is worth it; whether it was."""
