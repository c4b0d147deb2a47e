"""The engine over MLX: continuous batching of greedy and sampled requests, over mlx-lm's models and caches.

What a step runs is decided in `batching`. Here is where things lie: each prompt in caches of its own, which join those of the
running answers once it is read (`mlx_rows`), and when they are kept for later prompts (`mlx_snapshots`). What a folder holds
is read in `mlx_model`, what memory there is says `mlx_memory`. How an answer that runs alone goes on may be guessed, from
what it repeats (`verify`) or by a smaller model (`mlx_draft`).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx

from emberd.batching import PREFILL_CHUNK, BatchEngine
from emberd.constrain import FastForward
from emberd.engine import Fail, at_least_one
from emberd.mlx_caches import Sizes, always_cut
from emberd.mlx_draft import AHEAD, Draft
from emberd.mlx_draft import find as find_draft
from emberd.mlx_memory import BatchBudget, kv_budget, limit
from emberd.mlx_model import Model
from emberd.mlx_rows import MlxRows
from emberd.mlx_snapshots import Snapshots, next_point
from emberd.parts import capabilities
from emberd.schedule import Pace
from emberd.snapshots import default_budget
from emberd.verify import Costs, Speculation

if TYPE_CHECKING:
    from collections.abc import Callable

    from emberd._core import Settings
    from emberd.engine import Request

GUESSED = 31
"""The most tokens that are guessed without a draft model, and checked in one pass."""

PAYS = {1: 2}
"""As `constrain.PAYS`: beside others no row can be extended alone."""


class MlxEngine(BatchEngine):
    """The running answers are at the places `0..len(running)` of the batch, in the order in which they came."""

    read_again = 1
    _rows: MlxRows
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
        *,
        ahead: bool = True,
        draft: Draft | None = None,
        restore: Callable[[], None] = lambda: None,
    ) -> None:
        """`ahead`: whether a pass may be started before the tokens it reads are known here. `restore` is called when the engine is closed."""
        chunk = min(prefill_chunk, model.context_length)
        rows = MlxRows(model)
        self._exact = not always_cut(model.new_caches())
        """Whether some of what is kept of a prompt will serve only prompts that begin with all of it."""
        super().__init__(
            capabilities(model),
            rows,
            Snapshots(default_budget() if cache_bytes is None else cache_bytes),
            BatchBudget(Sizes(model, chunk).of, kv_budget() if kv_bytes is None else kv_bytes),
            # A guess that was wrong has to be taken back, and the caches of several answers are cut together or not at all.
            Speculation(rows, 0 if self._exact else GUESSED, costs, beside=False),
            FastForward(rows, chunk, PAYS),
            pace or Pace(chunk, math.inf),
            chunk,
            fail,
        )
        self._model = model
        self._draft = draft
        # Else the device waits for Python: over the CPU build, too, a step of 8 sequences of a tiny model takes 20 % longer.
        self._ahead = ahead and draft is None
        self._restore_limits = restore

    def close(self) -> None:
        """Frees the model and everything in flight."""
        self._prompts.clear()
        self._running.clear()
        self._snapshots.clear()
        self._rows.close()
        del self._rows, self._snapshots, self._speculation, self._forward, self._budget, self._model, self._draft
        mx.clear_cache()
        self._restore_limits()

    def _row_for(self, request: Request, count: int) -> int:
        return self._rows.new()

    def _extend(self, request: Request, row: int, count: int) -> None:
        """The last token of a prompt is read alone, since it alone has its logits computed.

        Caches that cannot be cut are kept on the way, at the points where later prompts may part from this one.
        """
        rows, text = self._rows, request.text
        end, last = request.done + count, len(text) - 1
        while request.done < min(end, last):
            point = next_point(request.done) if self._exact else end
            stop = min(end, last, point)
            rows.read(row, text[request.done : stop])
            request.done = stop
            if self._exact and stop in (point, last):
                self._snapshots.save(text[:stop], rows.kv(row), request.salt)
        if end > last:
            rows.extend(row, text[last:])
            request.done = end

    def _restore(self, request: Request, row: int, tokens: list[int]) -> int:
        found = self._snapshots.restore(tokens, request.salt, request.source)
        if found is None:
            return 0
        self._rows.fill(row, *found)
        return found[1]

    def _join(self, row: int) -> None:
        self._rows.join(row)

    def _leave(self, ended: list[int]) -> None:
        if not ended:
            return
        if self._draft is not None:
            self._draft.forget()
        for row in ended:
            self._budget.give_back(self._running[row])
        self._rows.leave(ended)
        gone = set(ended)
        self._running[:] = [each for row, each in enumerate(self._running) if row not in gone]

    def _save(self, request: Request, row: int) -> None:
        if self._snapshots.budget:
            tokens = (request.prompt + request.answer)[: self._rows.length(row)]
            name = request.save_as if request.finished else None
            self._snapshots.save(tokens, self._rows.kv(row), request.salt, name)

    def _keep_read(self, request: Request, row: int, count: int) -> None:
        """What cannot be cut has been kept before the last token, where the same prompt starts again."""
        if not self._exact or (request.finished and request.save_as is not None):
            self._save(request, row)

    def _keep_more(self, request: Request, row: int, length: int, count: int) -> bool:
        """Never: to keep more is to copy all of it."""
        return False

    def _make_room(self, ahead: int = 1) -> None:
        """Also decides whether this step starts the pass of the next one: where that has room for its tokens at once."""
        running, rows, budget = self._running, self._rows, self._budget
        needed = int(not rows.under_way)
        rows.ahead = (
            self._ahead
            # A prompt that is read next would wait for the pass, and seem to take its time.
            and self._next_prompt() is None
            # A pass that nobody will go on from is not started.
            and any(each.made + 1 < each.max_tokens for each in running)
            and all(each.sampling is None for each in running)
            and all(budget.hold(each, rows.length(row) + needed + 1) for row, each in enumerate(running))
        )
        super()._make_room(needed)

    def _forced(self) -> int | None:
        return None if self._rows.under_way else super()._forced()

    def _guess(self) -> tuple[int, list[int]] | None:
        if self._draft is not None:
            return self._drafted(self._draft)
        guess = super()._guess()
        if guess is not None and self._rows.under_way:
            self._rows.ahead = False  # The pass that has been started comes first; the next step may check.
            return None
        return guess

    def _drafted(self, draft: Draft) -> tuple[int, list[int]] | None:
        """What the draft model guesses of the answer that has the engine to itself."""
        if len(self._running) > 1 or len(self._prompts):
            return None
        [request] = self._running
        most = AHEAD if request.speculation is None else request.speculation
        if (count := min(most, request.max_tokens - request.made - 1)) < 1:
            return None
        guesses = draft.guess(request.id, request.prompt + request.answer, count)
        room = self._rows.length(0) + 1 + len(guesses)
        return (0, guesses) if guesses and self._budget.hold(request, room) else None


def load(folder: str, settings: Settings, fail: Fail) -> MlxEngine:
    """Opens the model in `folder`. Raises `EngineError` when it is not a folder this engine can run."""
    chunk = at_least_one("prefill_chunk", settings.prefill_chunk, PREFILL_CHUNK)
    restore = limit()
    try:
        model = Model(folder, settings)
        draft = find_draft(Path(folder), model, settings, chunk)
        budgets = settings.cache_bytes, settings.kv_bytes
        return MlxEngine(model, fail, chunk, *budgets, Pace(chunk), draft=draft, restore=restore)
    except BaseException:
        restore()
        raise
