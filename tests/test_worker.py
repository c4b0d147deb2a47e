"""The worker door as its clients meet it: a process, a socket, lines of JSON."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.process import emberd, environment, eventually, run
from support.worker import KEY, TAG, Worker, chat, worker

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
        for id in ("first", "again"):
            client.send({"type": "load", "id": id})
            progress = client.read()
            assert (progress["type"], progress["id"]) == ("progress", id)
            event = progress["event"]
            assert (event["modelKey"], event["status"]) == (KEY, "ready")
            assert client.read() == {"type": "loaded", "id": id}
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
    "id",
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
def test_an_id_comes_back_as_it_was_sent(id: str | None, place: Path, home: Path) -> None:
    field = "" if id is None else f',"id":{id}'
    with worker(place, home=home) as one, one.connect() as client:
        for kind in ("ping", "load", 'chat","messages":[],"maxNewTokens":1,"x":"', "what"):
            client.send(f'{{"type":"{kind}"{field}}}'.encode())
            replies = [client.line()]
            while b'"type":"progress"' in replies[-1]:
                replies.append(client.line())
            for reply in replies:
                if id is None:
                    assert "id" not in json.loads(reply)
                else:
                    assert f'"id":{id},'.encode() in reply or f'"id":{id}}}'.encode() in reply


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


def test_a_ping_overtakes_a_chat_that_takes_long(place: Path, home: Path) -> None:
    with worker(place, engine="echo", home=home) as one, one.connect() as client:
        client.ask({"type": "load", "id": "l"})
        client.send(chat("long", tokens=8000), {"type": "ping", "id": "p"})
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
    (b'{"type":"chat","id":"bad","messages":[{"role":"user","content":"\xc3\x28"}]}', "not UTF-8", None),
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
        for at, (line, why, id) in enumerate(BAD):
            client.send(line)
            reply = client.read()
            assert (reply["type"], reply.get("id")) == ("error", id), line[:80]
            assert why in reply["error"], (line[:80], reply)
            assert len(reply["error"]) < 400, "an error repeats all that came"
            assert "\n" not in reply["error"]
            assert client.ask(chat(at)) == {"type": "text", "id": at, "text": WORDS}


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


def test_a_client_that_hangs_up_frees_its_place(place: Path, home: Path) -> None:
    # One place, no queue: whoever is not let go keeps everybody else out.
    with worker(place, "--max-batch", "1", "--queue", "1", engine="echo", home=home) as one:
        with one.connect() as client:
            client.ask({"type": "load", "id": 0})
        for _ in range(5):
            client = one.connect()
            client.send(chat("long", tokens=8000))
            client.close()

        def answered() -> bool:
            with one.connect() as client:
                return bool(client.ask(chat("after", tokens=12)).get("text"))

        eventually(answered, "a later request is answered")


def test_as_many_requests_as_a_connection_may_have_and_no_more(place: Path, home: Path) -> None:
    with worker(place, "--queue", "2", engine="echo", home=home) as one, one.connect() as client:
        client.send(*(chat(at, tokens=4000) for at in range(4)))
        client.finish()
        replies = [reply for reply in client.rest() if reply["type"] != "progress"]
        refused = [reply for reply in replies if reply["type"] == "error"]
        assert sorted(reply["id"] for reply in replies) == [0, 1, 2, 3]
        assert [reply["id"] for reply in refused] == [2, 3]
        assert all("2 requests in flight" in reply["error"] for reply in refused)


# The process.


def test_standard_output_has_the_banner_and_nothing_else(place: Path, home: Path) -> None:
    with worker(place, home=home) as one, one.connect() as client:
        client.ask(chat(1))
        client.send(b"nonsense", {"type": "shutdown"})
        assert one.process.wait() == 0
        assert one.process.out.rest() == f"omp tiny worker listening on {place}\n"


def test_a_shutdown_ends_it_with_0_and_removes_the_socket(place: Path, home: Path) -> None:
    with worker(place, home=home) as one, one.connect() as client, one.connect() as other:
        client.send({"type": "ping", "id": 1}, {"type": "shutdown", "id": 2})
        assert one.process.wait() == 0
        assert not place.exists()
        assert other.rest() == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("engine", ["mock", "echo"])
def test_a_signal_ends_it_with_its_number_and_removes_the_socket(
    engine: str, number: int, code: int, place: Path, home: Path
) -> None:
    with worker(place, engine=engine, home=home) as one, one.connect() as client:
        client.ask({"type": "load", "id": 1})
        client.send(chat(2, tokens=8000))
        one.process.signal(number)
        assert one.process.wait() == code
        assert not place.exists()


def test_a_worker_that_was_killed_is_replaced(place: Path, home: Path) -> None:
    with worker(place, home=home) as one:
        one.process.signal(signal.SIGKILL)
        assert one.process.wait() == -signal.SIGKILL
        assert place.is_socket()
        with worker(place, home=home) as next:
            pings(next)


def test_an_idle_worker_goes_by_itself(place: Path, home: Path) -> None:
    with worker(place, "--idle-ms", "100", home=home) as one:
        assert one.process.wait() == 0
        assert not place.exists()


def test_a_worker_with_work_is_not_idle(place: Path, home: Path) -> None:
    # The window is far shorter than the work, and pings within it do not make it longer.
    with worker(place, "--idle-ms", "40", engine="echo", home=home) as one, one.connect() as client:
        client.send(*(chat(at, tokens=6000) for at in range(4)))
        client.finish()
        replies = [reply["type"] for reply in client.rest() if reply["type"] != "progress"]
        assert replies == ["text"] * 4
        assert one.process.wait() == 0


def test_a_window_from_the_environment(place: Path, home: Path) -> None:
    with worker(place, home=home, OMP_TINY_WORKER_IDLE_MS="100") as one:
        assert one.process.wait() == 0


def test_a_second_worker_on_the_same_socket_gives_way(place: Path, home: Path) -> None:
    with worker(place, home=home) as one:
        inode = place.stat().st_ino
        second = run("worker", "--socket", place, "--model-key", KEY, "--tag", "2", "--engine", "mock", home=home)
        assert second.returncode == 1
        assert f"tiny worker already listening on {place}" in second.stderr
        assert second.stdout == ""
        assert place.stat().st_ino == inode
        pings(one)


def test_of_many_started_at_once_one_stays(place: Path, home: Path) -> None:
    arguments = ["worker", "--socket", str(place), "--model-key", KEY, "--engine", "mock", "--tag"]
    processes = []
    try:
        from support.process import Process

        processes = [Process([*arguments, str(at)], environment(home)) for at in range(4)]
        eventually(lambda: sum(each.popen.poll() is None for each in processes) == 1, "all but one have given way")
        eventually(place.is_socket, "the one listens")
        [left] = [each for each in processes if each.popen.poll() is None]
        assert left.line("listening on")
        assert [each.popen.poll() for each in processes if each is not left] == [1, 1, 1]
        pings_tag = Worker(left, place)
        with pings_tag.connect() as client:
            assert client.ask({"type": "ping", "id": 1})["tag"] == str(processes.index(left))
    finally:
        for each in processes:
            each.end()


def test_what_is_left_at_the_path_is_replaced(place: Path, home: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(place))
    assert place.is_socket()
    with worker(place, home=home) as one:
        pings(one)
        one.process.signal(signal.SIGTERM)
        one.process.wait()
    place.write_text("no socket at all")
    with worker(place, home=home) as one:
        pings(one)


def test_a_folder_at_the_path_is_left_alone(place: Path, home: Path) -> None:
    place.mkdir()
    done = run("worker", "--socket", place, "--model-key", KEY, "--tag", TAG, "--engine", "mock", home=home)
    assert done.returncode == 1
    assert f"{place} is a folder" in done.stderr
    assert place.is_dir()


def test_only_its_user_may_connect(place: Path, home: Path) -> None:
    with worker(place, home=home):
        mode = place.stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600


def test_a_worker_does_not_remove_what_replaced_its_socket(place: Path, home: Path) -> None:
    with worker(place, home=home) as one:
        place.unlink()
        place.write_text("somebody else's")
        one.process.signal(signal.SIGTERM)
        assert one.process.wait() == 143
        assert place.read_text() == "somebody else's"


@pytest.mark.parametrize(
    ("path", "why"), [("x" * 200, "the system allows 10"), ("no/such/folder/s", "the folder of the socket must exist")]
)
def test_a_path_that_can_be_no_socket_is_a_clear_error(path: str, why: str, place: Path, home: Path) -> None:
    at = place.parent / path
    done = run("worker", "--socket", at, "--model-key", KEY, "--tag", TAG, "--engine", "mock", home=home)
    assert done.returncode == 1
    assert why in done.stderr
    assert done.stderr.count("error: ") == 1
    assert "hint: " in done.stderr


@pytest.mark.parametrize("missing", ["--socket", "--model-key", "--tag"])
def test_what_it_cannot_do_without_is_asked_for(missing: str, place: Path, home: Path) -> None:
    given = {"--socket": str(place), "--model-key": KEY, "--tag": TAG}
    del given[missing]
    done = run("worker", *(part for pair in given.items() for part in pair), home=home)
    assert done.returncode == 2
    assert missing in done.stderr


# Before the model.


@pytest.fixture
def traps(tmp_path: Path) -> tuple[str, Path]:
    """A PYTHONPATH on which importing an engine's packages leaves a mark, and the folder of the marks."""
    folder, marks = tmp_path / "traps", tmp_path / "marks"
    folder.mkdir()
    marks.mkdir()
    for package in ("onnxruntime", "numpy"):
        text = f"open({str(marks / package)!r}, 'w').close()\nraise ImportError('not installed', name={package!r})\n"
        (folder / f"{package}.py").write_text(text)
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])), marks


