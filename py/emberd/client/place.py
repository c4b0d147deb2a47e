"""Where the sockets of this user's workers are: the folder, the names, and what the operating system allows.

Nothing is connected and nothing started here, except that `dial` opens a socket.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
import sys
from pathlib import Path

from emberd.client.errors import WorkerError

MAX_PATH = 107 if sys.platform == "linux" else 103
"""The longest path in bytes that a socket address holds, without its final zero byte (`sun_path`)."""


def default_socket(model_key: str) -> Path:
    """The socket of the worker for a model key: `<key>.sock` in the runtime folder, with `_` for what is not in `[A-Za-z0-9._-]`."""
    return runtime_folder() / f"{re.sub(r'[^A-Za-z0-9._-]', '_', model_key)}.sock"


def runtime_folder() -> Path:
    """The folder of this user's sockets: `$XDG_RUNTIME_DIR/emberd`, else `emberd/run` in the cache folder. It need not exist yet.

    `emberd status` looks into both. A variable that names no folder (left over from another session, in a container) is passed over.
    """
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if runtime.is_absolute() and runtime.is_dir():
        return runtime / "emberd"
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not caches.is_absolute():
        caches = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return caches / "emberd" / "run"


def check(path: Path) -> None:
    """Raises `WorkerError` for a path that no socket address holds."""
    if "\0" in str(path):
        raise WorkerError(f"the socket path has a zero byte in it: {str(path)!r}", "give another path as socket=")
    length = len(os.fsencode(path))
    if length > MAX_PATH:
        raise WorkerError(
            f"the socket path has {length} bytes, and the system allows {MAX_PATH}: {path}",
            "give a shorter path as socket=",
        )


def prepare(folder: Path, *, private: bool) -> None:
    """Creates a socket's folder, for this user alone (mode 0700), where it does not exist.

    Raises `WorkerError` when it cannot be created, and, if it has to be `private`, when it is another user's or others may write to it: they could put
    a socket of their own there.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat() if private else folder.stat()
    except OSError as error:
        raise WorkerError(
            f"could not create the folder {folder}: {error.strerror}", "give another path as socket="
        ) from error
    if private and (not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022):
        raise WorkerError(
            f"{folder} is not a folder of this user's alone", f"remove it, or make it so: chmod 700 {folder}"
        )


def dial(path: Path) -> socket.socket | None:
    """A connection, not blocking; `None` when nobody listens.

    Raises `BlockingIOError` when somebody listens and has no room for another connection just now, and another `OSError` when nobody can tell.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.setblocking(False)
        connection.connect(os.fspath(path))
    except BaseException as error:
        connection.close()
        # A file that is no socket refuses as well; where it does not, it says what it is.
        if (
            isinstance(error, ConnectionRefusedError | FileNotFoundError)
            or getattr(error, "errno", 0) == errno.ENOTSOCK
        ):
            return None
        raise
    return connection
