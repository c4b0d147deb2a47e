"""What an engine is: the protocol that the loop drives, and the little that every engine needs to keep it.

Says nothing of how tokens are made, and imports nothing that an engine needs: reading this module costs no model
library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

if TYPE_CHECKING:
    from emberd._core import Admit, Cancel, Capabilities, Constraint, Forget, Sampling, Settings
    from emberd.constrain import Held
    from emberd.sampling import Sampler
    from emberd.speculate import Drafter

    Order = Admit | Cancel | Forget
    """One thing the other side asks for."""

Logprob = tuple[float, list[tuple[int, float]]]
"""The natural logarithm of a token's probability, and the likeliest tokens with theirs."""

Made = tuple[int, list[int], str | None] | tuple[int, list[int], str | None, list[Logprob] | None]
"""What one forward pass made for one request: its id, the new token ids in order, the finish if it ended, and the log
probability of each of the ids where they were asked for."""

Cached = tuple[int, int]
"""Of one request, its id and how many tokens of its prompt were not read because an earlier one had been."""

Step = Made | Cached
"""One entry of a push."""

Fail = Callable[[int, str], None]
"""Ends one request with an error: the port's `fail`, for faults that an engine can lay to a single sequence."""


class EngineError(Exception):
    """What the user can mend, such as a folder that holds no model; its text is one line with a hint in it."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(f"{what}; hint: {hint}")


class Engine(Protocol):
    """A loaded model. One thread makes every call, from `load` to `close`."""

    @property
    def capabilities(self) -> Capabilities:
        """What the model can do; constant."""

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""

    def take(self, order: Order) -> None:
        """Accepts an order. Cheap: the work is done in `step`."""

    def step(self) -> list[Step]:
        """Runs one forward pass and returns what it made, perhaps nothing (a prefill chunk). Raises when it fails."""

    def drop(self, gone: Iterable[int]) -> None:
        """Forgets requests whose reader has left and frees what they held; an id it does not know is ignored."""

    def close(self) -> None:
        """Frees the model, whatever is in flight. No call follows."""


class EngineModule(Protocol):
    """What the module of an engine offers."""

    def load(self, folder: str, settings: Settings, fail: Fail) -> Engine:
        """Loads the model in `folder`. Raises `EngineError` when the folder or the settings do not allow it."""


def is_admit(order: Order) -> TypeGuard[Admit]:
    """Tells an `Admit` from the others without importing it; reading `prompt` would copy it."""
    return hasattr(order, "max_tokens")


def is_forget(order: Order) -> TypeGuard[Forget]:
    """Tells a `Forget` from the others."""
    return hasattr(order, "snapshot")


def is_cancel(order: Order) -> TypeGuard[Cancel]:
    """Tells a `Cancel` from the others."""
    return not hasattr(order, "snapshot") and not is_admit(order)


class Request:
    """One request inside an engine: what was asked, and how far its answer has come."""

    __slots__ = (
        "answer",
        "arrival",
        "cached",
        "constraint",
        "done",
        "drafter",
        "finished",
        "held",
        "id",
        "kept",
        "logprobs",
        "made",
        "max_tokens",
        "prompt",
        "room",
        "row",
        "salt",
        "sampler",
        "sampling",
        "save_as",
        "source",
        "speculation",
        "start_from",
        "text",
        "waits_again",
    )

    def __init__(self, order: Admit) -> None:
        self.id: int = order.id
        self.prompt: list[int] = order.prompt
        self.max_tokens: int = order.max_tokens
        self.sampling: Sampling | None = order.sampling
        self.constraint: Constraint | None = order.constraint
        self.held: Held | None = None
        """What draws under the constraint, in an engine that keeps one."""
        self.sampler: Sampler | None = None
        """What chooses its tokens, from the first one on; kept by the engine."""
        self.speculation: int | None = order.speculation
        self.drafter: Drafter | None = None
        """What guesses how its answer goes on; kept by the engine."""
        self.salt: str = order.salt
        self.start_from: int | None = order.start_from
        self.save_as: int | None = order.save_as
        self.logprobs: list[Logprob] = []
        """Of the tokens that have been chosen and not been handed over yet, where they were asked for."""
        self.done = 0
        """Prompt tokens that have been through the model, for this request or, so far as is known, for an earlier one."""
        self.cached = 0
        """Of these, those that an earlier request left."""
        self.made = 0
        """Tokens of the answer."""
        self.finished = False
        """Whether its answer has come to its end."""
        self.answer: list[int] = []
        """The tokens of the answer, in an engine that needs them again."""
        self.kept = 0
        """Tokens of prompt and answer that later requests can start from."""
        self.row: int | None = None
        """Where the engine keeps it while its prompt is read."""
        self.text: list[int] = self.prompt
        """What has to be read before the answer can go on: the prompt, and what there is of an answer that had to make room."""
        self.arrival = 0
        """Its number in the order of arrival, in an engine that queues."""
        self.waits_again = False
        """Whether it had to make room for others and waits for its own again."""
        self.room = 0
        """Tokens that it may hold keys and values of before it has to ask for more memory."""
        self.source: Any = None
        """The engine's snapshot that it starts from, leased until what it holds has been copied; `None` where there is none.

        Over MLX a lease keeps nothing: the snapshot may go meanwhile, and what it held is read again.
        """

    @property
    def unread(self) -> int:
        """Tokens that have yet to go through the model before the answer can go on."""
        return len(self.text) - self.done

    def step(self, tokens: list[int], finish: str | None) -> Made:
        """Hands over new tokens, with their log probabilities where there are any."""
        if not self.logprobs:
            return (self.id, tokens, finish)
        logprobs, self.logprobs = self.logprobs, []
        return (self.id, tokens, finish, logprobs)

    def finish(self, token: int, eos_ids: frozenset[int]) -> str | None:
        """Counts one new token and says whether the answer ends with it, and how."""
        self.made += 1
        self.finished = token in eos_ids or self.made >= self.max_tokens
        if token in eos_ids:
            return "stop"
        return "length" if self.finished else None


def eos_ids(*configs: dict[str, Any]) -> list[int]:
    """`eos_token_id` of the first config that has one: an integer or a list of them, as Hugging Face writes it."""
    for config in configs:
        value = config.get("eos_token_id")
        if isinstance(value, int):
            return [value]
        if isinstance(value, list):
            return [int(each) for each in value]
    return []


def at_least_one(name: str, value: int | None, default: int) -> int:
    """A setting, or its default where the user has none. Raises `EngineError` when it is below 1."""
    if value is None:
        return default
    if value < 1:
        raise EngineError(f"{name} is {value}", f"give {name} a value of 1 or more, or leave it out for {default}")
    return value