def test_a_pong_comes_before_any_engine_is_imported_and_a_load_without_one_names_the_extra(
    traps: tuple[str, Path], model_folder: Path, place: Path, home: Path
) -> None:
    path, marks = traps
    with (
        worker(place, "--model", model_folder, engine="onnx", home=home, PYTHONPATH=path) as one,
        one.connect() as client,
    ):
        assert client.ask({"type": "ping", "id": 1}) == {"type": "pong", "id": 1, "tag": TAG}
        assert list(marks.iterdir()) == []
        for request in ({"type": "load", "id": 2}, chat(3)):
            reply = client.ask(request)
            assert (reply["type"], reply["id"]) == ("error", request["id"])
            assert "pip install 'emberd[onnx]'" in reply["error"]
        assert list(marks.iterdir()) != []
        assert client.ask({"type": "ping", "id": 4})["type"] == "pong"


def test_a_model_that_is_not_there_is_an_error_of_the_start(place: Path, home: Path) -> None:
    with emberd(
        "worker",
        "--socket",
        place,
        "--model-key",
        KEY,
        "--tag",
        TAG,
        "--engine",
        "onnx",
        "--model",
        "./no-such",
        home=home,
    ) as process:
        assert process.wait() == 1
        assert "there is no file or folder ./no-such" in process.err.rest()
        assert process.out.rest() == ""
        assert not place.exists()


def test_an_environment_that_names_the_model_is_heard(place: Path, home: Path) -> None:
    done = run(
        "worker",
        "--socket",
        place,
        "--model-key",
        KEY,
        "--tag",
        TAG,
        "--engine",
        "onnx",
        home=home,
        EMBERD_WORKER_MODEL="./nowhere",
    )
    assert isinstance(done, subprocess.CompletedProcess)
    assert done.returncode == 1
    assert "./nowhere" in done.stderr
