"""The clients' own ends: closing, forgetting, interrupts, forks, tasks and loops; and what importing them costs."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

import emberd
import emberd.client
import emberd.client.core
from support.clients import KINDS, Loop, callers, clients
from support.fake import Peer, fake
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


def test_a_client_that_is_closed_ends_what_waits_and_takes_no_more(make: Any, place: Path) -> None:
    with fake(place) as one, callers() as calling:
        client = make(KEY, socket=place, spawn=False)
        waiting = calling.submit(client.chat, HELLO)
        one.asked(1)
        client.close()
        client.close()
        with pytest.raises(emberd.ConnectionLost, match="this client was closed"):
            waiting.result(DEADLINE)
        one.until(lambda: one.open == 0, "it has hung up")
        for call in (client.ping, client.shutdown):
            with pytest.raises(emberd.WorkerError, match="this client was closed"):
                call()
        assert one.connections == 1


def test_a_worker_that_does_not_read_holds_up_no_one_for_longer_than_asked(make: Any, place: Path) -> None:
    # Far more than the socket holds: what has begun to be sent stays with the client, and what waits behind it is withdrawn.
    long = [{"role": "user", "content": "x" * (8 << 20)}]
    release = threading.Event()

    def answer(peer: Peer, request: dict[str, Any]) -> None:
        if len(one.requests) == 1:
            assert release.wait(DEADLINE)
        peer.text(request, "read")

    with fake(place, answer) as one, callers() as calling:
        client = make(KEY, socket=place, spawn=False)
        first = calling.submit(client.chat, HELLO)
        one.asked(1)
        for _ in range(3):
            with pytest.raises(emberd.WorkerTimeout):
                client.chat(long, timeout=0.05)
        release.set()
        assert [first.result(DEADLINE), client.chat(HELLO)] == ["read", "read"]
        assert sum(request["messages"] == long for request in one.requests) <= 1
        assert one.connections == 1


def test_a_client_that_is_forgotten_hangs_up(place: Path) -> None:
    with fake(place, answers("x")) as one:
        client = emberd.Worker(KEY, socket=place, spawn=False)
        assert client.chat(HELLO) == "x"
        del client
        gc.collect()
        one.until(lambda: one.open == 0, "it has hung up")


def test_an_interrupt_leaves_the_connection_usable(place: Path) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def answer(peer: Peer, request: dict[str, Any]) -> None:
        if len(one.requests) == 1:
            signal.pthread_kill(main, signal.SIGINT)
        else:
            peer.text(request, "after")

    with fake(place, answer) as one, emberd.Worker(KEY, socket=place, spawn=False) as client:
        with pytest.raises(KeyboardInterrupt):
            client.chat(HELLO)
        assert client.chat(HELLO) == "after"
        assert one.connections == 1


def test_a_forked_process_has_a_connection_of_its_own_and_leaves_the_parents_alone(place: Path) -> None:
    # At the fork another thread is about to connect, and holds what it needs for that: it is not in the child.
    program = """
import os, sys, emberd
worker = emberd.Worker("tiny", socket=sys.argv[1], spawn=False)
say = lambda: worker.chat([{"role": "user", "content": str(os.getpid())}], timeout=20)
assert say() == str(os.getpid())
worker._connecting.acquire()
child = os.fork()
if child:
    worker._connecting.release()
    assert say() == str(os.getpid())
    worker.close()
    sys.exit(os.waitpid(child, 0)[1])
