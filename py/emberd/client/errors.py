"""What a client raises: one class for each thing that a program may want to handle in its own way.

All of them are a `WorkerError`, and each says what happened and, as its `hint`, what to do about it.
"""

from __future__ import annotations


class WorkerError(Exception):
    """Something went wrong between this program and its worker."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        """What happened, on one line."""
        self.hint = hint
        """What to do about it, if anything is known to help."""

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}; hint: {self.hint}"


class ConnectionLost(WorkerError, ConnectionError):
    """The worker hung up, or this client was closed, before the call was answered. The next call connects again.

    A worker hangs up on what is in flight when it is told to end, and when its trouble is a passing one: asking again is sensible.
    """


class WorkerTimeout(WorkerError, TimeoutError):
    """The call's time was over before it was answered. The connection stays in use; an answer that still comes is dropped."""


class ProtocolError(WorkerError):
    """What is connected said something that no worker says."""


class RequestFailed(WorkerError):
    """The worker answered with an error. `message` and `hint` are the worker's own; the same request would fail again, unless its cause is removed."""


class WorkerNotStarted(WorkerError):
    """No worker listens, and none could be started."""

    log_tail: str = ""
    """The last that the worker wrote to its log, at most 2,000 characters; empty when nothing was started."""

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\n{self.log_tail}" if self.log_tail else text


class TagMismatch(WorkerError):
    """The worker that listens was started with another tag than this client asks for."""

    expected: str = ""
    """The tag that this client asks for."""
    found: str = ""
    """The tag that the worker has."""
