"""A strict port in plain Python: it keeps the contract of `docs/port.md` and a test scripts what arrives at which step.

Orders are scheduled by step: `at(3, …)` is handed over by the first `poll` or `wait` after three pushes. `leave(3,
id)` lets the reader of `id` be found gone by the third push. The port closes by itself when nothing is scheduled and
nothing is in the engine, or at `close_at`. Whatever the engine does against the contract is raised to it and kept in
`violations`.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field

Logprob = tuple[float, list[tuple[int, float]]]
Made = tuple[int, list[int], str | None] | tuple[int, list[int], str | None, list[Logprob] | None]
Step = Made | tuple[int, int]


def rewritten(model: bytes, own: bool, activations: str) -> bytes | None:
    """Nothing of a graph is changed where the extension is not built."""
    return None


class PortError(Exception):
    """A call that the contract does not allow."""


@dataclass(frozen=True)
class Sampling:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    top_logprobs: int | None = None


@dataclass(frozen=True)
class Admit:
    id: int
    prompt: list[int]
    max_tokens: int
    sampling: Sampling | None = None
    constraint: object = None
    speculation: int | None = None
    salt: str = ""
    start_from: int | None = None
    save_as: int | None = None


@dataclass(frozen=True)
class Cancel:
    id: int


@dataclass(frozen=True)
class Forget:
    snapshot: int


@dataclass(frozen=True)
class Capabilities:
    context_length: int
    max_batch: int
    vocab_size: int
    eos_ids: list[int]
    constraints: bool = False


@dataclass(frozen=True)
class Settings:
    threads: int | None = None
    max_batch: int | None = None
    context_length: int | None = None
    spin: bool | None = None
    prefill_chunk: int | None = None
    cache_bytes: int | None = None
    kv_bytes: int | None = None
    activations: str | None = None
    kernels: str | None = None


@dataclass
class FakePort:
    """One engine's port.

    `pushes` has what every push made, `answers` each request's ids, `finishes` their ends, `logprobs` what was told of
    their ids, `cached` how much of a prompt was not read.
    """

    limit: int = 10_000
    pushes: list[list[Made]] = field(default_factory=list)
    answers: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[Logprob]] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    reason: str | None = None
    violations: list[str] = field(default_factory=list)
    capabilities: Capabilities | None = None
    waits: int = 0

    def __post_init__(self) -> None:
        self._schedule: dict[int, list[Admit | Cancel | Forget]] = defaultdict(list)
        self._leaving: dict[int, list[int]] = defaultdict(list)
        self._queue: list[Admit] = []
        self._inside: dict[int, Admit] = {}
        self._known: set[int] = set()
        self._close_step: int | None = None
        self._closed = False
        self._thread: int | None = None
        self._asked = True

    # What a test does.

    def at(self, step: int, *orders: Admit | Cancel | Forget) -> FakePort:
        """Schedules orders for the first call after `step` pushes."""
        self._schedule[step].extend(orders)
        return self

    def leave(self, push: int, *ids: int) -> FakePort:
        """Lets push number `push` (from 1) find the readers of `ids` gone."""
        self._leaving[push].extend(ids)
        return self

    def close_at(self, step: int) -> FakePort:
        """Closes the port after `step` pushes, whatever is in flight."""
        self._close_step = step
        return self

    # What an engine does.

    def ready(self, capabilities: Capabilities) -> None:
        self._check(first=True)
        if self.capabilities is not None:
            self._refuse("ready was called twice")
        self.capabilities = capabilities

    def wait(self) -> list[Admit | Cancel | Forget] | None:
        self._check()
        self.waits += 1
        if self._inside:
            self._refuse(f"wait was called with {sorted(self._inside)} in the engine")
        if not self._due() and not self._queue:
            later = [step for step, orders in self._schedule.items() if orders]
            if not later:
                self._closed = True
                return None
            self._schedule[len(self.pushes)] += self._schedule.pop(min(later))
        return self._orders()

    def poll(self) -> list[Admit | Cancel | Forget] | None:
        self._check()
        return self._orders()

    def push(self, steps: list[Step]) -> list[int]:
        self._check()
        if not self._asked:
            self._refuse("two pushes without asking for orders between them")
        self._asked = False
        if self._closed:
            return [each[0] for each in steps]
        told = {step[0]: step[1] for step in steps if len(step) == 2}
        made = [step for step in steps if len(step) != 2]
        self.pushes.append(made)
        if len(self.pushes) > self.limit:
            self._refuse(f"more than {self.limit} pushes")
        for id, cached in told.items():
            self._tell(id, cached)
        for id, tokens, finish, *rest in made:
            self._accept(id, tokens, finish, rest[0] if rest else None)
        gone = [id for id in self._leaving.pop(len(self.pushes), []) if id in self._inside]
        for id in gone:
            del self._inside[id]
        return gone

    def fail(self, id: int | None, message: str) -> None:
        if self.reason is not None:
            self._refuse("fail(None) is the last call, and it was made before")
        if id is None:
            self.reason = message
            return
        if id not in self._inside:
            self._refuse(f"fail for {id}, which is not in the engine")
        self.failures[id] = message
        del self._inside[id]

    # The contract.

    def _check(self, first: bool = False) -> None:
        thread = threading.get_ident()
        if self._thread is None:
            self._thread = thread
        if self._thread != thread:
            self._refuse("calls from two threads")
        if self.reason is not None:
            self._refuse("a call after fail(None)")
        if not first and self.capabilities is None:
            self._refuse("a call before ready")

    def _due(self) -> bool:
        return any(orders and step <= len(self.pushes) for step, orders in self._schedule.items())

    def _orders(self) -> list[Admit | Cancel | Forget] | None:
        self._asked = True
        if self._close_step is not None and len(self.pushes) >= self._close_step:
            self._closed = True
        if self._closed:
            return None
        assert self.capabilities is not None
        orders: list[Admit | Cancel | Forget] = []
        for step in sorted(each for each in self._schedule if each <= len(self.pushes)):
            for order in self._schedule.pop(step):
                if isinstance(order, Forget):
                    orders.append(order)
                elif isinstance(order, Admit):
                    assert order.id not in self._known, "a test uses an id twice"
                    assert len(order.prompt) + order.max_tokens <= self.capabilities.context_length
                    self._known.add(order.id)
                    self._queue.append(order)
                elif any(each.id == order.id for each in self._queue):
                    self._queue = [each for each in self._queue if each.id != order.id]
                elif order.id in self._inside:
                    del self._inside[order.id]
                    orders.append(order)
        while self._queue and len(self._inside) < self.capabilities.max_batch:
            admitted = self._queue.pop(0)
            self._inside[admitted.id] = admitted
            self.answers[admitted.id] = []
            orders.append(admitted)
        return orders

    def _tell(self, id: int, cached: int) -> None:
        if id not in self._inside:
            self._refuse(f"cached tokens of {id}, which is not in the engine")
        if id in self.cached or self.answers[id]:
            self._refuse(f"cached tokens of {id} twice or after its first token")
        if type(cached) is not int or not 0 <= cached < len(self._inside[id].prompt):
            self._refuse(f"{cached!r} of {len(self._inside[id].prompt)} tokens of {id} are cached")
        self.cached[id] = cached

    def _accept(self, id: int, tokens: list[int], finish: str | None, logprobs: list[Logprob] | None) -> None:
        assert self.capabilities is not None
        if id not in self._inside:
            self._refuse(f"push for {id}, which is not in the engine")
        for token in tokens:
            if type(token) is not int or not 0 <= token < self.capabilities.vocab_size:
                self._refuse(f"{token!r} for {id} is not a token id")
        if logprobs:
            self._hear(id, tokens, logprobs)
        answer, eos = self.answers[id], self.capabilities.eos_ids
        answer += tokens
        limit = self._inside[id].max_tokens
        if len(answer) > limit:
            self._refuse(f"{len(answer)} tokens for {id}, which asked for {limit}")
        ended_by_eos = bool(answer) and answer[-1] in eos
        if any(each in eos for each in answer[:-1]):
            self._refuse(f"{id} goes on after an eos id")
        expected = "stop" if ended_by_eos else "length" if len(answer) == limit else None
        if finish != expected:
            self._refuse(f"finish of {id} is {finish!r} where {expected!r} was due")
        if finish is not None:
            self.finishes[id] = finish
            del self._inside[id]

    def _hear(self, id: int, tokens: list[int], logprobs: list[Logprob]) -> None:
        sampling = self._inside[id].sampling
        if sampling is None or sampling.top_logprobs is None:
            self._refuse(f"log probabilities for {id}, which did not ask")
            return
        if len(logprobs) != len(tokens):
            self._refuse(f"{len(logprobs)} log probabilities for {len(tokens)} tokens of {id}")
        for logprob, top in logprobs:
            values = [each for _, each in top]
            known = {token for token, _ in top}
            if len(known) != len(top) or len(top) > sampling.top_logprobs or values != sorted(values, reverse=True):
                self._refuse(f"{top} for {id}, which asked for the {sampling.top_logprobs} likeliest")
            if not all(-1e4 < each <= 0.0 for each in (logprob, *values)):
                self._refuse(f"{logprob} and {values} for {id} are not logarithms of probabilities")
        self.logprobs.setdefault(id, []).extend(logprobs)

    def _refuse(self, what: str) -> None:
        self.violations.append(what)
        raise PortError(what)


@dataclass(frozen=True)
class Launch:
    engine: str
    folder: str
    settings: Settings
    port: FakePort
