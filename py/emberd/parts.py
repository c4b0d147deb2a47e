"""What an engine that batches is made of, beside what all of them share: its rows, the memory for them, what it keeps for later.

Each engine has its own of these, since arrays are; `batching` drives them, and says nothing of arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from emberd._core import Capabilities

if TYPE_CHECKING:
    from collections.abc import Sequence

    from emberd.engine import Request


class Rows(Protocol):
    """The sequences an engine computes, a row each: the running answers are in the rows `0..n`, prompts in rows above them."""

    def extend(self, row: int, tokens: Sequence[int], /) -> None:
        """Runs `tokens` through the model after what the row holds already; `draw` then chooses the token after them."""

    def decode(self, count: int, /) -> None:
        """Runs the next token of each of the rows `0..count`."""

    def greedy(self, count: int, /) -> list[int]:
        """The likeliest token of each of the rows `0..count` after a pass."""

    def draw(self, row: int, request: Request, /) -> int:
        """The next token of a request's answer, from the row's logits after a pass. Raises `ValueError` when they are NaN."""

    def feed(self, row: int, token: int, /) -> None:
        """Sets the token that the row reads in the next `decode`."""

    def feed_greedy(self, count: int, /) -> None:
        """Lets each of the rows `0..count` read its likeliest token in the next `decode`."""

    def check(self, row: int, draft: Sequence[int], /) -> None:
        """Runs the row's next token and `draft` after it: `look` then shows the logits after each, and `keep` says which stay."""

    def look(self, row: int, place: int, /) -> None:
        """Makes the logits after token `place` of the last check, from 0, those of the row."""

    def keep(self, row: int, length: int, /) -> None:
        """Takes the tokens of a row after the first `length` as not run."""

    def length(self, row: int, /) -> int:
        """Tokens in the row."""

    def lengths(self, count: int, /) -> list[int]:
        """Tokens in each of the rows `0..count`."""

    def release(self, row: int, /) -> None:
        """Empties a row and gives its memory back."""


class Snapshots(Protocol):
    """What is kept of earlier prompts and answers, as far as it is the same for all engines. Lengths are tokens."""

    def find(self, tokens: Sequence[int], salt: str, source: Any, /) -> int:
        """How long a prefix of `tokens` can be had: from `source` alone where there is one; it counts as used."""

    def lease(self, name: int, salt: str, /) -> Any:
        """What has a name, until `release`; `None` where nothing of this salt has it. It need not be kept: what went meanwhile is not found."""

    def release(self, source: Any, /) -> None:
        """Ends a lease."""

    def forget(self, name: int, /) -> None:
        """Takes a name away; what it held serves on, as what has no name does."""


class Budget(Protocol):
    """Memory for keys and values, and who holds how much of it: `Request.room` says for how many tokens."""

    def could_hold(self, tokens: int) -> bool:
        """Whether so many tokens have room where nobody else holds any."""

    def has(self, tokens: int, spare: int) -> bool:
        """Whether one more request's tokens have room now, and `spare` requests can grow by a block."""

    def hold(self, request: Request, tokens: int) -> bool:
        """Lets a request hold room for `tokens` in all. Changes nothing where there is not enough left."""

    def give_back(self, request: Request) -> None:
        """Frees all that a request holds."""

    def no_room(self, what: str, tokens: int) -> str:
        """Why a request fails that cannot hold the keys and values of so many tokens, even alone."""


class Limits(Protocol):
    """What a model says of itself, in tokens and sequences."""

    @property
    def context_length(self) -> int:
        """Of prompt and answer together."""

    @property
    def max_batch(self) -> int:
        """The most sequences at a time."""

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""

    @property
    def eos_ids(self) -> Sequence[int]:
        """The ids that end an answer."""


def capabilities(model: Limits) -> Capabilities:
    """What an engine that batches can do with a model: all that the model can, under constraints too."""
    return Capabilities(
        context_length=model.context_length,
        max_batch=model.max_batch,
        vocab_size=model.vocab_size,
        eos_ids=model.eos_ids,
        constraints=True,
    )