assert say() == str(os.getpid())
sys.stdin.read()
"""
    with fake(place, lambda peer, request: peer.text(request, request["messages"][0]["content"])) as one:
        # Python warns of forks beside threads: that is what this is about.
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, str(place)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        try:
            one.asked(3)
            one.until(lambda: one.open == 1, "the parent's connection has ended with the parent's client")
            _, said = process.communicate("", DEADLINE)
        finally:
            process.kill()
            process.communicate()
        assert (process.returncode, said) == (0, "")
        assert (one.connections, len(one.requests)) == (2, 3)


def test_a_task_that_is_cancelled_leaves_the_connection_to_the_others(place: Path) -> None:
    def answer(peer: Peer, request: dict[str, Any]) -> None:
        if len(one.requests) > 1:
            peer.text(request, "after")

    async def main() -> None:
        async with emberd.AsyncWorker(KEY, socket=place, spawn=False) as client:
            task = asyncio.create_task(client.chat(HELLO))
            await asyncio.to_thread(one.asked, 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await client.chat(HELLO) == "after"

    with fake(place, answer) as one:
        emberd.client.run(main())
        assert one.connections == 1


def test_tasks_that_come_at_once_share_one_connection(place: Path) -> None:
    async def main() -> None:
        async with emberd.AsyncWorker(KEY, socket=place, spawn=False) as client:
            impatient = asyncio.create_task(client.ping(timeout=0))
            with pytest.raises(emberd.WorkerTimeout):
                await impatient
            assert await asyncio.gather(*(client.chat(HELLO) for _ in range(20))) == ["x"] * 20

    with fake(place, answers("x")) as one:
        emberd.client.run(main())
        assert one.connections == 1


def test_a_client_that_is_used_in_another_loop_connects_anew_and_hangs_up_in_the_old_one(place: Path) -> None:
    with fake(place, answers("x")) as one:
        client = emberd.AsyncWorker(KEY, socket=place, spawn=False)
        loops = [Loop(asyncio.new_event_loop), Loop(asyncio.new_event_loop)]
        try:
            for count, loop in enumerate(loops, 1):
                assert loop.run(client.chat(HELLO)) == "x"
                assert loop.run(client.chat(HELLO)) == "x"
                assert one.connections == count
                one.until(lambda: one.open == 1, "there is one connection")
            loops[1].run(client.close())
            one.until(lambda: one.open == 0, "there is none")
        finally:
            for loop in loops:
                loop.close()


@pytest.mark.parametrize("there", [True, False])
def test_programs_run_on_uvloop_where_it_is_installed(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not there:
        monkeypatch.setitem(sys.modules, "uvloop", None)

    async def main() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert emberd.client.run(main()).partition(".")[0] == ("uvloop" if there else "asyncio")


def test_errors_survive_the_way_to_another_process() -> None:
    error = emberd.TagMismatch("what", "hint")
    error.expected, error.found = "a", "b"
    for each in (
        error,
        emberd.ConnectionLost("gone"),
        emberd.WorkerTimeout("late", "wait"),
        emberd.RequestFailed("no", "x"),
    ):
        copy = pickle.loads(pickle.dumps(each))
        assert (type(copy), str(copy), copy.__dict__) == (type(each), str(each), each.__dict__)


@pytest.mark.parametrize(
    ("program", "absent"),
    [
        ("import emberd", {"asyncio", "socket", "json", "subprocess", "typing", "emberd.client"}),
        ("import emberd.cli", {"asyncio", "socket", "emberd.client"}),
        ("import emberd; emberd.Worker", {"asyncio", "uvloop", "emberd.client.aio"}),
        ("import emberd; emberd.AsyncWorker", {"uvloop", "emberd.client.threads"}),
    ],
)
def test_only_what_is_used_is_imported(program: str, absent: set[str]) -> None:
    # -S: what site imports is not ours.
    paths = os.pathsep.join(each for each in sys.path if each)
    code = f"import sys; sys.path[:0] = {paths!r}.split({os.pathsep!r}); {program}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, encoding="utf-8", timeout=DEADLINE)
    assert (done.returncode, done.stderr) == (0, "")
    assert absent & set(done.stdout.split()) == set()


def test_the_names_of_the_package_are_those_it_says_and_no_others() -> None:
    for package in (emberd, emberd.client):
        for name in package.__all__:
            assert getattr(package, name) is not None
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            package.nothing  # noqa: B018


def test_a_process_without_a_descriptor_left_is_told_so_and_goes_on(make: Any, place: Path) -> None:
    with fake(place, answers("x")) as one:
        client = make(KEY, socket=place, spawn=False)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            with pytest.raises(emberd.WorkerError, match=r"could not connect to .*: Too many open files"):
                client.ping()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert client.chat(HELLO) == "x"
        assert one.connections == 1
