"""Ten thousand bad inputs through both doors: each is answered as clearly as can be, and nothing of it stays behind."""

from __future__ import annotations

import json
import random
import socket
import sys
from typing import TYPE_CHECKING, Any

import pytest

from support.process import Process, eventually
from support.serve import Server, server, text_of
from support.worker import Client, Worker, chat, worker

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="descriptors and memory are read from /proc")

COUNT = 5_000
"""Bad inputs through each door."""

SETTLED = COUNT // 5
"""After so many, whatever is made once has been made."""

GROWTH = 16 << 20
"""Memory, in bytes, that the rest may cost, of each process: a leak of 4 kB an input would show."""

LONG = "x" * 8_200
"""More bytes, and so more tokens, than the mock's window of 8192."""


def json_faults(random: random.Random) -> bytes:
    """A body or line that is not JSON, or is not UTF-8."""
    whole = json.dumps({"type": "chat", "input": "hello", "messages": [], "id": random.random()}).encode()
    return random.choice(
        [
            whole[: random.randrange(1, len(whole))],
            b"nonsense",
            b"\xff" + whole,
            whole.replace(b"hello", b"\xc3\x28"),
            whole + b"}",
            b"[" * random.randrange(200, 2000),
            b'{"input":' + b"9" * random.randrange(1, 50) + b"x}",
        ]
    )


def other(random: random.Random) -> Any:
    """Something of a type that no field wants."""
    return random.choice([[7], {"a": {"b": [None]}}, {}, [[]], {"type": 5}])


# The HTTP door.

HEAD = b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


def http_bodies(random: random.Random) -> tuple[bytes, str | None]:
    """A bad body, and the code it is refused with; `None` where several are right."""
    kind = random.randrange(6)
    if kind == 0:
        return json_faults(random), "invalid_json"
    if kind == 1:
        return random.choice([b"null", b"7", b'"input"', b"[]", b"[null]", b"true"]), "invalid_type"
    if kind == 2:
        field = random.choice(
            ["stream", "max_output_tokens", "temperature", "top_p", "instructions", "model", "seed", "user"]
        )
        return json.dumps({"input": "hello", field: other(random)}).encode(), "invalid_type"
    if kind == 3:
        return json.dumps(
            {"input": "hello", "model": f"gpt-{random.random()}", "stream": random.random() < 0.5}
        ).encode(), "model_not_found"
    if kind == 4:
        return json.dumps({"input": LONG, "stream": random.random() < 0.5}).encode(), "context_length_exceeded"
    values = random.choice(
        [
            {"temperature": 9},
            {"max_output_tokens": 0},
            {"input": [{"role": "robot", "content": "x"}]},
            {"stop": ""},
            {"input": None},
        ]
    )
    return json.dumps({"input": "hello", **values}).encode(), None


