"""The clients against a fake worker: replies in any order, late, wrong or none, connections that break, listeners that are no workers."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

import emberd
import emberd.client
import emberd.client.core
from support.clients import KINDS, callers, clients
from support.fake import TAG, Peer, fake
from support.process import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEY = "tiny"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Iterator[Any]:
    with clients(request.param) as making:
        yield making


def answers(text: str) -> Any:
    """Answers every chat with this."""
    return lambda peer, request: peer.text(request, text)


# Replies.


def test_replies_find_their_callers_in_whatever_order_they_come(make: Any, place: Path) -> None:
    held: list[dict[str, Any]] = []

    def answer(peer: Peer, request: dict[str, Any]) -> None:
        held.append(request)
        if len(held) == 3:
            for each in reversed(held):
                peer.text(each, each["messages"][0]["content"])

    with fake(place, answer) as one, callers() as calling:
        client = make(KEY, socket=place, spawn=False)
        calls = calling.map(lambda text: client.chat([{"role": "user", "content": text}]), ["a", "b", "c"])
        assert list(calls) == ["a", "b", "c"]
        assert one.connections == 1
        assert len({request["id"] for request in one.requests}) == 3


def test_late_replies_are_nobodys(make: Any, place: Path) -> None:
    late: list[dict[str, Any]] = []
    waited = threading.Event()

    def answer(peer: Peer, request: dict[str, Any]) -> None:
        if not waited.is_set():
            late.append(request)
            return
        for each in late:
            peer.text(each, "late")
        peer.text(request, "in time")

    with fake(place, answer) as one:
        client = make(KEY, socket=place, spawn=False)
        client.ping()
        while not one.requests:  # A line that had no time to be sent is withdrawn.
            with pytest.raises(emberd.WorkerTimeout, match=r"did not answer a chat within 0\.05 s"):
                client.chat(HELLO, timeout=0.05)
        waited.set()
        assert client.chat(HELLO) == "in time"
        assert client.ping() == TAG
        assert one.connections == 1


def test_only_what_was_asked_for_goes_over_the_wire(make: Any, place: Path) -> None:
    with fake(place, answers("")) as one:
        client = make(KEY, socket=place, spawn=False)
        assert client.chat(HELLO) == ""
        client.chat([], prefill="", stop="end", max_new_tokens=9)
        first, second = ({**request, "id": None} for request in one.requests)
        assert first == {"type": "chat", "id": None, "messages": HELLO, "maxNewTokens": 256}
        assert second == {"type": "chat", "id": None, "messages": [], "prefill": "", "stop": "end", "maxNewTokens": 9}
        assert all(isinstance(request["id"], str) for request in one.requests)


def test_news_of_a_load_is_told_in_order_and_a_fault_in_telling_is_the_callers(make: Any, place: Path) -> None:
    def answer(peer: Peer, request: dict[str, Any]) -> None:
        for percent in (0.5, 100):
            event = {
                "modelKey": KEY,
                "status": "progress",
                "file": "f",
                "progress": percent,
                "loaded": 1,
                "total": 2,
                "x": 1,
            }
            peer.say({"type": "progress", "id": request["id"], "event": event})
        peer.say({"type": "loaded", "id": request["id"]})

    with fake(place, answer) as one:
        client = make(KEY, socket=place, spawn=False)
        news: list[emberd.Progress] = []
        client.load(news.append)
        assert [(each.status, each.file, each.progress, each.loaded, each.total) for each in news] == [
            ("progress", "f", 0.5, 1, 2),
            ("progress", "f", 100, 1, 2),
        ]

        def faulty(_: emberd.Progress) -> None:
            raise LookupError("the caller's own")

        with pytest.raises(LookupError, match="the caller's own"):
            client.load(faulty)
        client.load()
        assert one.connections == 1


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{oops\n", "not JSON"),
        (b"[" * 100_000 + b"\n", "not JSON"),
        (b"\xff\xfe\n", "not JSON"),
        (b"[]\n", "no reply"),
        (b'{"id":"2"}\n', "no reply"),
        (b'{"type":"loaded","id":"2"}\n', "where text was due"),
        (b'{"type":"text","id":"2"}\n', "a text without one"),
        (b'{"type":"progress","id":"2"}\n', "progress without an event"),
    ],
)
def test_what_no_worker_says_is_an_error_of_its_own(line: bytes, why: str, make: Any, place: Path) -> None:
    def answer(peer: Peer, request: dict[str, Any]) -> None:
        if len(one.requests) == 1:
            assert request["id"] == "2"
            peer.say(line)
        else:
            peer.text(request, "well")

    with fake(place, answer) as one:
        client = make(KEY, socket=place, spawn=False)
        if "progress" in why:
            with pytest.raises(emberd.ProtocolError, match=why):
                client.load(lambda _: None)
        else:
            with pytest.raises(emberd.ProtocolError, match=why):
                client.chat(HELLO)
        assert client.chat(HELLO) == "well"


def test_blank_lines_strange_ids_and_pieces_of_lines_are_no_trouble(make: Any, place: Path) -> None:
    def answer(peer: Peer, request: dict[str, Any]) -> None:
        peer.say(b"\n  \r\n", {"type": "text", "id": 7, "text": "?"}, {"type": "text", "id": {"a": 1}, "text": "?"})
        peer.say({"type": "later", "id": "none"}, {"type": "error", "id": "none", "error": "?"})
        for byte in b'{"type":"text","id":"%s","text":"\xc3\xa9"}\r\n' % request["id"].encode():
            peer.say(bytes([byte]))

    with fake(place, answer):
        assert make(KEY, socket=place, spawn=False).chat(HELLO) == "é"


def test_an_error_without_an_id_is_about_the_longest_line(make: Any, place: Path) -> None:
    def answer(peer: Peer, request: dict[str, Any]) -> None:
        if len(one.requests) == 2:
            peer.say({"type": "error", "error": "the line has 1000 bytes (hint: send less)"})
            short = min(one.requests, key=lambda each: len(str(each)))
            peer.text(short, "fine")

    with fake(place, answer) as one, callers() as calling:
        client = make(KEY, socket=place, spawn=False)
        short = calling.submit(client.chat, HELLO)
        long = calling.submit(client.chat, [{"role": "user", "content": "x" * 1000}])
        with pytest.raises(emberd.RequestFailed, match="the line has 1000 bytes") as failed:
            long.result(DEADLINE)
        assert failed.value.hint == "send less"
        assert short.result(DEADLINE) == "fine"


def test_an_error_without_an_id_may_be_about_a_line_that_nobody_waits_for_any_more(make: Any, place: Path) -> None:
    long = [{"role": "user", "content": "x" * 1000}]
    late: list[dict[str, Any]] = []

    def answer(peer: Peer, request: dict[str, Any]) -> None:
        if request["messages"] == long:
            late.append(request)
            return
        for _ in late:
            peer.say({"type": "error", "error": "the line has 1000 bytes"})
        peer.text(request, "fine")

    with fake(place, answer) as one:
        client = make(KEY, socket=place, spawn=False)
        while not one.requests:
            with pytest.raises(emberd.WorkerTimeout):
                client.chat(long, timeout=0.05)
        assert client.chat(HELLO) == "fine"


def test_a_worker_that_does_not_tell_its_status_is_said_to_be_another(make: Any, place: Path) -> None:
    with fake(place) as one:
        client = make(KEY, socket=place, spawn=False)
        with pytest.raises(emberd.RequestFailed, match="does not tell its status"):
            client.status()
        assert one.requests == [], "nothing was asked that it might take for work"


# Lost connections.


def test_a_request_is_made_again_once_when_nothing_was_answered(make: Any, place: Path) -> None:
    def answer(peer: Peer, request: dict[str, Any]) -> None:
        if peer.number == 0:
            peer.hang_up()
        else:
            peer.text(request, "the second time")

    with fake(place, answer) as one:
        assert make(KEY, socket=place, spawn=False).chat(HELLO) == "the second time"
        assert (one.connections, len(one.requests)) == (2, 2)


def test_a_request_is_made_no_more_often_than_allowed(make: Any, place: Path) -> None:
    with fake(place, lambda peer, _: peer.hang_up()) as one:
        for retries in (0, 1, 3):
            before = len(one.requests)
            with pytest.raises(emberd.ConnectionLost) as lost:
                make(KEY, socket=place, spawn=False, retries=retries).chat(HELLO)
            assert isinstance(lost.value, ConnectionError)
            assert len(one.requests) - before == retries + 1


def test_a_load_that_was_under_way_is_not_made_again(make: Any, place: Path) -> None:
    def answer(peer: Peer, request: dict[str, Any]) -> None:
        peer.say({"type": "progress", "id": request["id"], "event": {"modelKey": KEY, "status": "initiate"}})
        peer.hang_up()

    with fake(place, answer) as one:
        with pytest.raises(emberd.ConnectionLost):
            make(KEY, socket=place, spawn=False).load()
        assert len(one.requests) == 1


def test_a_hang_up_ends_all_that_waits(make: Any, place: Path) -> None:
    def answer(peer: Peer, _: dict[str, Any]) -> None:
        if len(one.requests) == 4:
            peer.hang_up()

    with fake(place, answer) as one, callers() as calling:
        client = make(KEY, socket=place, spawn=False, retries=0)
        calls = [calling.submit(client.chat, HELLO) for _ in range(4)]
        errors = [call.exception(DEADLINE) for call in calls]
        assert [type(error) for error in errors] == [emberd.ConnectionLost] * 4
        assert len({id(error) for error in errors}) == 4


def test_what_a_worker_said_before_it_hung_up_is_heard(make: Any, place: Path) -> None:
    def answer(peer: Peer, request: dict[str, Any]) -> None:
        peer.text(request, "last words " * 100_000)
        peer.hang_up()

    with fake(place, answer):
        for _ in range(3):
            assert make(KEY, socket=place, spawn=False, retries=0).chat(HELLO) == "last words " * 100_000


# Looking for a worker.


def test_a_listener_that_says_nothing_is_told_from_none_and_no_second_worker_is_started(make: Any, place: Path) -> None:
    with fake(place, pings=True) as one:
        client = make(KEY, socket=place, connect_timeout=0.05, command=["no program that anybody should run"])
        with pytest.raises(emberd.WorkerTimeout, match=r"did not answer a ping within 0\.05 s"):
            client.ping()
        one.until(lambda: one.connections == 1 and one.open == 0, "the client has hung up")


def test_a_listener_that_is_no_worker_is_said_to_be_none(make: Any, place: Path) -> None:
    page = b"HTTP/1.1 400 Bad Request\r\n\r\n"
    with fake(place, lambda peer, _: peer.say(page), pings=True), pytest.raises(emberd.ProtocolError, match="400 Bad"):
        make(KEY, socket=place, spawn=False).ping()


def test_a_worker_that_hangs_up_on_the_first_ping_is_taken_for_gone(make: Any, place: Path) -> None:
    with (
        fake(place, lambda peer, _: peer.hang_up(), pings=True),
        pytest.raises(emberd.WorkerNotStarted, match="no worker listens"),
    ):
        make(KEY, socket=place, spawn=False).ping()


def test_a_worker_that_does_not_go_is_not_replaced(make: Any, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emberd.client.core, "GOING", 0.1)
    with fake(place) as one:
        client = make(KEY, socket=place, tag="mine", replace=True, command=["no program that anybody should run"])
        with pytest.raises(emberd.TagMismatch, match="has the tag 'fake', not 'mine'"):
            client.ping()
        assert [request["type"] for request in one.asked(1)] == ["shutdown"]


def test_a_worker_with_the_right_tag_that_comes_while_the_old_one_goes_is_kept(make: Any, place: Path) -> None:
    def answer(peer: Peer, request: dict[str, Any]) -> None:
        if request["type"] == "ping":
            peer.pong(request, "old" if peer.number < 2 else "mine")
        else:
            peer.hang_up()

    with fake(place, answer, pings=True) as one:
        client = make(KEY, socket=place, tag="mine", replace=True, command=["no program that anybody should run"])
        assert client.ping() == "mine"
        assert [request["type"] for request in one.requests] == ["ping", "shutdown", "ping", "shutdown", "ping", "ping"]


def test_a_shutdown_that_is_not_heard_is_not_waited_for_for_ever(make: Any, place: Path) -> None:
    with fake(place):
        client = make(KEY, socket=place, spawn=False)
        client.ping()
        with pytest.raises(emberd.WorkerTimeout, match="did not answer a shutdown"):
            client.shutdown(timeout=0.05)
