"""The worker door as its clients meet it: a process, a socket, lines of JSON."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from support.process import eventually
from support.worker import KEY, TAG, Worker, chat, worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WORDS = " a small model keeps warm and answers now"
"""What the mock says, eight tokens, over and over."""

ENGINES = pytest.mark.parametrize("engine", ["mock", "echo"])


def pings(one: Worker) -> None:
    """Fails unless a new client is answered."""
    with one.connect() as client:
        assert client.ask({"type": "ping", "id": "p"}) == {"type": "pong", "id": "p", "tag": TAG}


# Requests and replies.


def test_a_ping_is_answered_with_the_launch_tag(place: Path, home: Path) -> None:
    with worker(place, home=home) as one, one.connect() as client:
        assert client.ask({"type": "ping", "id": "1"}) == {"type": "pong", "id": "1", "tag": TAG}


@ENGINES
def test_a_load_tells_that_the_model_is_ready_and_is_answered_once(engine: str, place: Path, home: Path) -> None:
    with worker(place, engine=engine, home=home) as one, one.connect() as client:
        for at in ("first", "again"):
            client.send({"type": "load", "id": at})
            progress = client.read()
            assert (progress["type"], progress["id"]) == ("progress", at)
            event = progress["event"]
            assert (event["modelKey"], event["status"]) == (KEY, "ready")
            assert client.read() == {"type": "loaded", "id": at}
        client.finish()
        assert client.rest() == []


@pytest.mark.parametrize(("engine", "expected"), [("mock", WORDS), ("echo", "user\nhell")], ids=["mock", "echo"])
def test_a_chat_gets_exactly_one_text(engine: str, expected: str, place: Path, home: Path) -> None:
    with worker(place, engine=engine, home=home) as one, one.connect() as client:
        # Of the echo's ten ids the first is a special one, which is no text.
        client.send(chat("c", tokens=10 if engine == "echo" else 8))
        client.finish()
        replies = client.rest()
        assert [reply for reply in replies if reply["type"] != "progress"] == [
            {"type": "text", "id": "c", "text": expected}
        ]
        assert all(reply["id"] == "c" for reply in replies)


def test_a_chat_goes_on_from_its_prefill_and_ends_with_its_stop(place: Path, home: Path) -> None:
    with worker(place, home=home) as one, one.connect() as client:
        assert client.ask(chat(1, tokens=100, stop="warm and"))["text"] == " a small model keeps warm and"
        assert client.ask(chat(2, tokens=3, prefill="Well,", stop=None)) == {
            "type": "text",
            "id": 2,
            "text": " a small model",
        }
        assert client.ask({"type": "chat", "id": 3, "messages": [], "maxNewTokens": 1.9})["text"] == " a"


@pytest.mark.parametrize(
    "sent",
    [
        '"a"',
        '""',
        '"\\u00e9\\n\\ud83d\\ude00"',
        "0",
        "-1.50",
        "1e3",
        "12345678901234567890123",
        "null",
        "true",
        '{"a": [1,  2]}',
        "[ ]",
        None,
    ],
)
def test_an_id_comes_back_as_it_was_sent(sent: str | None, place: Path, home: Path) -> None:
    field = "" if sent is None else f',"id":{sent}'
    with worker(place, home=home) as one, one.connect() as client:
        for kind in ("ping", "load", 'chat","messages":[],"maxNewTokens":1,"x":"', "what"):
            client.send(f'{{"type":"{kind}"{field}}}'.encode())
            replies = [client.line()]
            while b'"type":"progress"' in replies[-1]:
                replies.append(client.line())
            for reply in replies:
                if sent is None:
                    assert "id" not in json.loads(reply)
                else:
                    assert f'"id":{sent},'.encode() in reply or f'"id":{sent}}}'.encode() in reply


@ENGINES
def test_pipelined_requests_are_all_answered_under_their_ids(engine: str, place: Path, home: Path) -> None:
    with worker(place, engine=engine, home=home) as one, one.connect() as client:
        kinds = ["ping", "load", "chat"] * 20
        client.send(
            *(
                chat(at, text=f"number {at}") if kind == "chat" else {"type": kind, "id": at}
                for at, kind in enumerate(kinds)
            )
        )
        client.finish()
        replies = [reply for reply in client.rest() if reply["type"] != "progress"]
        assert sorted(reply["id"] for reply in replies) == list(range(len(kinds)))
        expected = {"ping": "pong", "load": "loaded", "chat": "text"}
        assert all(reply["type"] == expected[kinds[reply["id"]]] for reply in replies)


def test_a_ping_overtakes_a_chat_that_takes_long(slow: dict[str, str], place: Path, home: Path) -> None:
    with worker(place, engine="echo", home=home, **slow) as one, one.connect() as client:
        client.ask({"type": "load", "id": "l"})
        client.send(chat("long", tokens=20), {"type": "ping", "id": "p"})
        assert client.read()["type"] == "pong"
        assert client.read()["type"] == "text"


def test_clients_do_not_hear_each_other(place: Path, home: Path) -> None:
    with worker(place, home=home) as one, one.connect() as first, one.connect() as second:
        first.send(chat("same"))
        assert second.ask({"type": "ping", "id": "same"})["type"] == "pong"
        second.finish()
        assert second.rest() == []
        first.finish()
        assert [reply["type"] for reply in first.rest()][-1] == "text"


# Bad input.

CHAT = '{"type":"chat","id":"bad","messages":%s}'
BAD: list[tuple[bytes, str, Any]] = [
    (b"{", "not JSON", None),
    (b"nonsense", "not JSON", None),
    (b'{"type":"ping"} {"type":"ping"}', "not JSON", None),
    (b'{"type":"ping","id":01}', "not JSON", None),
    (b"[" * 100_000, "not JSON", None),
    (b"\xff\xfe", "not UTF-8", None),
    (b'{"type":"chat","id":"bad","messages":[{"role":"user","content":"\xc3\x28"}]}', "not UTF-8", "bad"),
    (b"\x00", "not JSON", None),
    (b"null", "JSON object", None),
    (b"true", "JSON object", None),
    (b"3.5", "JSON object", None),
    (b'"ping"', "JSON object", None),
    (b"[]", "JSON object", None),
    (b'["ping"]', "JSON object", None),
    (b'["shutdown", 1]', "JSON object", None),
    (b"{}", "no type", None),
    (b'{"id":"bad"}', "no type", "bad"),
    (b'{"type":null,"id":"bad"}', "", "bad"),
    (b'{"type":7,"id":"bad"}', "unknown request type: 7", "bad"),
    (b'{"type":["ping"],"id":"bad"}', "unknown request type", "bad"),
    (b'{"type":"PING","id":"bad"}', "unknown request type", "bad"),
    (b'{"type":"' + b"x" * 10_000 + b'","id":"bad"}', "unknown request type", "bad"),
    (b'{"type":"chat","id":"bad"}', "needs messages", "bad"),
    (CHAT.replace("%s", "null").encode(), "needs messages", "bad"),
    (CHAT.replace("%s", '"hello"').encode(), "messages must be a list", "bad"),
    (CHAT.replace("%s", "{}").encode(), "messages must be a list", "bad"),
    (CHAT.replace("%s", "[1]").encode(), "messages[0].role", "bad"),
    (CHAT.replace("%s", "[null]").encode(), "messages[0].role", "bad"),
    (CHAT.replace("%s", '[{"content":"x"}]').encode(), "messages[0].role", "bad"),
    (CHAT.replace("%s", '[{"role":3,"content":"x"}]').encode(), "messages[0].role must be a string", "bad"),
    (CHAT.replace("%s", '[{"role":"robot","content":"x"}]').encode(), 'messages[0].role is "robot"', "bad"),
    (CHAT.replace("%s", '[{"role":"user"}]').encode(), "messages[0].content", "bad"),
    (CHAT.replace("%s", '[{"role":"user","content":null}]').encode(), "messages[0].content", "bad"),
    (CHAT.replace("%s", '[{"role":"user","content":["x"]}]').encode(), "messages[0].content must be a string", "bad"),
    (CHAT.replace("%s", '[{"role":"user","content":"x"},{}]').encode(), "messages[1].role", "bad"),
    (CHAT.replace("%s", '[],"prefill":5').encode(), "prefill must be a string", "bad"),
    (CHAT.replace("%s", '[],"stop":["x"]').encode(), "stop must be a string", "bad"),
    (CHAT.replace("%s", '[],"maxNewTokens":"5"').encode(), "maxNewTokens must be a number", "bad"),
    (CHAT.replace("%s", '[],"maxNewTokens":0').encode(), "maxNewTokens is 0", "bad"),
    (CHAT.replace("%s", '[],"maxNewTokens":-3').encode(), "maxNewTokens is -3", "bad"),
    (json.dumps(chat("bad", text="x" * 9000)).encode(), "window is 8192", "bad"),
]


def test_a_bad_line_gets_one_clear_error_and_the_next_request_works(place: Path, home: Path) -> None:
    with worker(place, home=home) as one, one.connect() as client:
        client.ask({"type": "load", "id": 0})
        for at, (line, why, sent) in enumerate(BAD):
            client.send(line)
            reply = client.read()
            assert (reply["type"], reply.get("id")) == ("error", sent), line[:80]
            assert why in reply["error"], (line[:80], reply)
            assert len(reply["error"]) < 400, "an error repeats all that came"
            assert "\n" not in reply["error"]
            assert client.ask(chat(at)) == {"type": "text", "id": at, "text": WORDS}


def test_an_escape_in_a_type_is_as_good_as_its_letter(place: Path, home: Path) -> None:
    with worker(place, home=home) as one, one.connect() as client:
        assert client.ask(b'{"type":"p\\u0069ng","id":1}') == {"type": "pong", "id": 1, "tag": TAG}


def test_unknown_fields_and_blank_lines_are_passed_over(place: Path, home: Path) -> None:
    with worker(place, home=home) as one, one.connect() as client:
        client.send(b"", b"   \t", b"\r", b' {"type":"ping","id":1,"more":{"a":[1]}} \r')
        assert client.read() == {"type": "pong", "id": 1, "tag": TAG}
        client.finish()
        assert client.rest() == []


def test_a_line_of_64_mib_is_refused_and_not_kept(place: Path, home: Path) -> None:
    with worker(place, home=home) as one, one.connect() as client:
        client.ask({"type": "ping", "id": 0})
        before = one.process.resident()
        client.send(b'{"type":"chat","id":"big","messages":[{"role":"user","content":"' + b"x" * (64 << 20) + b'"}]}')
        reply = client.read()
        assert reply["type"] == "error"
        assert re.search(r"the line has 6\d{7} bytes, and the limit is 33554432", reply["error"]), reply
        assert client.ask(chat(1))["text"] == WORDS
        assert one.process.resident() - before < 48 << 20


def test_a_half_line_and_then_nobody_harms_no_one(place: Path, home: Path) -> None:
    with worker(place, home=home) as one:
        pings(one)
        before = one.process.descriptors()
        for part in (b"{", b'{"type":"ping"', b'{"type":"chat","id":1,"messages":[{"role":"us', b"\xff"):
            client = one.connect()
            client.socket.sendall(part)
            client.close()
        pings(one)
        eventually(lambda: one.process.descriptors() <= before, "the worker lets go of all connections")


def test_a_last_line_without_its_newline_is_answered_too(place: Path, home: Path) -> None:
    with worker(place, home=home) as one:
        for last, kind in (
            (b'{"type":"ping","id":9}', "pong"),
            (json.dumps(chat(9)).encode(), "text"),
            (b'{"type":', "error"),
        ):
            with one.connect() as client:
                client.send({"type": "ping", "id": 1})
                client.socket.sendall(last)
                client.finish()
                replies = [reply["type"] for reply in client.rest() if reply["type"] != "progress"]
                assert replies == ["pong", kind]


def test_a_client_that_only_listens_on_gets_its_answers(place: Path, home: Path) -> None:
    with worker(place, engine="echo", home=home) as one, one.connect() as client:
        client.send(chat("a", tokens=4000), chat("b", tokens=100), {"type": "ping", "id": "c"})
        client.finish()
        replies = {reply["id"]: reply["type"] for reply in client.rest() if reply["type"] != "progress"}
        assert replies == {"a": "text", "b": "text", "c": "pong"}


def test_a_client_that_hangs_up_frees_its_place(slow: dict[str, str], place: Path, home: Path) -> None:
    # One place, and answers that take minutes: whoever is not let go keeps everybody else out.
    with worker(place, "--max-batch", "1", "--queue", "1", engine="echo", home=home, **slow) as one:
        with one.connect() as client:
            client.ask({"type": "load", "id": 0})
        for _ in range(5):
            client = one.connect()
            client.send(chat("long", tokens=8000))
            client.close()

        def answered() -> bool:
            with one.connect() as client:
                return bool(client.ask(chat("after", tokens=3)).get("text"))

        eventually(answered, "a later request is answered")


def test_a_client_that_never_stops_pinging_is_one_of_many(place: Path, home: Path) -> None:
    with worker(place, home=home) as one, one.connect() as loud, one.connect() as other:
        lines = b'{"type":"ping","id":"f"}\n' * 2000

        def until_closed(step: Callable[[], object]) -> None:
            with contextlib.suppress(OSError):
                while step():
                    pass

        def write() -> bool:
            loud.socket.sendall(lines)
            return True

        flood = [
            threading.Thread(target=until_closed, args=(write,)),
            threading.Thread(target=until_closed, args=(lambda: loud.socket.recv(1 << 20),)),
        ]
        for thread in flood:
            thread.start()
        try:
            for _ in range(20):
                assert other.ask({"type": "ping", "id": "p"})["type"] == "pong"
            assert other.ask(chat("c"))["text"] == WORDS
        finally:
            loud.socket.shutdown(socket.SHUT_RDWR)
            for thread in flood:
                thread.join()


LINES = [
    json.dumps({"type": "chat", "id": at, "messages": [{"role": "user", "content": "a"}] * 250_000}).encode()
    for at in range(2)
]
"""Chats of a quarter of a million turns each, some 10 MB."""


def test_pings_and_a_shutdown_do_not_wait_for_long_lines(place: Path, home: Path) -> None:
    with worker(place, "--max-in-flight", "1", home=home) as one, one.connect() as client:
        client.send(*LINES, {"type": "ping", "id": "p"})
        assert client.read() == {"type": "pong", "id": "p", "tag": TAG}, "before the answers to what came before it"
        client.send({"type": "shutdown", "id": "s"})
        rest = client.rest()
        assert all(reply["type"] != "text" for reply in rest)
        assert one.process.wait() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_the_memory_of_long_lines_is_given_back(place: Path, home: Path) -> None:
    with worker(place, home=home) as one:
        before = one.process.resident()

        def ask(at: int) -> None:
            with one.connect() as client:
                # Far longer than the window, so refused; and parsed whole before that.
                assert client.ask(LINES[at % 2])["type"] == "error"

        threads = [threading.Thread(target=ask, args=(at,)) for at in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        eventually(lambda: one.process.resident() < before + (64 << 20), "no more than some 64 MB stay")


def test_as_many_requests_as_a_connection_may_have_and_no_more(place: Path, home: Path) -> None:
    with worker(place, "--max-in-flight", "2", engine="echo", home=home) as one, one.connect() as client:
        client.send(*(chat(at, tokens=4000) for at in range(4)))
        client.finish()
        replies = [reply for reply in client.rest() if reply["type"] != "progress"]
        refused = [reply for reply in replies if reply["type"] == "error"]
        assert sorted(reply["id"] for reply in replies) == [0, 1, 2, 3]
        assert [reply["id"] for reply in refused] == [2, 3]
        assert all("2 requests in flight" in reply["error"] for reply in refused)
