"""The engine over onnxruntime: continuous batching of greedy and sampled requests on a CPU.

Decides what each step runs: a chunk of somebody's prompt, or one token for every running answer; the two take turns,
so that a long prompt holds no answer up for longer than a chunk. Only answers that have all just begun wait for more:
for short prompts that came with theirs. Of the prompts, the shortest and the oldest take turns, so that long ones hold
no short one up and are not held up for ever. How a pass is run is in `rows`, what a folder holds in `session`, how a
token is drawn in `sampling`, what is kept of prompts and answers for later ones in `snapshots`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from emberd._core import Capabilities
from emberd.constrain import FastForward, hold
from emberd.engine import EngineError, Fail, Made, Request, Step, at_least_one, is_admit, is_cancel
from emberd.kv import BLOCK
from emberd.rows import Rows
from emberd.session import Model, give_back
from emberd.snapshots import Snapshots, default_budget

if TYPE_CHECKING:
    from emberd._core import Settings
    from emberd.engine import Order

PREFILL_CHUNK = 128
"""Prompt tokens in one step while answers are running or waiting to be cancelled."""

BURST_CHUNKS = 8
"""Chunks of prompts that are read before answers that have all just begun go on: what came together starts together."""

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
        self, model: Model, fail: Fail, prefill_chunk: int = PREFILL_CHUNK, cache_bytes: int | None = None
    ) -> None:
        self.capabilities = Capabilities(
            context_length=model.context_length,
            max_batch=model.max_batch,
            vocab_size=model.vocab_size,
            eos_ids=model.eos_ids,
            constraints=True,
        )
        self._eos = frozenset(model.eos_ids)
        self._max_batch = model.max_batch
        self._chunk = min(prefill_chunk, model.context_length)
        self._fail = fail
        self._rows = Rows(model, self._chunk)
        self._forward = FastForward(self._rows, self._chunk)
        self._snapshots = _snapshots(model, default_budget() if cache_bytes is None else cache_bytes)
        self._prompts: list[Request] = []
        """In order of arrival; those that are being read have a row."""
        self._shortest_next = False
        self._running: list[Request] = []
        self._decoded_last = True
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
            request = Request(order)
            hold(request)
            request.done = self._kept(request)
            self._prompts.append(request)
        elif is_cancel(order):
            self.drop((order.id,))

    def step(self) -> list[Step]:
        """One chunk of prompts or one token for every running answer, in turn where there are both.

        As long as every answer is at its first token, prompts that fit into a chunk go first, for `BURST_CHUNKS`:
        requests that came together then run in rows of like lengths, on which onnxruntime's attention is faster to
        the last token.
        """
        if not self._running:
            self._burst = 0
        request = self._next_prompt()
        if request is not None and self._running and not self._decoded_last:
            request = self._next_prompt(self._chunk) if 0 < self._burst < BURST_CHUNKS else None
        if request is not None:
            if self._burst or not self._running:
                self._burst += 1
            self._decoded_last = False
            return self._prefill(request)
        self._decoded_last = True
        self._burst = 0
        return self._decode() if self._running else []

    def drop(self, gone: Iterable[int]) -> None:
        """Forgets requests and frees their rows."""
        ids = set(gone)
        if not ids:
            return
        for request in [each for each in self._prompts if each.id in ids]:
            self._forget(request)
        left = [row for row, each in enumerate(self._running) if each.id in ids]
        for row in left:  # a stop string ends an answer so, and it may be continued
            self._save(self._running[row], row)
        self._leave(left)

    def close(self) -> None:
        """Frees the session, the buffers and everything in flight."""
        del self._rows, self._snapshots
        self._prompts.clear()
        self._running.clear()
        give_back()

    def _next_prompt(self, longest: int | None = None) -> Request | None:
        """The prompt to read next; with `longest`, one that has no more tokens left than that."""
        # Those that have no row yet can only begin where there is one.
        begun = sum(each.row is not None for each in self._prompts)
        place = len(self._running) + begun < self._max_batch
        prompts = [each for each in self._prompts if place or each.row is not None]
        if longest is not None:
            prompts = [each for each in prompts if each.unread <= longest]
        if self._shortest_next or longest is not None:
            return min(prompts, key=lambda each: each.unread, default=None)
        return prompts[0] if prompts else None

    def _prefill(self, first: Request) -> list[Step]:
        """Reads up to a chunk of prompt tokens: more of the first prompt and, where they fit, the whole of others."""
        steps: list[Step] = []
        budget = self._chunk
        request: Request | None = first
        self._shortest_next = not self._shortest_next
        while request is not None:
            if request.row is None:
                request.done = self._kept(request)  # More than when it came, or less.
            count = min(budget, request.unread)
            budget -= count
            try:
                step = self._read(request, count)
            except Exception as fault:  # alone in its pass, so alone at fault: the others go on
                self._forget(request)
                self._fail(request.id, f"the prompt cannot be read: {fault}")
            else:
                if step is not None:
                    if request.cached:
                        steps.append((request.id, request.cached))
                    steps.append(step)
            # A prompt is not split just to fill a chunk up: two short passes cost more than one.
            request = self._next_prompt(budget) if budget else None
        return steps

    def _read(self, request: Request, count: int) -> Made | None:
        """Reads the next `count` tokens of a prompt; at its end, its first token."""
        rows, place = self._rows, len(self._running)
        if (row := request.row) is None:
            # One that is read in one piece is where its answer will run; one that takes longer is out of the way.
            taken = {each.row for each in self._prompts}
            at_once = count == request.unread and place not in taken
            row = request.row = place if at_once else self._free_row()
            if request.done:
                request.cached = self._snapshots.restore(request.prompt[: request.done], rows.kv(row))
                rows.resume(row, request.cached)
        rows.extend(row, request.prompt[request.done : request.done + count])
        request.done += count
        if request.unread:
            self._save(request, row, count // BLOCK + SAVED_AT_ONCE)
            return None
        token = rows.draw(row, request)
        self._save(request, row, count // BLOCK + SAVED_AT_ONCE)
        request.answer.append(token)
        finish = request.finish(token, self._eos)
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
        return request.step([token], None)

    def _free_row(self, but: int | None = None) -> int:
        """The highest row that nobody has, and that is not `but`; there is one, since `Rows` has one to spare."""
        taken = {each.row for each in self._prompts} | {but}
        return next(row for row in reversed(range(len(self._running), self._max_batch + 1)) if row not in taken)

    def _forget(self, request: Request) -> None:
        """Drops a prompt and frees its row."""
        self._prompts.remove(request)
        if request.row is not None:
            self._rows.release(request.row)

    def _decode(self) -> list[Step]:
        """One token for every running answer, all in one pass."""
        running, rows, eos = self._running, self._rows, self._eos
        if (row := self._forward.next(running)) is not None:
            return self._force(row)
        rows.decode(len(running))
        steps: list[Step] = []
        ended: list[int] = []
        saves = SAVES
        tokens = rows.greedy(len(running))
        rows.feed_greedy(len(running))
        for row, request in enumerate(running):
            token = tokens[row]
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
            elif saves and rows.length(row) >= request.kept + BLOCK:
                saves -= 1
                self._save(request, row)
        self._leave(ended)
        return steps

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

    def _kept(self, request: Request) -> int:
        """How many tokens of a prompt need not be read."""
        return self._snapshots.find(request.prompt[:-READ_AGAIN])

    def _save(self, request: Request, row: int, most: int = SAVED_AT_ONCE) -> None:
        """Keeps what a row holds, but for what would take more than `most` blocks to copy."""
        request.kept = self._rows.length(row)
        tokens = (request.prompt + request.answer)[: request.kept]
        self._snapshots.save(tokens, self._rows.kv(row), most)

    def _leave(self, ended: list[int]) -> None:
        """Empties rows (ascending) and closes the gaps with the highest ones."""
        for row in reversed(ended):
            self._rows.release(row)
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
                f"the graph cannot run with shared key and value buffers: {text}",
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
    return OnnxEngine(Model(folder, settings), fail, chunk, settings.cache_bytes)