class Http:
    """One kept connection, for what is answered; others come and go beside it."""

    def __init__(self, one: Server) -> None:
        self.one = one
        self.socket = one.raw()
        self.file = self.socket.makefile("rb")

    def close(self) -> None:
        self.file.close()
        self.socket.close()

    def answer(self) -> tuple[int, bytes]:
        status = int(self.file.readline().split()[1])
        length = 0
        while (line := self.file.readline().strip()) != b"":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        return status, self.file.read(length)

    def bad(self, random: random.Random) -> None:
        if random.random() < 0.2:
            self.half(random)
            return
        body, code = http_bodies(random)
        self.socket.sendall(HEAD % len(body) + body)
        status, answer = self.answer()
        assert 400 <= status < 500, (status, body[:200])
        error = json.loads(answer)["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        assert len(answer) < 1000, "an error repeats all that came"
        if code is not None:
            assert error["code"] == code, (body[:200], error)

    def half(self, random: random.Random) -> None:
        """A request that breaks off, or a client that leaves its answer alone."""
        body = json.dumps({"input": "hello", "stream": True, "max_output_tokens": 500}).encode()
        whole = HEAD % len(body) + body
        cut = len(whole) if random.random() < 0.3 else random.randrange(1, len(whole))
        with self.one.raw() as left:
            left.sendall(whole[:cut])

    def good(self) -> None:
        status, response = self.one.post({"input": "hello", "max_output_tokens": 8})
        assert status == 200
        assert text_of(response) == " a small model keeps warm and answers now"


# The worker door.


def lines(random: random.Random) -> bytes:
    """A bad line."""
    kind = random.randrange(6)
    if kind == 0:
        return json_faults(random)
    if kind == 1:
        return random.choice([b"null", b"7", b'"ping"', b"[]", b"true", b"{}"])
    if kind == 2:
        field = random.choice(["type", "messages", "prefill", "stop", "maxNewTokens"])
        wrong = other(random)
        return json.dumps({**chat(1), field: wrong if field != "messages" else {"a": wrong}}).encode()
    if kind == 3:
        return json.dumps({"type": f"kind {random.random()}"}).encode()
    if kind == 4:
        return json.dumps(chat(random.random(), text=LONG)).encode()
    return json.dumps({**chat("x"), "messages": [{"role": "user"}, other(random)]}).encode()


class Lines:
    """One kept connection, for what is answered; others come and go beside it."""

    def __init__(self, one: Worker) -> None:
        self.one = one
        self.client: Client = one.connect()
        self.client.ask({"type": "load", "id": 0})

    def close(self) -> None:
        self.client.close()

    def bad(self, random: random.Random) -> None:
        if random.random() < 0.2:
            whole = json.dumps(chat("left", tokens=500)).encode() + b"\n"
            cut = len(whole) if random.random() < 0.3 else random.randrange(1, len(whole))
            with self.one.connect() as left:
                left.socket.sendall(whole[:cut])
            return
        line = lines(random)
        self.client.send(line)
        raw = self.client.line()
        reply = json.loads(raw)
        assert reply["type"] == "error", (line[:200], reply)
        assert reply["error"]
        assert len(raw) < 1000, "an error repeats all that came"

    def good(self) -> None:
        with self.one.connect() as client:
            assert client.ask(chat("good"))["text"] == " a small model keeps warm and answers now"


def endure(door: Http | Lines, process: Process) -> None:
    """Sends the bad inputs, and looks at what they leave."""
    chance = random.Random(20_26)
    try:
        door.good()
        before = process.descriptors()
        resident = 0
        for at in range(COUNT):
            if at == SETTLED:
                resident = process.resident()
            door.bad(chance)
            if at % 500 == 0:
                door.good()
        door.good()
        eventually(lambda: process.descriptors() <= before, "all descriptors are closed again")
        assert process.resident() - resident < GROWTH
        assert process.popen.poll() is None
    finally:
        door.close()


def test_bad_requests_leave_nothing_behind(home: Path) -> None:
    with server("--log", "error", "--max-batch", "4", home=home) as one:
        endure(Http(one), one.process)
        status, health = one.get("/health")
        assert (status, health["status"], health["in_flight"]) == (200, "ok", 0)


def test_bad_lines_leave_nothing_behind(place: Path, home: Path) -> None:
    with worker(place, "--log", "error", "--max-batch", "4", home=home) as one:
        endure(Lines(one), one.process)


def test_a_body_of_64_mib_is_refused_and_not_kept(home: Path) -> None:
    with server(home=home) as one:
        http = Http(one)
        try:
            http.good()
            before = one.process.resident()
            size = 64 << 20
            http.socket.sendall(HEAD % size)
            piece = b"x" * (1 << 20)
            for _ in range(64):
                http.socket.sendall(piece)
            status, answer = http.answer()
            assert (status, json.loads(answer)["error"]["code"]) == (413, "body_too_large")
            http.good()
            assert one.process.resident() - before < 40 << 20
        finally:
            http.close()


def test_a_request_line_that_is_none_is_answered_and_hung_up_on(home: Path) -> None:
    with server(home=home) as one:
        for garbage in (b"\x16\x03\x01\x02\x00\x01\x00", b"hello\r\n\r\n", b"GET  HTTP/9\r\n\r\n", b"\x00" * 100):
            with one.raw() as connection:
                connection.sendall(garbage)
                connection.shutdown(socket.SHUT_WR)
                said = b""
                while piece := connection.recv(4096):
                    said += piece
                assert said == b"" or said.startswith(b"HTTP/1.1 400 ")
        assert one.get("/health")[0] == 200
