"""The engine over onnxruntime: continuous batching of greedy and sampled requests on a CPU.

What a step runs is decided in `batching`. Here is where things lie: running answers in rows side by side, prompts in rows
above them, and which blocks of what they hold are kept for later prompts. How a pass is run is in `rows`, what a folder
holds in `session`, what is kept in `snapshots`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from emberd.batching import PREFILL_CHUNK, BatchEngine
from emberd.budget import KvBudget, default_kv_bytes
from emberd.concat import rows_of
from emberd.constrain import FastForward
from emberd.engine import EngineError, Fail, at_least_one
from emberd.kv import BLOCK
from emberd.parts import capabilities
from emberd.schedule import Pace
from emberd.session import Model, give_back
from emberd.snapshots import Snapshots, default_budget
from emberd.verify import Costs, Speculation

if TYPE_CHECKING:
    from emberd._core import Settings
    from emberd.engine import Request
    from emberd.rows import Rows

READ_AGAIN = 2
"""Tokens at the end of a prompt that are run even where they are kept: the last one for its logits, and one more, since
for a single token onnxruntime's own operators take other kernels, whose logits differ from those of a whole prompt."""

SAVED_AT_ONCE = 4
"""Blocks that are copied for one answer in one step; usually two change."""


class OnnxEngine(BatchEngine):
    """The running answers are in the rows `0..len(running)`, without a gap, because a pass reads rows that lie side by side."""

    read_again = READ_AGAIN
    _rows: Rows
    _snapshots: Snapshots

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
        chunk = min(prefill_chunk, model.context_length) if model.chunks else model.context_length
        rows = rows_of(model, chunk)
        cache = default_budget() if cache_bytes is None else cache_bytes
        room = default_kv_bytes() if kv_bytes is None else kv_bytes
        super().__init__(
            capabilities(model),
            rows,
            _snapshots(model, cache if model.reusable else 0),
            # Caches that are concatenated are there twice while they grow, and padded.
            KvBudget(model.layers, room if model.shared else room // 3),
            Speculation(rows, model.positions - 1, costs),
            FastForward(rows, chunk),
            # A prompt that cannot be read in pieces is read at once, whoever waits.
            pace if pace and model.chunks else Pace(chunk, math.inf),
            chunk,
            fail,
        )
        self._shared = model.shared
        self._warm_up()

    def close(self) -> None:
        """Frees the session, the buffers and everything in flight."""
        del self._rows, self._snapshots, self._speculation, self._forward  # all that holds the session
        self._prompts.clear()
        self._running.clear()
        give_back()

    def _row_for(self, request: Request, count: int) -> int:
        """One that is read in one piece is where its answer will run; one that takes longer is out of the way."""
        place, taken = len(self._running), {each.row for each in self._prompts}
        return place if count == request.unread and place not in taken else self._free_row()

    def _free_row(self, but: int | None = None) -> int:
        """The highest row that nobody has, and that is not `but`; there is one, since `Rows` has one to spare."""
        taken = {each.row for each in self._prompts} | {but}
        return next(row for row in reversed(range(len(self._running), self._max_batch + 1)) if row not in taken)

    def _extend(self, request: Request, row: int, count: int) -> None:
        self._rows.extend(row, request.text[request.done : request.done + count])
        request.done += count

    def _restore(self, request: Request, row: int, tokens: list[int]) -> int:
        rows = self._rows
        count = self._snapshots.restore(tokens, rows.kv(row), request.salt, request.source)
        rows.resume(row, count)
        return count

    def _join(self, row: int) -> None:
        rows, place = self._rows, len(self._running)
        if place != row:
            for other in self._prompts:
                if other.row == place:
                    other.row = self._free_row(row)
                    rows.move(place, other.row)
            rows.move(row, place)

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

    def _keep_read(self, request: Request, row: int, count: int) -> None:
        self._save(request, row, count // BLOCK + SAVED_AT_ONCE)

    def _keep_more(self, request: Request, row: int, length: int, count: int) -> bool:
        """Once there is a block more."""
        if length < request.kept + BLOCK:
            return False
        self._save(request, row, count // BLOCK + SAVED_AT_ONCE)
        return True

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
