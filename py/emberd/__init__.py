"""emberd keeps a small language model warm for every program on a machine.

The `emberd` command serves it over HTTP and over a Unix socket; `Worker` and `AsyncWorker` are clients of that socket, which start a worker where
there is none. Importing the package costs nothing: engines are imported when a model is loaded, and the clients when one of their names is used.
"""

TYPE_CHECKING = False  # As in `typing`, which would be the one import here.
if TYPE_CHECKING:
    from emberd.client import (
        AsyncWorker,
        ConnectionLost,
        Message,
        Progress,
        ProtocolError,
        RequestFailed,
        Status,
        TagMismatch,
        Worker,
        WorkerError,
        WorkerNotStarted,
        WorkerTimeout,
    )

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
]


def __getattr__(name: str) -> object:
    """The clients' names, imported on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from emberd import client

    value: object = getattr(client, name)
    globals()[name] = value
    return value
