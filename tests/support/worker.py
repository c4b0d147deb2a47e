"""A worker process, and clients that speak to its socket in bytes."""

from __future__ import annotations

import json
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from support.process import DEADLINE, Process, emberd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEY, TAG = "tiny", "tag-1"


class Client:
    """One connection. A message is a dictionary, or a line in bytes without its newline."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(DEADLINE)
        try:
            self.socket.connect(str(path))
        except OSError:
            self.socket.close()
            raise
        self._file = self.socket.makefile("rb")

    def send(self, *messages: dict[str, Any] | bytes) -> None:
        """Sends messages, in one piece."""
        lines = (message if isinstance(message, bytes) else json.dumps(message).encode() for message in messages)
        self.socket.sendall(b"".join(line + b"\n" for line in lines))

    def line(self) -> bytes:
        """The next line as it came, with its newline; empty when the worker has hung up."""
        return self._file.readline()

    def read(self) -> dict[str, Any]:
        """The next reply."""
        line = self.line()
        assert line.endswith(b"\n"), f"no whole line: {line!r}"
        reply = json.loads(line)
        assert isinstance(reply, dict)
        return reply

    def ask(self, message: dict[str, Any] | bytes) -> dict[str, Any]:
        """The reply to a message; news of a load that comes before it is passed over."""
        self.send(message)
        while (reply := self.read())["type"] == "progress":
            pass
        return reply

    def finish(self) -> None:
        """Sends no more, but goes on reading."""
        self.socket.shutdown(socket.SHUT_WR)

    def rest(self) -> list[dict[str, Any]]:
        """Everything until the worker hangs up."""
        return [json.loads(line) for line in self._file]

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Worker:
    """A worker that listens."""

    def __init__(self, process: Process, path: Path) -> None:
        self.process = process
        self.path = path

    def connect(self) -> Client:
        return Client(self.path)


@contextmanager
def worker(
    path: Path, *options: str | Path, engine: str = "mock", key: str = KEY, home: Path, **env: str
) -> Iterator[Worker]:
    """A worker at `path`, from the moment that it listens until the block ends."""
    arguments = ("worker", "--socket", path, "--model-key", key, "--tag", TAG, "--engine", engine, *options)
    with emberd(*arguments, home=home, **env) as process:
        process.line(f"listening on {path}")
        yield Worker(process, path)


def chat(at: object, text: str = "hello", tokens: int = 8, **more: object) -> dict[str, Any]:
    """A chat request."""
    return {"type": "chat", "id": at, "messages": [{"role": "user", "content": text}], "maxNewTokens": tokens, **more}
