"""Being started as omp starts its own workers: by the environment, or by the arguments of its MLX worker."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.process import DEADLINE, Output, command, environment, eventually
from support.worker import Client

if TYPE_CHECKING:
    from collections.abc import Iterator

SELECTOR = "__omp_worker_tiny_inference"
KEY, TAG = "lfm2.5-230m", "18.2.3|onnx||"


def variables(place: Path, **more: str) -> dict[str, str]:
    """What omp puts into the environment."""
    own = {"OMP_TINY_WORKER_SOCKET": str(place), "OMP_TINY_WORKER_MODEL": KEY, "OMP_TINY_WORKER_TAG": TAG}
    return {"EMBERD_ENGINE": "mock", "EMBERD_WORKER_MODEL": "anything", **own, **more}


def options(place: Path, *more: str) -> list[str]:
    """What omp gives to its MLX worker."""
    own = ["--socket", str(place), "--tag", "mlx|0.31.3|634ed9e0", "--model-key", KEY]
    return ["-u", "/tmp/runner.py", *own, "--repo", "LiquidAI/LFM2.5-230M-MLX-4bit", "--dir", "/tmp/weights", *more]


def run(arguments: list[str], home: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs emberd to its end."""
    return subprocess.run(
        [*command(), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        env=environment(home, **env),
        timeout=DEADLINE,
        check=False,
    )


class Launched:
    """A worker that has said its first line."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        assert popen.stdout is not None
        assert popen.stderr is not None
        self.popen, self.log = popen, Output(popen.stderr)
        self.out = popen.stdout
        self.banner = self.out.readline()


@contextmanager
def launched(arguments: list[str], home: Path, cwd: Path, env: dict[str, str], *, leader: bool) -> Iterator[Launched]:
    """Starts emberd, as a session's leader or not, until the block ends."""
    popen = subprocess.Popen(
        [*command(), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=environment(home, **env),
        cwd=cwd,
        start_new_session=leader,
    )
    one = Launched(popen)
    try:
        assert "listening on " in one.banner, one.log.rest()
        yield one
    finally:
        popen.kill()
        popen.wait(DEADLINE)
        one.out.close()
        one.log.rest()


@pytest.mark.parametrize("leader", [True, False], ids=["leader", "follower"])
@pytest.mark.parametrize("form", ["environment", "after-a-script", "options"])
def test_a_launched_worker_goes_its_own_way(form: str, leader: bool, place: Path, home: Path, tmp_path: Path) -> None:
    arguments = {"environment": [SELECTOR], "after-a-script": ["/omp/cli.js", SELECTOR], "options": options(place)}[
        form
    ]
    env = {"EMBERD_ENGINE": "mock", "EMBERD_WORKER_MODEL": "anything"} if form == "options" else variables(place)
    with launched(arguments, home, tmp_path, env, leader=leader) as one:
        # Standard output has one line, and then its end, although the worker goes on.
        assert (one.banner, one.out.read()) == (f"omp tiny worker listening on {place}\n", "")
        with Client(place) as client:
            tag = "mlx|0.31.3|634ed9e0" if form == "options" else TAG
            assert client.ask({"type": "ping", "id": 1}) == {"type": "pong", "id": 1, "tag": tag}
            client.send({"type": "load", "id": 2})
            assert client.read()["event"]["modelKey"] == KEY
            assert client.read() == {"type": "loaded", "id": 2}
        pid = one.popen.pid
        assert os.getsid(pid) == pid
        if sys.platform == "linux":
            assert Path(f"/proc/{pid}/comm").read_text() == f"omp tiny {KEY}"[:15] + "\n"
            assert Path(f"/proc/{pid}/cwd").resolve() == tmp_path.resolve()
            assert Path(f"/proc/{pid}/fd/1").resolve() == Path(f"/proc/{pid}/fd/2").resolve()
        with Client(place) as client:
            client.send({"type": "shutdown"})
        assert one.popen.wait(DEADLINE) == 0
        assert not place.exists()


def test_options_come_before_the_environment_and_the_environment_before_nothing(
    place: Path, home: Path, tmp_path: Path
) -> None:
    with (
        launched(["worker", "--tag", "mine"], home, tmp_path, variables(place), leader=False) as one,
        Client(place) as client,
    ):
        assert client.ask({"type": "ping", "id": 1})["tag"] == "mine"
        assert os.getsid(one.popen.pid) == os.getsid(0), "a worker that a person starts stays in the terminal's session"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"OMP_TINY_WORKER_SOCKET": ""}, "tiny worker environment is incomplete"),
        ({"OMP_TINY_WORKER_MODEL": ""}, "tiny worker environment is incomplete"),
        ({"OMP_TINY_WORKER_TAG": ""}, "tiny worker environment is incomplete"),
        ({"OMP_TINY_WORKER_MODEL": "gpt-7"}, "Unknown tiny local model: gpt-7"),
        ({"PI_TINY_DEVICE": "abacus"}, 'Unsupported PI_TINY_DEVICE="abacus"'),
        ({"PI_TINY_DTYPE": "Q9"}, 'Unsupported PI_TINY_DTYPE="Q9"'),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_started_is_refused_in_omps_words(
    changed: dict[str, str], said: str, place: Path, home: Path
) -> None:
    done = run([SELECTOR], home, {**variables(place), **changed})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[0] == said
    assert not place.exists()


