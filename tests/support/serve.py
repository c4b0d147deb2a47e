"""A server process, and a client that speaks HTTP to it over TCP or a Unix socket."""

from __future__ import annotations

import http.client
import json
import re
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from support.process import DEADLINE, Process, emberd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Event = tuple[str, dict[str, Any]]


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=DEADLINE)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Stream:
    """The events of one answer, as they come."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self._connection = connection
        self._response = response
        self.status = response.status
        self.done = False

    def __iter__(self) -> Iterator[Event]:
        name = ""
        while line := self._response.readline():
            text = line.decode().rstrip("\n")
            if text.startswith("event: "):
                name = text.removeprefix("event: ")
            elif text == "data: [DONE]":
                self.done = True
            elif text.startswith("data: "):
                event = json.loads(text.removeprefix("data: "))
                assert event["type"] == name
                yield name, event

    def close(self) -> None:
        """Hangs up."""
        self._response.close()
        self._connection.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Server:
    """A server that is ready."""

    def __init__(self, process: Process, address: str, uds: Path | None = None) -> None:
        self.process = process
        self.address = address
        self.uds = uds

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def connection(self, over: Path | None = None) -> http.client.HTTPConnection:
        if over is not None:
            return UnixConnection(over)
        return http.client.HTTPConnection(self.address, timeout=DEADLINE)

    def raw(self) -> socket.socket:
        """A bare TCP connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE)

    def accepts(self) -> bool:
        """Whether it takes connections."""
        try:
            self.raw().close()
        except ConnectionError:
            return False
        return True

    def get(self, path: str, over: Path | None = None) -> tuple[int, Any]:
        return self.request("GET", path, None, over)

    def post(self, body: dict[str, Any] | bytes, over: Path | None = None) -> tuple[int, Any]:
        """Creates a response; the status and what came."""
        return self.request("POST", "/v1/responses", body, over)

    def request(
        self, method: str, path: str, body: dict[str, Any] | bytes | None, over: Path | None
    ) -> tuple[int, Any]:
        connection = self.connection(over)
        try:
            content = json.dumps(body).encode() if isinstance(body, dict) else body
            connection.request(method, path, content, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def stream(self, body: dict[str, Any], over: Path | None = None) -> Stream:
        """Creates a response as a stream of events."""
        connection = self.connection(over)
        content = json.dumps({**body, "stream": True}).encode()
        connection.request("POST", "/v1/responses", content, {"content-type": "application/json"})
        return Stream(connection, connection.getresponse())


def text_of(response: dict[str, Any]) -> str:
    """The text of a whole response object."""
    parts = [part["text"] for item in response["output"] for part in item["content"] if part["type"] == "output_text"]
    return "".join(parts)


@contextmanager
def server(
    *options: str | Path, engine: str = "mock", home: Path, uds: Path | None = None, **env: str
) -> Iterator[Server]:
    """A server on a free port, from its ready line until the block ends."""
    more = () if uds is None else ("--uds", uds)
    with emberd("serve", "--port", "0", "--engine", engine, *more, *options, home=home, **env) as process:
        ready = process.line("emberd is ready at http://")
        found = re.search(r"http://(\S+)/v1", ready)
        assert found is not None, ready
        yield Server(process, found[1], uds)
