"""Clients of the worker door: `Worker` for threads, `AsyncWorker` for asyncio, and what they raise and return.

`core` says what a client does, once for both; `link` what they have each in its own way; `wire` what stands on the line; `place` where sockets are;
`launch` how a worker is started. Nothing here knows models or engines, and only what is used is imported: a program of threads never imports asyncio.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emberd.client.aio import AsyncWorker, run
    from emberd.client.errors import (
        ConnectionLost,
        ProtocolError,
        RequestFailed,
        TagMismatch,
        WorkerError,
        WorkerNotStarted,
        WorkerTimeout,
    )
    from emberd.client.threads import Worker
    from emberd.client.wire import Message, Progress, Status

__all__ = [
    "AsyncWorker",
    "ConnectionLost",
    "Message",
    "Progress",
    "ProtocolError",
    "RequestFailed",
    "Status",
    "TagMismatch",
    "Worker",
    "WorkerError",
    "WorkerNotStarted",
    "WorkerTimeout",
    "run",
]

_ROOMS = {
    "AsyncWorker": "aio",
    "run": "aio",
    "Worker": "threads",
    "Message": "wire",
    "Progress": "wire",
    "Status": "wire",
}


def __getattr__(name: str) -> object:
    """A name of this package, imported on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_ROOMS.get(name, 'errors')}"), name)
    globals()[name] = value
    return value
