"""The worker as a process: its socket, its signals, its end, and what it does before it has a model."""

from __future__ import annotations

import os
import signal
import socket
import stat
from typing import TYPE_CHECKING

import pytest

from support.process import Process, emberd, environment, eventually, run
from support.worker import KEY, TAG, Worker, chat, worker

if TYPE_CHECKING:
    from pathlib import Path


def pings(one: Worker) -> None:
    """Fails unless a new client is answered."""
    with one.connect() as client:
        assert client.ask({"type": "ping", "id": "p"}) == {"type": "pong", "id": "p", "tag": TAG}


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
    engine: str, number: int, code: int, slow: dict[str, str], place: Path, home: Path
) -> None:
    with worker(place, engine=engine, home=home, **slow) as one, one.connect() as client:
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
        with worker(place, home=home) as another:
            pings(another)


def test_an_idle_worker_goes_by_itself(place: Path, home: Path) -> None:
    with worker(place, "--idle-ms", "100", home=home) as one:
        assert one.process.wait() == 0
        assert not place.exists()


def test_a_worker_with_work_is_not_idle(slow: dict[str, str], place: Path, home: Path) -> None:
    # The window is far shorter than the work.
    with worker(place, "--idle-ms", "100", engine="echo", home=home, **slow) as one, one.connect() as client:
        client.send(*(chat(at, tokens=30) for at in range(4)))
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
    assert done.returncode == 1
    assert "./nowhere" in done.stderr
