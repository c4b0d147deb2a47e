"""The clients against real workers: what they ask and get, how they find a worker, start one, and replace one.

Every test holds for `Worker` and for `AsyncWorker`, on asyncio's loop and on uvloop's, unless it is about one of them.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import emberd
from support.clients import KINDS, callers, clients, end, workers
from support.process import DEADLINE, command, eventually
from support.worker import KEY, TAG, worker

if TYPE_CHECKING:
    from collections.abc import Iterator

WORDS = " a small model keeps warm and answers now"
"""What the mock says, eight tokens, over and over."""
HELLO = [{"role": "user", "content": "hello"}]
MOCK = [*command(), "worker", "--engine", "mock"]
STANDIN = """
import json, os, socket, sys
path, tag = (sys.argv[sys.argv.index(name) + 1] for name in ("--socket", "--tag"))
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
listener.listen()
def serve(tag):
    while True:
        peer = listener.accept()[0].makefile("rwb", 0)
        for line in peer:
            request = json.loads(line)
            if request["type"] == "shutdown":
                os.unlink(path)
                sys.exit()
            peer.write(json.dumps({"type": "pong", "id": request["id"], "tag": tag}).encode() + b"\\n")
"""
"""A program that a client can start for a worker, up to where it serves one connection after the other."""


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, place: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What makes clients; the workers that they start know nothing of this machine's settings, and end with the test."""
    for name in [name for name in os.environ if name.startswith(("EMBERD_", "OMP_TINY_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EMBERD_HOME", str(home))
    try:
        with clients(request.param) as making:
            yield making
    finally:
        end(place.parent)


# Requests.


def test_a_worker_that_listens_is_asked(make: Any, place: Path, home: Path) -> None:
    with worker(place, home=home) as one:
        client = make(KEY, socket=place, spawn=False)
        assert client.ping() == TAG
        status = client.status()
        assert (status.key, status.tag, status.pid, status.state) == (KEY, TAG, one.process.pid, "absent")
        assert (status.in_flight, status.connections) == (0, 1)
        assert status.memory_bytes > 1 << 20
        assert status.uptime_ms >= 0
        news: list[emberd.Progress] = []
        assert client.load(news.append) is None
        assert [(each.model_key, each.status, each.model) for each in news] == [(KEY, "ready", status.model)]
        assert client.status().state == "ready"
        assert client.chat(HELLO, max_new_tokens=8) == WORDS
        assert client.chat(HELLO, max_new_tokens=100, stop="warm and") == " a small model keeps warm and"
        assert client.chat([], prefill="Well,", max_new_tokens=1) == " a"
        assert client.chat(iter(HELLO)) == WORDS * 32


def test_what_the_worker_refuses_is_an_error_with_its_hint_and_the_next_call_is_served(
    make: Any, place: Path, home: Path
) -> None:
    with worker(place, home=home):
        client = make(KEY, socket=place, spawn=False)
        with pytest.raises(emberd.RequestFailed) as refused:
            client.chat([{"role": "robot", "content": "beep"}])
        assert refused.value.message == 'messages[0].role is "robot"'
        assert refused.value.hint == "the roles are system, developer, user and assistant"
        assert str(refused.value) == f"{refused.value.message}; hint: {refused.value.hint}"
        with pytest.raises(emberd.RequestFailed, match="maxNewTokens is 0, below 1") as refused:
            client.chat(HELLO, max_new_tokens=0)
        assert refused.value.hint is None
        for nonsense in ("hello", HELLO[0]):
            with pytest.raises(TypeError, match="messages are a list"):
                client.chat(nonsense)
        assert client.chat([{"role": "user", "content": "half a pair: \ud83d"}], max_new_tokens=1) == " a"


def test_a_request_that_is_too_long_to_be_read_fails_alone(
    make: Any, slow: dict[str, str], place: Path, home: Path
) -> None:
    with worker(place, "--max-line", "4000", engine="echo", home=home, **slow), callers() as others:
        client = make(KEY, socket=place, spawn=False)
        client.load()
        short = others.submit(client.chat, HELLO, max_new_tokens=30)
        eventually(lambda: client.status().in_flight == 1, "the short one is in flight")
        with pytest.raises(emberd.RequestFailed, match=r"the line has \d+ bytes, and the limit is 4000"):
            client.chat([{"role": "user", "content": "x" * 5000}])
        assert len(short.result(DEADLINE)) > 0


def test_many_callers_share_one_connection_and_each_gets_its_own_answer(make: Any, place: Path, home: Path) -> None:
    with worker(place, home=home), callers(32) as calling:
        client = make(KEY, socket=place, spawn=False)
        answers = calling.map(lambda tokens: client.chat(HELLO, max_new_tokens=tokens), range(1, 200))
        assert [len(answer.split()) for answer in answers] == list(range(1, 200))
        assert client.status().connections == 1


def test_a_call_that_is_out_of_time_leaves_the_connection_to_the_others(
    make: Any, slow: dict[str, str], place: Path, home: Path
) -> None:
    with worker(place, engine="echo", home=home, **slow):
        client = make(KEY, socket=place, spawn=False)
        client.load()
        with pytest.raises(emberd.WorkerTimeout, match=r"did not answer a chat within 0\.05 s") as late:
            client.chat(HELLO, max_new_tokens=40, timeout=0.05)
        assert isinstance(late.value, TimeoutError)
        assert client.status().connections == 1
        # Its answer comes before the next one, and is nobody's.
        assert client.chat([{"role": "user", "content": "once more"}], max_new_tokens=60).startswith("user\nonce")
        assert client.status().connections == 1


# Finding and starting.


def test_where_none_listens_one_is_started_that_outlives_its_client(
    make: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", "of one repository")
    monkeypatch.setenv("GIT_AUTHOR_NAME", "somebody")
    client = make(KEY, socket=place, command=MOCK, idle_timeout=60)
    assert client.ping() == "emberd"
    pid = client.status().pid
    assert os.getsid(pid) == pid, "it has a session of its own"
    assert Path(f"/proc/{pid}/fd/0").readlink() == Path("/dev/null")
    log = place.with_name("s.log")
    assert client.log == str(log)
    for stream in (1, 2):
        assert Path(f"/proc/{pid}/fd/{stream}").readlink() == log
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert f"listening on {place}" in log.read_text()
    inherited = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"GIT_DIR=" not in inherited
    assert b"GIT_AUTHOR_NAME=somebody" in inherited
    assert b"--idle-ms\x0060000" in Path(f"/proc/{pid}/cmdline").read_bytes()
    client.close()
    assert make(KEY, socket=place, spawn=False).status().pid == pid


def test_a_program_that_ends_leaves_its_worker_running(make: Any, place: Path) -> None:
    program = f"import emberd; print(emberd.Worker({KEY!r}, socket={str(place)!r}, command={MOCK!r}).status().pid)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8", timeout=DEADLINE)
    assert (done.returncode, done.stderr) == (0, "")
    assert make(KEY, socket=place, spawn=False).status().pid == int(done.stdout)


def test_where_none_listens_and_none_may_be_started_there_is_an_error(make: Any, place: Path) -> None:
    client = make(KEY, socket=place, spawn=False)
    with pytest.raises(emberd.WorkerNotStarted, match="no worker listens on"):
        client.ping()
    client.shutdown()
    assert workers(place.parent) == []


def test_of_many_clients_that_come_at_once_all_meet_one_worker(make: Any, place: Path) -> None:
    crowd = [make(KEY, socket=place, command=MOCK) for _ in range(8)]
    together = threading.Barrier(len(crowd))

    def arrive(client: Any) -> Any:
        together.wait(DEADLINE)
        return client.status().pid

    with callers(len(crowd)) as calling:
        pids = set(calling.map(arrive, crowd))
    assert len(pids) == 1
    eventually(lambda: workers(place.parent) == list(pids), "all others have given way")


def test_a_worker_that_was_killed_is_replaced_with_the_next_call(make: Any, place: Path) -> None:
    client = make(KEY, socket=place, command=MOCK)
    first = client.status().pid
    os.kill(first, signal.SIGKILL)
    eventually(lambda: workers(place.parent) == [], "it is gone")
    assert client.chat(HELLO, max_new_tokens=8) == WORDS
    assert client.status().pid != first


def test_a_worker_that_is_told_to_go_goes_and_the_next_call_starts_another(make: Any, place: Path) -> None:
    client, other = make(KEY, socket=place, command=MOCK), make(KEY, socket=place, spawn=False)
    first = client.status().pid
    other.shutdown()
    eventually(lambda: not place.exists(), "its socket is gone")
    assert client.status().pid != first
    client.shutdown()
    client.shutdown()


def test_a_worker_that_cannot_start_is_told_with_what_its_log_says(make: Any, place: Path) -> None:
    place.with_name("s.log").write_text("older news\n")
    client = make(KEY, socket=place, command=[*command(), "worker", "--engine", "onnx"], model="./no-such")
    with pytest.raises(emberd.WorkerNotStarted, match=r"the worker for tiny exited with code 1") as failed:
        client.load()
    assert "there is no file or folder ./no-such" in failed.value.log_tail
    assert "older news" not in failed.value.log_tail
    assert failed.value.log_tail in str(failed.value)
    absent = make(KEY, socket=place, command=[str(place.parent / "no-program")])
    with pytest.raises(emberd.WorkerNotStarted, match=r"could not run .*no-program"):
        absent.ping()


def test_a_worker_that_never_listens_is_not_waited_for_for_ever(make: Any, place: Path) -> None:
    sleeper = [sys.executable, "-c", "import signal; print('asleep', flush=True); signal.pause()"]
    client = make(KEY, socket=place, command=sleeper, start_timeout=0.2)
    with pytest.raises(emberd.WorkerNotStarted, match=r"did not answer on .* within 0\.2 s"):
        client.ping()
    impatient = make(KEY, socket=place, command=sleeper)
    with pytest.raises(emberd.WorkerTimeout):
        impatient.ping(timeout=0.2)
    # Whoever hangs up while another waits for the start ends its waiting.
    with callers() as others:
        waiting = others.submit(impatient.ping)
        # In asyncio's client the start goes on that the first call did not wait for.
        count = 3 if isinstance(impatient, emberd.Worker) else 2
        eventually(lambda: len(workers(place.parent)) == count, "it waits for a worker")
        impatient.close()
        with pytest.raises(emberd.WorkerError, match="this client was closed"):
            waiting.result(DEADLINE)


def test_a_worker_that_is_slow_to_answer_at_first_is_waited_for(make: Any, place: Path) -> None:
    program = STANDIN + "silent = listener.accept()\nserve(tag)"
    client = make(KEY, socket=place, tag="slow", command=[sys.executable, "-c", program], connect_timeout=0.2)
    assert client.ping() == "slow"


def test_a_start_that_another_tags_worker_comes_before_is_made_anew(make: Any, place: Path) -> None:
    program = (
        STANDIN
        + "first = not os.path.exists(path + '.first')\nopen(path + '.first', 'w')\nserve('other' if first else tag)"
    )
    client = make(KEY, socket=place, tag="mine", replace=True, command=[sys.executable, "-c", program])
    assert client.ping() == "mine"


def test_a_long_log_is_put_aside_before_the_next_worker_writes(make: Any, place: Path) -> None:
    log = place.with_name("s.log")
    log.write_bytes(b"x" * (1 << 20) + b"\n")
    make(KEY, socket=place, command=MOCK).ping()
    assert log.with_name("s.log.1").stat().st_size == (1 << 20) + 1
    assert log.stat().st_size < 10_000


# Tags.


def test_a_worker_with_another_tag_is_refused_and_lives(make: Any, place: Path, home: Path) -> None:
    with worker(place, home=home) as one:
        client = make(KEY, socket=place, tag="mine", command=MOCK)
        with pytest.raises(emberd.TagMismatch, match="has the tag 'tag-1', not 'mine'") as refused:
            client.chat(HELLO)
        assert (refused.value.expected, refused.value.found) == ("mine", TAG)
        with pytest.raises(emberd.TagMismatch):
            client.shutdown()
        assert make(KEY, socket=place, tag=TAG).status().pid == one.process.pid


def test_a_worker_with_another_tag_is_replaced_where_that_is_asked(make: Any, place: Path, home: Path) -> None:
    with worker(place, home=home) as one:
        client = make(KEY, socket=place, tag="mine", replace=True, command=MOCK)
        assert client.ping() == "mine"
        assert one.process.wait() == 0
        assert make(KEY, socket=place, tag="mine").ping() == "mine"


# Where.


def test_the_runtime_folder_is_made_for_this_user_alone(
    make: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place.parent))
    client = make("llama3.2:3b", command=MOCK)
    folder = place.parent / "emberd"
    assert client.socket == str(folder / "llama3.2_3b.sock")
    assert not folder.exists(), "making a client makes nothing else"
    client.ping()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(each.name for each in folder.iterdir() if each.suffix != ".lock") == [
        "llama3.2_3b.log",
        "llama3.2_3b.sock",
    ]
    client.shutdown()
    folder.chmod(0o770)
    with pytest.raises(emberd.WorkerError, match=f"{folder} is not a folder of this user's alone.*chmod 700"):
        client.ping()


def test_without_a_runtime_folder_of_the_system_it_is_in_the_cache(
    make: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place.parent / "left over"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(place.parent / "c"))
    client = make(KEY, command=MOCK)
    assert client.socket == str(place.parent / "c/emberd/run/tiny.sock")
    assert client.ping() == "emberd"


@pytest.mark.parametrize("kind", [emberd.Worker, emberd.AsyncWorker])
def test_what_makes_no_sense_is_refused_at_once(kind: Any, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(emberd.WorkerError, match=r"the socket path has 2\d\d bytes, and the system allows 10"):
        kind(KEY, socket=place.parent / ("x" * 200))
    for wrong in ({"idle_timeout": 0}, {"connect_timeout": -1}, {"start_timeout": float("nan")}, {"retries": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            kind(KEY, socket=place, **wrong)
    with pytest.raises(ValueError, match="the model key is empty"):
        kind("")
    with pytest.raises(TypeError, match="command is a list"):
        kind(KEY, socket=place, command="emberd worker")
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(emberd.WorkerError, match="not support on Windows"):
        kind(KEY, socket=place)


# The real model.


@pytest.mark.model
@pytest.mark.timeout(900)
def test_the_golden_answer_comes_from_a_worker_that_the_client_started(
    make: Any, model_home: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBERD_HOME", str(model_home))
    client = make("smollm2", socket=place, model=os.environ.get("EMBERD_TEST_MODEL", "smollm2-135m"))
    client.load(timeout=600)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    assert client.chat(question, max_new_tokens=32) == "The capital of France is Paris."
    assert client.chat(question, max_new_tokens=32, stop="France") == "The capital of France"