@pytest.mark.parametrize("device", ["", "default", " CPU ", "metal", "cuda"])
def test_a_device_that_omp_knows_is_no_reason_to_end(device: str, place: Path, home: Path, tmp_path: Path) -> None:
    with launched([SELECTOR], home, tmp_path, variables(place, PI_TINY_DEVICE=device), leader=True) as one:
        with Client(place) as client:
            assert client.ask({"type": "ping", "id": 1})["tag"] == TAG, "the tag is the launcher's, whatever the device"
        one.popen.kill()
        loud = "PI_TINY_DEVICE asks for" in one.log.rest()
        assert loud == (device in ("metal", "cuda"))


@pytest.mark.parametrize("form", ["environment", "options"])
def test_a_second_start_leaves_the_first_alone(form: str, place: Path, home: Path, tmp_path: Path) -> None:
    with launched([SELECTOR], home, tmp_path, variables(place), leader=True):
        arguments = [SELECTOR] if form == "environment" else options(place)
        done = run(arguments, home, variables(place))
        assert (done.returncode, done.stdout) == (1, "")
        assert f"tiny worker already listening on {place}" in done.stderr.splitlines()
        with Client(place) as client:
            assert client.ask({"type": "ping", "id": 1})["tag"] == TAG


@pytest.mark.parametrize("form", ["environment", "options"])
def test_the_launcher_says_when_an_idle_worker_goes(form: str, place: Path, home: Path, tmp_path: Path) -> None:
    if form == "environment":
        arguments, env = [SELECTOR], variables(place, OMP_TINY_WORKER_IDLE_MS="300")
    else:
        arguments, env = (
            options(place, "--idle-seconds", "0.3"),
            {"EMBERD_ENGINE": "mock", "EMBERD_WORKER_MODEL": "anything"},
        )
    # Nobody comes, so that a slow machine has nothing to be late for. The usual window is longer than any test.
    with launched(arguments, home, tmp_path, env, leader=True) as one:
        assert one.popen.wait(DEADLINE) == 0
        assert not place.exists()
        assert "the worker ends reason=Idle" in one.log.rest()


def test_an_mlx_worker_that_lacks_something_is_refused(place: Path, home: Path) -> None:
    done = run(["-u", "/tmp/runner.py", "--tag", "t", "--model-key", KEY], home, {})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("an MLX worker needs --socket, --tag and --model-key\n")


def test_a_worker_outlives_its_launcher(place: Path, home: Path, tmp_path: Path) -> None:
    script = f"{' '.join(command())} {SELECTOR} >{tmp_path / 'log'} 2>&1 & echo $!"
    done = subprocess.run(
        ["sh", "-c", script],
        capture_output=True,
        encoding="utf-8",
        env=environment(home, **variables(place)),
        timeout=DEADLINE,
        check=True,
    )
    pid = int(done.stdout)
    try:
        eventually(place.is_socket, "the worker is there")
        with Client(place) as client:
            assert client.ask({"type": "ping", "id": 1})["tag"] == TAG
            client.send({"type": "shutdown"})
            assert client.rest() == []
    except BaseException:
        os.kill(pid, 9)
        raise
