"""Starts a worker that outlives this process: in a session of its own, with nothing of this process's terminal, and all it says in a log.

Whether the worker that was started is the one that answers in the end is not decided here: of several that are started at once, one stays.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from emberd.client.errors import WorkerNotStarted
from emberd.client.place import default_socket, prepare

DEFAULT_TAG = "emberd"
"""The tag of a worker that is started by a client without one."""
LOG_LIMIT = 1 << 20
"""Bytes of a log; a longer one is put aside, as `<name>.1`, before the next worker is started."""
LOG_TAIL = 2000
"""Characters of a log that an error shows."""
LEFT_OUT = frozenset(
    f"GIT_{name}"
    for name in ("DIR", "COMMON_DIR", "WORK_TREE", "INDEX_FILE", "OBJECT_DIRECTORY", "ALTERNATE_OBJECT_DIRECTORIES")
)
"""Variables that a worker does not inherit: started from a hook of git's, it would live with one repository's for as long as it lives."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a client was told about its worker."""

    model_key: str
    socket: Path
    shared_folder: bool
    """Whether the socket's folder is one that the user named, and not the runtime folder."""
    tag: str | None
    model: str | None
    spawn: bool
    replace: bool
    command: tuple[str, ...]
    idle_timeout: float | None
    connect_timeout: float
    start_timeout: float
    retries: int

    @property
    def log(self) -> Path:
        """Where a worker that is started writes what it has to say: beside the socket."""
        socket = self.socket
        return socket.with_suffix(".log") if socket.suffix == ".sock" else socket.with_name(f"{socket.name}.log")

    @property
    def arguments(self) -> list[str]:
        """The command line of a worker."""
        tag = DEFAULT_TAG if self.tag is None else self.tag
        arguments = [*self.command, "--socket", str(self.socket), "--model-key", self.model_key, "--tag", tag]
        if self.model is not None:
            arguments += ["--model", self.model]
        if self.idle_timeout is not None:
            arguments += ["--idle-ms", str(max(1, round(self.idle_timeout * 1000)))]
        return arguments


def settings(
    model_key: str,
    *,
    socket: str | os.PathLike[str] | None,
    tag: str | None,
    model: str | os.PathLike[str] | None,
    spawn: bool,
    replace: bool,
    command: Sequence[str] | None,
    idle_timeout: float | None,
    connect_timeout: float,
    start_timeout: float,
    retries: int,
) -> Settings:
    """What the clients' arguments come to. Raises `ValueError` or `TypeError` for those that make no sense."""
    if not model_key:
        raise ValueError("the model key is empty")
    if isinstance(command, str):
        raise TypeError("command is a list of a program and its first arguments, not one string")
    for name, value in (
        ("idle_timeout", idle_timeout),
        ("connect_timeout", connect_timeout),
        ("start_timeout", start_timeout),
    ):
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value} seconds, and must be above 0")
    if retries < 0:
        raise ValueError(f"retries is {retries}, below 0")
    if command is None:
        # -P: what lies in the folder that this program happens to run in is nothing to import.
        command = (sys.executable or "python3", "-P", "-m", "emberd", "worker")
    return Settings(
        model_key=model_key,
        # Made absolute now: the worker and this client mean the same path, wherever either goes.
        socket=default_socket(model_key) if socket is None else Path(socket).absolute(),
        shared_folder=socket is not None,
        tag=tag,
        model=None if model is None else os.fspath(model),
        spawn=spawn,
        replace=replace,
        command=tuple(command),
        idle_timeout=idle_timeout,
        connect_timeout=connect_timeout,
        start_timeout=start_timeout,
        retries=retries,
    )


class Launch:
    """A worker that was started."""

    def __init__(self, settings: Settings) -> None:
        """Starts it. Raises `WorkerNotStarted` when the operating system refuses, and `WorkerError` for a folder that will not do."""
        prepare(settings.socket.parent, private=not settings.shared_folder)
        self._log = settings.log
        try:
            log = _open(self._log)
        except OSError as error:
            raise WorkerNotStarted(f"could not open the log {self._log}: {error.strerror}") from error
        try:
            self._offset = os.fstat(log).st_size
            popen = subprocess.Popen(
                settings.arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={name: value for name, value in os.environ.items() if name not in LEFT_OUT},
                start_new_session=True,
            )
        except OSError as error:
            what = f"could not run {settings.arguments[0]}: {error.strerror}"
            raise WorkerNotStarted(what, "give a program that starts workers as command=") from error
        finally:
            os.close(log)
        self.exit_code: int | None = None
        """How it ended, negative for a signal; `None` while it runs."""
        # Somebody has to hear of its end: the operating system keeps it as a zombie until then.
        threading.Thread(target=self._reap, args=(popen,), name="emberd worker's end", daemon=True).start()

    def _reap(self, popen: subprocess.Popen[bytes]) -> None:
        self.exit_code = popen.wait()

    def tail(self) -> str:
        """The end of what has been written to the log since the start."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(self._offset, file.seek(0, os.SEEK_END) - 4 * LOG_TAIL))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return ""
        lines = [line for line in text.splitlines() if not line.startswith("omp tiny worker listening on")]
        return "\n".join(lines)[-LOG_TAIL:].strip()


def _open(log: Path) -> int:
    try:
        if log.lstat().st_size > LOG_LIMIT:
            log.replace(log.with_name(f"{log.name}.1"))
    except FileNotFoundError:
        pass
    return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
