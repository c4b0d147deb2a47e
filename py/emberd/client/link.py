"""What the two clients have each in its own way: connections, and the calls made over them. And the end of a call's time.

The methods are coroutines. Those of the threads' client wait inside and never suspend, so `at_once` runs what is made of them as a plain function.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from emberd.client.errors import WorkerTimeout
from emberd.client.wire import Reply

T = TypeVar("T")


class Deadline:
    """The end of a call's time."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        # What clocks cannot count to is no end.
        self._end = None if seconds is None or seconds > 1e9 else time.monotonic() + seconds

    def left(self) -> float | None:
        """Seconds until then, 0 when it is over; `None` when there is no end."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return self.left() == 0

    def within(self, seconds: float) -> Deadline:
        """The earlier one of this and the end of so many seconds from now."""
        left = self.left()
        # The caller's own number stays what an error speaks of.
        return self if left is not None and left <= seconds else Deadline(seconds)

    def passed(self, what: str) -> WorkerTimeout:
        """The error that says so: what was not done in time."""
        return WorkerTimeout(what if self._seconds is None else f"{what} within {self._seconds:g} s")


class Call(Protocol):
    """One request that was sent."""

    async def reply(self, deadline: Deadline) -> Reply:
        """The next reply. Raises what ended the connection, or `WorkerTimeout`."""

    def drop(self) -> None:
        """Waits for no further reply. Harmless when all have come."""


class Link(Protocol):
    """One connection."""

    @property
    def alive(self) -> bool:
        """Whether it can still be asked."""

    def ask(self, kind: str, fields: Mapping[str, Any]) -> Call:
        """Sends a request. Raises `ConnectionLost`."""

    def close(self) -> None:
        """Hangs up; what waits ends with `ConnectionLost`."""


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    coroutine.close()
    raise RuntimeError("a coroutine of the threads' client was suspended")
