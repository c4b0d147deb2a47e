"""Something that listens where a worker would, and says what a test wants it to say."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from support.process import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TAG = "fake"


class Peer:
    """One connection, seen from the fake's side."""

    def __init__(self, connection: socket.socket, number: int) -> None:
        self._connection = connection
        self.number = number
        """0 for the first connection."""

    def say(self, *messages: dict[str, Any] | bytes) -> None:
        """Sends messages; bytes go as they are."""
        for message in messages:
            self._connection.sendall(message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n")

    def pong(self, request: dict[str, Any], tag: str = TAG) -> None:
        self.say({"type": "pong", "id": request["id"], "tag": tag})

    def text(self, request: dict[str, Any], text: str) -> None:
        self.say({"type": "text", "id": request["id"], "text": text})

    def hang_up(self) -> None:
        self._connection.shutdown(socket.SHUT_RDWR)


class Fake:
    """A fake worker. Pings are answered, unless `pings` are the test's as well; all else goes to `answer`."""

    def __init__(self, path: Path, answer: Callable[[Peer, dict[str, Any]], None], *, pings: bool) -> None:
        self.requests: list[dict[str, Any]] = []
        self.connections = 0
        self.open = 0
        self._changed = threading.Condition()
        self._sockets: list[socket.socket] = []
        fake = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with fake._changed:
                    peer = Peer(self.connection, fake.connections)
                    fake.connections += 1
                    fake.open += 1
                    fake._sockets.append(self.connection)
                try:
                    for line in self.rfile:
                        request = json.loads(line)
                        if request["type"] == "ping" and not pings:
                            peer.pong(request)
                            continue
                        with fake._changed:
                            fake.requests.append(request)
                            fake._changed.notify_all()
                        answer(peer, request)
                except OSError:
                    pass  # Either side has hung up.
                finally:
                    with fake._changed:
                        fake.open -= 1
                        fake._changed.notify_all()

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True
            request_queue_size = 64

        self._server = Server(str(path), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def until(self, look: Callable[[], bool], what: str) -> None:
        """Waits until something is true that a request or a hang-up makes true."""
        with self._changed:
            assert self._changed.wait_for(look, DEADLINE), f"not within {DEADLINE} s: {what}"

    def asked(self, count: int) -> list[dict[str, Any]]:
        """The requests, once there are so many of them."""
        self.until(lambda: len(self.requests) >= count, f"{count} requests")
        return self.requests

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(DEADLINE)
        self._server.server_close()
        with self._changed:
            for each in self._sockets:
                with suppress(OSError):  # Gone already.
                    each.shutdown(socket.SHUT_RDWR)
        self.until(lambda: self.open == 0, "all connections are closed")


@contextmanager
def fake(
    path: Path, answer: Callable[[Peer, dict[str, Any]], None] = lambda _peer, _request: None, *, pings: bool = False
) -> Iterator[Fake]:
    """A fake worker for as long as the block runs."""
    one = Fake(path, answer, pings=pings)
    try:
        yield one
    finally:
        one.close()
        path.unlink(missing_ok=True)
