"""The engine over onnxruntime: continuous batching of greedy and sampled requests on a CPU.

Runs in each step either some of somebody's prompt or one token for every running answer; the two take turns. Only
answers that have all just begun wait for more: for short prompts that came with theirs. How much of a prompt is read,
and of which, is in `schedule`; how much memory requests may take in `budget`; how a pass is run in `rows`, what a
folder holds in `session`, how a token is drawn in `sampling`, what is kept of prompts and answers for later ones in
`snapshots`. One answer may get several tokens in a pass of its own: certain ones (`constrain`), or guessed ones that
are checked (`verify`).

Where the memory for keys and values is used up, prompts wait; and when the running answers outgrow it, the newest of
them makes room: its tokens are read again when there is more, and it goes on as if nothing had been. Its keys and
values are a function of its tokens, and what its sampler knows stays with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from emberd._core import Capabilities
from emberd.budget import KvBudget, default_kv_bytes
from emberd.concat import rows_of
from emberd.constrain import FastForward, hold
from emberd.engine import EngineError, Fail, Made, Request, Step, at_least_one, is_admit, is_cancel, is_forget
from emberd.kv import BLOCK
from emberd.schedule import BURST_CHUNKS, SHORT, Pace, Queue
from emberd.session import Model, give_back
from emberd.snapshots import Snapshots, default_budget
from emberd.verify import Costs, Speculation

if TYPE_CHECKING:
    from emberd._core import Settings
    from emberd.engine import Order

PREFILL_CHUNK = 128
"""The most prompt tokens in one step: what is cancelled is seen after it."""

READ_AGAIN = 2
"""Tokens at the end of a prompt that are run even where they are kept: the last one for its logits, and one more, since
for a single token onnxruntime takes other kernels, whose logits differ from those of a whole prompt."""

SAVES = 2
"""Running answers of which more is kept in one step: a copy of 64 tokens of the default model takes 2 ms."""

SAVED_AT_ONCE = 4
"""Blocks that are copied for one answer in one step; usually two change."""


class OnnxEngine:
    """Prompts are read chunk by chunk, and then their answers decode together.

    The running answers are in the rows `0..len(running)`, without a gap, because a pass reads rows that lie side by
    side. A prompt that is being read sits in some row above them.
    """

    def __init__(
        self,
        model: Model,
        fail: Fail,
        prefill_chunk: int = PREFILL_CHUNK,
        cache_bytes: int | None = None,
        kv_bytes: int | None = None,
        pace: Pace | None = None,
        costs: Costs | None = None,
    ) -> None:
        """Without a `pace` answers wait for whole chunks, whatever they take."""
        self.capabilities = Capabilities(
            context_length=model.context_length,
            max_batch=model.max_batch,
            vocab_size=model.vocab_size,
            eos_ids=model.eos_ids,
            constraints=True,
        )
        self._eos = frozenset(model.eos_ids)
        self._max_batch = model.max_batch
        self._chunk = min(prefill_chunk, model.context_length) if model.chunks else model.context_length
        self._fail = fail
        self._shared = model.shared
        self._rows = rows_of(model, self._chunk)
        self._speculation = Speculation(self._rows, model.positions - 1, costs)
        self._forward = FastForward(self._rows, self._chunk)
        cache = default_budget() if cache_bytes is None else cache_bytes
        self._snapshots = _snapshots(model, cache if model.reusable else 0)
        room = default_kv_bytes() if kv_bytes is None else kv_bytes
        # Caches that are concatenated are there twice while they grow, and padded.
        self._budget = KvBudget(model.layers, room if model.shared else room // 3)
        # A prompt that cannot be read in pieces is read at once, whoever waits.
        self._pace = pace if pace and model.chunks else Pace(self._chunk, math.inf)
        self._prompts = Queue()
        """Those that are being read have a row."""
        self._running: list[Request] = []
        self._burst = 0
        """Chunks read since an answer had more than its first token."""
        self._warm_up()

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
        requests that came together then run in rows of like lengths, on which onnxruntime's attention is faster to
        the last token.
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
            row, tokens = forced
            steps = self._force(row)
            self._pace.checked(tokens, alone)
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

    def close(self) -> None:
        """Frees the session, the buffers and everything in flight."""
        del self._rows, self._snapshots, self._speculation, self._forward  # all that holds the session
        self._prompts.clear()
        self._running.clear()
        give_back()

    def _take(self, request: Request) -> None:
        """Queues a request, or fails it where it could never have room."""
        tokens = len(request.prompt)
        if not self._budget.could_hold(tokens):
            self._fail(request.id, self._no_room(f"the prompt of {tokens} tokens", tokens))
            return
        hold(request)
        self._look_up(request)
        self._prompts.add(request)

    def _no_room(self, what: str, tokens: int) -> str:
        """Why a request fails that cannot hold the keys and values of so many tokens, even alone."""
        size, most = self._budget.block_bytes, self._budget.capacity
        return (
            f"{what} needs {-(-tokens // BLOCK) * size} bytes for keys and values, and there is room for {most * size}; "
            "hint: raise --kv-bytes, or make the prompt or its answer shorter"
        )

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
                count += 1  # A single token is no shorter than two, and its logits are others: see `READ_AGAIN`.
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
        rows, place = self._rows, len(self._running)
        if (row := request.row) is None:
            # One that is read in one piece is where its answer will run; one that takes longer is out of the way.
            taken = {each.row for each in self._prompts}
            at_once = count == request.unread and place not in taken
            row = request.row = place if at_once else self._free_row()
            self._budget.hold(request, len(request.text))
            request.cached = 0
            if request.done:
                kept = request.text[: request.done]
                request.cached = self._snapshots.restore(kept, rows.kv(row), request.salt, request.source)
                rows.resume(row, request.cached)
            request.kept = request.done = request.cached
            self._end_lease(request)
        rows.extend(row, request.text[request.done : request.done + count])
        request.done += count
        if request.unread:
            if rows.length(row) >= request.kept + BLOCK:
                self._save(request, row, count // BLOCK + SAVED_AT_ONCE)
            return None
        resumed = bool(request.answer)
        token = request.answer[-1] if resumed else rows.draw(row, request)
        finish = None if resumed else request.finish(token, self._eos)
        self._save(request, row, count // BLOCK + SAVED_AT_ONCE)
        if not resumed:
            request.answer.append(token)
            if finish is not None:
                self._forget(request)
                return request.step([token], finish)
        rows.feed(row, token)
        self._prompts.remove(request)
        request.row = None
        if place != row:
            for other in self._prompts:
                if other.row == place:
                    other.row = self._free_row(row)
                    rows.move(place, other.row)
            rows.move(row, place)
        self._running.append(request)
        return None if resumed else request.step([token], None)

    def _free_row(self, but: int | None = None) -> int:
        """The highest row that nobody has, and that is not `but`; there is one, since `Rows` has one to spare."""
        taken = {each.row for each in self._prompts} | {but}
        return next(row for row in reversed(range(len(self._running), self._max_batch + 1)) if row not in taken)

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
            elif saves and length >= request.kept + BLOCK:
                saves -= 1
                self._save(request, row)
        self._leave(ended)
        return steps

    def _forced(self) -> tuple[int, int] | None:
        """The row of an answer of which more tokens are certain, and how many a pass over them has, where that pays and there is room."""
        if (row := self._forward.next(self._running)) is not None:
            request = self._running[row]
            tokens = 1 + len(self._forward.certain(request))
            if self._budget.hold(request, self._rows.length(row) + tokens):
                return row, tokens
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
        if finish is not None or self._rows.length(row) >= request.kept + BLOCK:
            self._save(request, row)
        if finish is not None:
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
                    request.id, self._no_room(f"an answer that has come to {tokens} tokens with its prompt", tokens)
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
        tokens = request.text[:-READ_AGAIN]
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

    def _save(self, request: Request, row: int, most: int = SAVED_AT_ONCE) -> None:
        """Keeps what a row holds, but for what would take more than `most` blocks to copy.

        What has finished is kept in full under the name that it was given, if it was.
        """
        request.kept = self._rows.length(row)
        tokens, kv = (request.prompt + request.answer)[: request.kept], self._rows.kv(row)
        if request.finished and request.save_as is not None:
            self._snapshots.save_as(request.save_as, tokens, kv, request.salt)
        else:
            self._snapshots.save(tokens, kv, most, request.salt)

    def _leave(self, ended: list[int]) -> None:
        """Empties rows (ascending) and closes the gaps with the highest ones."""
        for row in reversed(ended):
            self._rows.release(row)
            self._budget.give_back(self._running[row])
            last = len(self._running) - 1
            if row != last:
                self._rows.move(last, row)
                self._running[row] = self._running[last]
            self._running.pop()

    def _warm_up(self) -> None:
        """Runs each kind of pass once, so that a graph of another layout shows here and no request waits for it."""
        try:
            self._rows.extend(0, [0])
            self._rows.decode(1)
        except Exception as error:  # onnxruntime raises a different private type for each way a graph can be wrong
            text = " ".join(str(error).split())
            raise EngineError(
                f"the graph cannot run with {'shared' if self._shared else 'concatenated'} key and value buffers: {text}",
                "import the model with `emberd models pull`, or give the path of a .gguf file",
            ) from error
        self._rows.release(0)


def _snapshots(model: Model, budget: int) -> Snapshots:
    try:
        return Snapshots(model.layers, budget)
    except (OSError, OverflowError, ValueError, MemoryError) as error:  # each platform refuses in its own way
        raise EngineError(
            f"cache_bytes is {budget}, which cannot be reserved: {error}", "give it a smaller value, or 0"
        ) from error


def load(folder: str, settings: Settings, fail: Fail) -> OnnxEngine:
    """Opens the model in `folder`. Raises `EngineError` when it is not a folder this engine can run."""
    chunk = at_least_one("prefill_chunk", settings.prefill_chunk, PREFILL_CHUNK)
    engine = OnnxEngine(Model(folder, settings), fail, chunk, settings.cache_bytes, settings.kv_bytes, Pace(chunk))
    give_back()  # 21 MiB that reading the tokenizer and the graph took
    return engine
