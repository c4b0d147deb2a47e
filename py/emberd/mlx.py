"""The engine over MLX: continuous batching of greedy and sampled requests, over mlx-lm's models and caches.

Decides what each step runs: a chunk of somebody's prompt, or one token for every running answer; the two take turns, so that a long
prompt holds no answer up for longer than a chunk. Of the prompts, the shortest and the oldest take turns. A prompt is
read alone, into caches of its own, which then join those of the batch. What a folder holds is read in `mlx_model`, how the running
answers share a pass is in `mlx_batch`, what is kept of prompts and answers for later ones in `mlx_snapshots`, how a token is drawn in `sampling`. How an answer that runs alone goes on may be guessed (`mlx_draft`).
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from emberd._core import Capabilities
from emberd.constrain import hold
from emberd.engine import Fail, Made, Request, Step, at_least_one, is_admit, is_cancel, is_forget
from emberd.mlx_batch import Batch
from emberd.mlx_caches import Sizes, can_cut, compute, compute_after, copied
from emberd.mlx_draft import AHEAD, Draft
from emberd.mlx_draft import find as find_draft
from emberd.mlx_memory import kv_budget, limit
from emberd.mlx_model import Model
from emberd.mlx_snapshots import Snapshots, Source, next_point
from emberd.sampling import Room, Sampler, highest
from emberd.snapshots import default_budget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from emberd._core import Settings
    from emberd.engine import Order
    from emberd.mlx_model import Caches

PREFILL_CHUNK = 128
"""Prompt tokens in one step while answers are running or waiting to be cancelled."""

READ_AGAIN = 1
"""Tokens at the end of a prompt that are run even where they are kept: the last one, for its logits."""


class _Reading:
    """A prompt that is being read, and the caches that it is read into."""

    __slots__ = ("caches", "request", "source", "tokens")

    def __init__(self, request: Request, source: Source) -> None:
        self.request = request
        self.source = source
        """What it may start from."""
        self.tokens = len(request.prompt) + request.max_tokens
        """Of prompt and answer at most."""
        self.caches: Caches | None = None


class MlxEngine:
    """Prompts are read chunk by chunk, each alone, and then their answers decode together.

    A request waits until there is room for its keys and values, for it and all that came after it. The running answers
    are at the places `0..len(running)` of the batch.
    """

    def __init__(
        self,
        model: Model,
        fail: Fail,
        prefill_chunk: int = PREFILL_CHUNK,
        cache_bytes: int | None = None,
        kv_bytes: int | None = None,
        ahead: bool = True,
        draft: Draft | None = None,
        restore: Callable[[], None] = lambda: None,
    ) -> None:
        """`ahead`: whether a pass may be started before the tokens it reads are known here. `restore` is called when the engine is closed."""
        self.capabilities = Capabilities(
            context_length=model.context_length,
            max_batch=model.max_batch,
            vocab_size=model.vocab_size,
            eos_ids=model.eos_ids,
            constraints=True,
        )
        self._model = model
        self._eos = frozenset(model.eos_ids)
        self._fail = fail
        self._chunk = min(prefill_chunk, model.context_length)
        self._sizes = Sizes(model, self._chunk)
        self._kv_bytes = kv_budget() if kv_bytes is None else kv_bytes
        self._restore = restore
        self._exact = any(not can_cut([each]) or hasattr(each, "max_size") for each in model.new_caches())
        """Whether some of what is kept of a prompt will serve only prompts that begin with all of it."""
        self._draft = draft
        # Else the device waits for Python: over the CPU build, too, a step of 8 sequences of a tiny model takes 20 % longer.
        self._ahead = ahead
        self._batch = Batch(model)
        self._snapshots = Snapshots(default_budget() if cache_bytes is None else cache_bytes)
        self._room = Room(model.vocab_size)
        self._waiting: deque[_Reading] = deque()
        """In order of arrival; there is no room for the first of them."""
        self._prompts: list[_Reading] = []
        """Those that are being read, in order of arrival."""
        self._running: list[Request] = []
        self._shortest_next = False
        self._decoded_last = True

    @property
    def busy(self) -> bool:
        """Whether any request is in flight."""
        return bool(self._running or self._prompts or self._waiting)

    def take(self, order: Order) -> None:
        """Queues a request, forgets one, or forgets a snapshot."""
        if is_admit(order):
            request = Request(order)
            hold(request)
            self._waiting.append(_Reading(request, self._snapshots.source(request.salt, request.start_from)))
        elif is_cancel(order):
            self.drop((order.id,))
        elif is_forget(order):
            self._snapshots.forget(order.snapshot)

    def step(self) -> list[Step]:
        """One chunk of prompts or one token for every running answer, in turn where there are both."""
        self._let_in()
        if self._prompts and (self._decoded_last or not self._running):
            self._decoded_last = False
            return self._prefill()
        self._decoded_last = True
        return self._decode() if self._running else []

    def drop(self, gone: Iterable[int]) -> None:
        """Forgets requests and frees what they held."""
        ids = set(gone)
        if not ids:
            return
        self._waiting = deque(each for each in self._waiting if each.request.id not in ids)
        for each in [each for each in self._prompts if each.request.id in ids]:
            self._prompts.remove(each)
            if each.caches is not None:
                self._snapshots.save(each.request.prompt[: each.request.done], each.caches, each.request.salt)
        places = [place for place, each in enumerate(self._running) if each.id in ids]
        for place in places:  # a stop string ends an answer so, and it may be continued
            self._save_answer(place, None)
        self._leave(places)

    def close(self) -> None:
        """Frees the model and everything in flight."""
        self._waiting.clear()
        self._prompts.clear()
        self._running.clear()
        self._snapshots.clear()
        self._batch.close()
        del self._batch, self._model, self._room, self._draft
        mx.clear_cache()
        self._restore()

    def _let_in(self) -> None:
        """Lets those read their prompts for whose keys and values there is room, in the order in which they came."""
        while self._waiting:
            first = self._waiting[0]
            if (alone := self._sizes.of(first.tokens)) > self._kv_bytes:
                self._waiting.popleft()
                self._fail(
                    first.request.id,
                    f"prompt and answer would take {alone} bytes of keys and values, and there are {self._kv_bytes}; "
                    "hint: ask for fewer tokens, or raise --kv-bytes",
                )
                continue
            if self._running or self._prompts:
                # In the batch all are as long as the longest.
                running = [len(each.prompt) + each.max_tokens for each in self._running]
                tokens = [*running, *(each.tokens for each in self._prompts), first.tokens]
                if len(tokens) * self._sizes.of(max(tokens)) > self._kv_bytes:
                    return
            self._prompts.append(self._waiting.popleft())
            request = first.request
            request.done = self._snapshots.find(request.prompt[:-READ_AGAIN], first.source)

    def _prefill(self) -> list[Step]:
        """Reads up to a chunk of prompt tokens: more of one prompt and, where they fit, the whole of others."""
        steps: list[Step] = []
        budget = self._chunk
        reading = min(self._prompts, key=_unread) if self._shortest_next else self._prompts[0]
        self._shortest_next = not self._shortest_next
        while True:
            request = reading.request
            try:
                self._begin(reading)
                count = min(budget, request.unread)
                budget -= count
                step = self._read(reading, count)
            except Exception as fault:  # alone in its pass, so alone at fault: the others go on
                self._prompts.remove(reading)
                self._fail(request.id, f"the prompt cannot be read: {fault}")
            else:
                if step is not None:
                    if request.cached:
                        steps.append((request.id, request.cached))
                    steps.append(step)
            # A prompt is not split just to fill a chunk up: two short passes cost more than one.
            fitting = [each for each in self._prompts if each.request.unread <= budget]
            if not fitting:
                return steps
            reading = min(fitting, key=_unread)

    def _begin(self, reading: _Reading) -> None:
        """Gives a prompt its caches: those that an earlier one left, or empty ones."""
        if reading.caches is not None:
            return
        request, vocab = reading.request, self._model.vocab_size
        # MLX reads whatever lies behind the embedding.
        if (beyond := max(request.prompt)) >= vocab:
            raise ValueError(f"token id {beyond} is beyond the vocabulary of {vocab}")
        kept = self._snapshots.restore(request.prompt[:-READ_AGAIN], reading.source)
        reading.caches, request.cached = kept or (self._model.new_caches(), 0)
        request.done = request.cached

    def _read(self, reading: _Reading, count: int) -> Made | None:
        """Reads the next `count` tokens of a prompt; at its end, its first token."""
        request, caches = reading.request, reading.caches
        assert caches is not None
        end = request.done + count
        whole = end == len(request.prompt)
        self._extend(request, caches, end - 1 if whole else end)
        if not whole:
            return None
        logits = self._model(mx.array([request.prompt[-1:]]), caches)[:, -1]
        compute_after(logits, caches)
        request.done = end
        if not self._exact:
            self._save(request, caches)
        if request.sampling is None:
            token = int(mx.argmax(logits, axis=-1).tolist()[0])
        else:
            token = self._draw(np.array(logits[0].astype(mx.float32)), request)
        self._prompts.remove(reading)
        finish = request.finish(token, self._eos)
        request.answer.append(token)
        if finish is not None:
            if request.save_as is not None:
                self._snapshots.save(request.prompt, caches, request.salt, request.save_as)
        else:
            self._batch.join(caches, end, token)
            self._running.append(request)
        return request.step([token], finish)

    def _extend(self, request: Request, caches: Caches, end: int) -> None:
        """Reads a prompt up to `end`, which is before its last token: that one alone has its logits computed."""
        while request.done < end:
            point = next_point(request.done) if self._exact else end
            stop = min(end, point)
            self._model(mx.array([request.prompt[request.done : stop]]), caches)
            compute(caches)
            request.done = stop
            if self._exact and stop in (point, len(request.prompt) - 1):
                self._save(request, caches)

    def _save(self, request: Request, caches: Caches) -> None:
        """Keeps a copy of what has been read of a prompt."""
        if self._snapshots.budget:
            self._snapshots.save(request.prompt[: request.done], copied(caches), request.salt)

    def _save_answer(self, place: int, name: int | None) -> None:
        """Keeps what the batch holds of a prompt and its answer."""
        if self._snapshots.budget:
            request, length = self._running[place], self._batch.length(place)
            tokens = (request.prompt + request.answer)[:length]
            self._snapshots.save(tokens, self._batch.copy(place), request.salt, name)

    def _guesses(self) -> list[int]:
        """How the answer that runs alone may go on: what its constraint is certain of, else what a draft model guesses."""
        if len(self._running) > 1 or self._prompts or self._waiting or self._batch.under_way:
            return []
        [request] = self._running
        left = request.max_tokens - request.made - 1
        if len(certain := _certain(request)[: min(left, self._chunk)]) > 1:
            return certain
        most = AHEAD if request.speculation is None else request.speculation
        count = min(most, left)
        if self._draft is None:
            return []
        return self._draft.guess(request.id, request.prompt + request.answer, count) if count > 0 else []

    def _check(self, guesses: list[int]) -> list[Step]:
        """The next tokens of the answer that runs alone: as many as were guessed right, and one more."""
        [request], batch = self._running, self._batch
        likeliest = batch.check(guesses)
        made: list[int] = []
        finish: str | None = None
        for place, token in enumerate(likeliest):
            if request.sampling is not None:
                try:
                    token = self._draw(batch.logits(place), request)
                except ValueError as fault:
                    self._fail(request.id, f"no token can be drawn: {fault}")
                    self._leave([0])
                    return []
            finish = request.finish(token, self._eos)
            made.append(token)
            if finish is not None or guesses[place : place + 1] != [token]:
                break
        request.answer += made
        batch.keep(len(guesses) + 1 - len(made), made[-1])
        if finish is not None:
            self._save_answer(0, request.save_as)
            self._leave([0])
        return [request.step(made, finish)]

    def _decode(self) -> list[Step]:
        """One token for every running answer, all in one pass; of one that runs alone, those that were guessed right as well."""
        running, batch = self._running, self._batch
        if guesses := self._guesses():
            return self._check(guesses)
        # A pass that nobody will go on from is not started.
        goes_on = any(each.made + 1 < each.max_tokens for each in running)
        ahead = self._ahead and self._draft is None and goes_on and all(each.sampling is None for each in running)
        tokens = batch.step(ahead)
        steps: list[Step] = []
        ended: list[int] = []
        for place, request in enumerate(running):
            token = tokens[place]
            if request.sampling is not None:
                try:
                    token = self._draw(batch.logits(place), request)
                except ValueError as fault:  # the row's own logits: no fault of the others
                    ended.append(place)
                    self._fail(request.id, f"no token can be drawn: {fault}")
                    continue
                batch.feed(place, token)
            finish = request.finish(token, self._eos)
            request.answer.append(token)
            steps.append(request.step([token], finish))
            if finish is not None:
                ended.append(place)
                self._save_answer(place, request.save_as)
        self._leave(ended)
        return steps

    def _leave(self, places: list[int]) -> None:
        """Ends the answers at these places."""
        if places and self._draft is not None:
            self._draft.forget()
        self._batch.leave(places)
        gone = set(places)
        self._running = [each for place, each in enumerate(self._running) if place not in gone]

    def _draw(self, logits: NDArray[np.float32], request: Request) -> int:
        """The next token of a sampled answer. Raises `ValueError` when the logits are not numbers."""
        assert request.sampling is not None
        if request.sampler is None:
            request.sampler = Sampler(request.sampling, request.prompt, request.held)
        values, indices = highest(logits)
        token, logprob = request.sampler.choose(values, indices, logits, request.made, self._room)
        if logprob is not None:
            request.logprobs.append(logprob)
        return token


def _certain(request: Request) -> list[int]:
    """The tokens that a constraint is certain of."""
    # Where log probabilities are told, tokens come one by one, as over the other engine.
    if request.held is None or request.sampling is None or request.sampling.top_logprobs is not None:
        return []
    try:
        return request.held.forced()
    except ValueError:  # told where the next token is drawn
        return []


def _unread(reading: _Reading) -> int:
    return reading.request.unread


def load(folder: str, settings: Settings, fail: Fail) -> MlxEngine:
    """Opens the model in `folder`. Raises `EngineError` when it is not a folder this engine can run."""
    chunk = at_least_one("prefill_chunk", settings.prefill_chunk, PREFILL_CHUNK)
    restore = limit()
    try:
        model = Model(folder, settings)
        draft = find_draft(Path(folder), model, settings, chunk)
        budgets = settings.cache_bytes, settings.kv_bytes
        return MlxEngine(model, fail, chunk, *budgets, draft=draft, restore=restore)
    except BaseException:
        restore()
        raise
