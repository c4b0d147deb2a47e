"""`emberd omp`: what it writes into a user's home, and that it takes away what it wrote and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support import systemd
from support.omp import peer, running
from support.process import DEADLINE, command, environment, eventually
from support.worker import Client, worker

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY, TAG = "lfm2.5-230m", "18.2.3|onnx||"
PLACE = "cache/tiny-mlx-runtime/mlx-lm-0.31.3"

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux's")


class User:
    """A user with a home folder, an omp and a service manager that writes down what it is told."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "h"
        self.told = folder / "told"
        self.bin = folder / "bin"
        for each in (self.home, self.bin):
            each.mkdir()
        self.told.touch()
        self.program("omp", "echo omp/18.2.3")
        systemd.program(self.bin / "systemctl")

    def program(self, name: str, does: str) -> None:
        """A program on the user's path."""
        (self.bin / name).write_text(f"#!/bin/sh\n{does}\n")
        (self.bin / name).chmod(0o755)

    def omp(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs `emberd omp`."""
        own = {"HOME": str(self.home), "PATH": f"{self.bin}:/usr/bin:/bin"}
        mine = {
            name: value
            for name, value in environment(self.home / "models").items()
            if not name.startswith(("OMP_", "PI_", "XDG_", "HF_"))
        }
        mine.pop("EMBERD_HOME")
        return subprocess.run(
            [*command(), "omp", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            env={**mine, **own, **env},
            timeout=DEADLINE,
            check=False,
        )

    def does(self, *arguments: str, **env: str) -> str:
        """What `emberd omp` says when it succeeds."""
        done = self.omp(*arguments, **env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def files(self) -> dict[str, bytes | None]:
        """Everything in the home: files by what they hold, folders by nothing."""
        return {
            str(path.relative_to(self.home)): path.read_bytes() if path.is_file() else None
            for path in sorted(self.home.rglob("*"))
        }


@pytest.fixture
def user() -> Iterator[User]:
    # The folder of a test is too deep for a socket.
    with tempfile.TemporaryDirectory(prefix="omp") as name:
        folder = Path(name)
        try:
            yield User(folder)
        finally:
            systemd.end(folder)


def socket(user: User, key: str = KEY, root: str = ".omp") -> Path:
    """Where omp looks for the ONNX worker of a model."""
    return user.home / root / "run/tiny" / f"{key}-onnx.sock"


def tag(path: Path) -> str:
    """The tag of the worker on a socket."""
    with Client(path) as client:
        found = client.ask({"type": "ping", "id": 1})["tag"]
        assert isinstance(found, str)
        return found


@pytest.mark.parametrize(
    ("env", "folder"),
    [
        ({}, ".omp/agent"),
        ({"PI_CONFIG_DIR": ".other"}, ".other/agent"),
        ({"OMP_PROFILE": "wren"}, ".omp/profiles/wren/agent"),
        ({"PI_PROFILE": "wren"}, ".omp/profiles/wren/agent"),
        ({"PI_CODING_AGENT_DIR": "{home}/agent"}, "agent"),
        ({"XDG_CACHE_HOME": "{home}/xdg"}, "xdg/omp"),
    ],
    ids=lambda value: "-".join(value) or "plain" if isinstance(value, dict) else "",
)
def test_emberd_is_put_where_omp_looks_and_goes_without_a_trace(env: dict[str, str], folder: str, user: User) -> None:
    env = {name: value.format(home=user.home) for name, value in env.items()}
    (user.home / "xdg" / "omp").mkdir(parents=True)
    before = user.files()
    shown = user.does("install", "--dry-run", **env)
    assert user.files() == before, "a dry run changes nothing"
    user.does("install", **env)
    place = user.home / folder / PLACE
    assert f"move {place}.by-emberd to {place}\n" in shown
    assert (place / ".omp-mlx-lm").read_text().strip() == "0.31.3"
    for path, content in user.files().items():
        if path not in before:
            made = str(user.home / path).replace(PLACE, f"{PLACE}.by-emberd")
            assert f"write {made} (mode 0" in shown or content is None
            for line in (content or b"").decode().splitlines():
                assert f"    | {line}\n" in shown
    started = subprocess.run(
        [str(place / "bin" / "python"), "-u", "/tmp/runner.py", "--tag", "t"],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert (started.returncode, started.stdout) == (1, "")
    assert started.stderr.startswith("an MLX worker needs --socket"), "it is emberd that was started"
    user.does("install", **env)
    user.does("uninstall", **env)
    # A lock's file stays, as omp's own does: removed, it would let two hold one lock.
    left = [
        path for path, content in user.files().items() if content is not None and not path.endswith(".install.lock")
    ]
    assert left == []
    assert not place.exists()
    assert user.does("uninstall", **env) == "nothing of emberd's is installed\n"


def test_what_lies_in_the_clients_folder_is_not_taken_for_emberd(user: User, tmp_path: Path) -> None:
    user.does("install")
    (tmp_path / "emberd.py").write_text("raise SystemExit(77)")
    script = user.home / ".omp/agent" / PLACE / "bin/python"
    done = subprocess.run([str(script), "--version"], cwd=tmp_path, capture_output=True, encoding="utf-8", check=False)
    assert (done.returncode, done.stdout.split()[0]) == (0, "emberd")


def test_an_environment_of_omps_is_in_the_way_or_moved_aside_and_comes_back(user: User) -> None:
    place = user.home / ".omp/agent" / PLACE
    (place / "bin").mkdir(parents=True)
    (place / "bin/python").symlink_to(sys.executable)
    (place / ".omp-mlx-lm").write_text("0.31.3\n")
    (place / "pyvenv.cfg").write_text("home = /usr/bin\n")
    before = user.files()
    refused = user.omp("install")
    assert refused.returncode == 1
    assert "of its own" in refused.stderr
    assert "--replace" in refused.stderr
    assert "move " in user.does("install", "--replace", "--dry-run")
    assert user.does("uninstall") == "nothing of emberd's is installed\n"
    assert user.files() == before
    user.does("install", "--replace")
    assert (place / "bin/python").read_text().startswith("#!/bin/sh\n")
    assert f"an environment of omp's is aside, until emberd is uninstalled: {place}.before-emberd\n" in user.does(
        "status"
    )
    user.does("uninstall")
    assert user.files() == before
    assert (place / "bin/python").is_symlink()


@on_linux
def test_a_kept_worker_is_a_service_with_the_tag_of_the_omp_that_is_here(user: User) -> None:
    shown = user.does("install", "--keep", KEY, "--keep", "llama3.2:3b", "--dry-run")
    assert user.files() == {}
    assert "restart" not in user.told.read_text()
    user.does("install", "--keep", KEY, "--keep", "llama3.2:3b")
    units = user.home / ".config/systemd/user"
    assert sorted(path.name for path in units.iterdir()) == [
        "emberd-omp-lfm2.5-230m-onnx.service",
        "emberd-omp-llama3.2_3b-onnx.service",
    ]
    for unit in units.iterdir():
        for line in unit.read_text().splitlines():
            assert f"    | {line}\n" in shown
        assert f'"--tag={TAG}"' in unit.read_text()
    run = user.home / ".omp/run/tiny"
    assert run.stat().st_mode & 0o777 == 0o700
    assert "--user enable emberd-omp-lfm2.5-230m-onnx.service\n" in user.told.read_text()
    assert "--user restart emberd-omp-lfm2.5-230m-onnx.service\n" in user.told.read_text()
    assert "as omp expects it" in user.does("status")
    user.program("omp", "echo omp/18.3.4")
    assert "which omp does not expect; install again" in user.does("status")
    user.does("uninstall")
    assert list(units.iterdir()) == []
    assert "--user disable --now emberd-omp-lfm2.5-230m-onnx.service\n" in user.told.read_text()


@on_linux
def test_a_kept_worker_has_the_environment_in_which_its_tag_was_made(user: User) -> None:
    hard = 'q8 100% "mine" $HOME \\'
    given = {"EMBERD_ENGINE": "mock", "PI_TINY_DEVICE": "cpu", "PI_TINY_DTYPE": hard, "HF_HOME": "/no where/hf"}
    said = user.does("install", "--keep", KEY, **given, HF_TOKEN="hf_secret", EMBERD_HUB_TIMEOUT="7", OTHER="x")
    assert tag(socket(user)) == f"18.2.3|onnx|cpu|{hard}"
    with Client(socket(user)) as client:
        pid = peer(client)
    environ = Path(f"/proc/{pid}/environ").read_text().split("\0")
    there = dict(line.split("=", 1) for line in environ if "=" in line)
    assert {name: there.get(name) for name in given} == given
    assert there["EMBERD_HUB_TIMEOUT"] == "7"
    assert "HF_TOKEN" not in there
    assert "OTHER" not in there
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    assert words[words.index("--home") + 1] == str(user.home / ".cache/emberd"), "what the installing emberd would use"
    assert "HF_TOKEN is a secret" in said
    [unit] = (user.home / ".config/systemd/user").iterdir()
    assert "hf_secret" not in unit.read_text()
    assert f"tag 18.2.3|onnx|cpu|{hard}, as omp expects it" in user.does("status", **given)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd that would read a unit")
def test_systemd_finds_nothing_wrong_with_a_unit(user: User) -> None:
    hard = '100% "mine" $HOME \\'
    user.does("install", "--keep", "llama3.2:3b", "--tag", hard, HF_HOME=f"/{hard}")
    [unit] = (user.home / ".config/systemd/user").iterdir()
    verify = ["systemd-analyze", "--user", "verify", str(unit)]
    env = {**os.environ, "HOME": str(user.home), "XDG_RUNTIME_DIR": str(user.home)}
    done = subprocess.run(verify, capture_output=True, encoding="utf-8", env=env, timeout=DEADLINE, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@on_linux
def test_the_service_starts_a_worker_that_omp_takes_for_its_own_and_is_seen_to_be_up(user: User) -> None:
    said = user.does("install", "--keep", KEY, "--model", "anything", EMBERD_ENGINE="mock", OMP_TINY_WORKER_IDLE_MS="1")
    assert f"see that the worker on {socket(user)} answers, with the tag {TAG}\n" in said
    assert tag(socket(user)) == TAG
    assert f"worker     {socket(user)}: answers, tag {TAG}\n" in user.does("status")
    with Client(socket(user)) as client:
        first = peer(client)
        # Installed anew, its place is free for the one that the service manager starts.
        user.does("install", "--keep", KEY, EMBERD_ENGINE="mock")
        assert client.rest() == []
    assert first is not None
    eventually(lambda: not running(first), "the first worker is gone")
    assert tag(socket(user)) == TAG


@on_linux
def test_a_worker_that_does_not_come_up_is_no_success(user: User) -> None:
    (user.told.parent / "tag").write_text("of another")
    done = user.omp("install", "--keep", KEY, EMBERD_ENGINE="mock")
    assert done.returncode == 1
    assert f"the worker on {socket(user)} is not up: another one is there, with the tag of another" in done.stderr
    assert f"journalctl --user --unit emberd-omp-{KEY}-onnx.service" in done.stderr


@on_linux
def test_each_profile_removes_its_own(user: User) -> None:
    work = {"OMP_PROFILE": "wren"}
    for env in ({}, work):
        user.does("install", **env)
        user.does("install", "--keep", KEY, EMBERD_ENGINE="mock", **env)
    units = user.home / ".config/systemd/user"
    text = user.does("status", **work)
    assert f"{units / f'emberd-omp-wren-{KEY}-onnx.service'}: tag {TAG}, as omp expects it\n" in text
    assert f"{units / f'emberd-omp-{KEY}-onnx.service'}: tag {TAG}, for another profile\n" in text
    said = user.does("uninstall")
    assert f"{units / f'emberd-omp-wren-{KEY}-onnx.service'} is left alone" in said
    assert [path.name for path in units.iterdir()] == [f"emberd-omp-wren-{KEY}-onnx.service"]
    place = f"profiles/wren/agent/{PLACE}/bin/python"
    assert (user.home / ".omp" / place).exists()
    assert tag(socket(user, root=".omp/profiles/wren")) == TAG
    assert "nothing of emberd's is installed\n" in user.does("uninstall")
    user.does("uninstall", **work)
    assert not (user.home / ".omp" / place).exists()
    assert list(units.iterdir()) == []
    assert user.does("uninstall") == "nothing of emberd's is installed\n"


@on_linux
def test_where_nothing_keeps_programs_running_that_is_said_and_nothing_is_written(user: User) -> None:
    user.program("systemctl", "exit 1")
    done = user.omp("install", "--keep", KEY)
    assert done.returncode == 1
    assert "no systemd instance of the user answers" in done.stderr
    assert f"--tag={TAG}" in done.stderr, "the command that does it by hand"
    assert user.files() == {}


@on_linux
def test_without_an_omp_the_tag_must_be_given(user: User) -> None:
    (user.bin / "omp").unlink()
    done = user.omp("install", "--keep", KEY)
    assert done.returncode == 1
    assert "there is no omp on the PATH" in done.stderr
    assert "--tag" in done.stderr
    assert '"--tag=my tag"' in user.does("install", "--keep", KEY, "--tag", "my tag", "--dry-run")
    user.program("omp", "exit 3")
    assert "tells no version" in user.omp("install", "--keep", KEY).stderr


def test_a_key_that_omp_has_not_is_not_kept(user: User) -> None:
    done = user.omp("install", "--keep", "gpt-7")
    assert done.returncode == 1
    assert "Unknown tiny local model: gpt-7" in done.stderr


@on_linux
def test_a_unit_of_somebody_elses_is_left_alone(user: User) -> None:
    unit = user.home / f".config/systemd/user/emberd-omp-{KEY}-onnx.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\nExecStart=/bin/true\n")
    before = user.files()
    done = user.omp("install", "--keep", KEY)
    assert done.returncode == 1
    assert "emberd has not written it" in done.stderr
    assert user.does("uninstall") == "nothing of emberd's is installed\n"
    assert user.files() == before


def test_status_tells_what_is_there_and_who_answers(user: User, place: Path, home: Path) -> None:
    text = user.does("status")
    assert "omp        18.2.3, " in text
    assert f"its ONNX workers' tag is {TAG}" in text
    assert "MLX        " in text
    assert "would omp start emberd? no: emberd is not installed there" in text
    assert "worker     none in " in text
    assert "the place of an omp that pins mlx-lm 0.31.3" in text
    config = os.path.relpath(place.parent, user.home)
    run = place.parent / "run/tiny"
    run.mkdir(parents=True)
    socket = run / "x-onnx.sock"
    with worker(socket, home=home) as one:
        text = user.does("status", PI_CONFIG_DIR=config)
        assert "tag tag-1\n" in text
        one.process.signal(9)
        one.process.wait()
        assert "nobody answers" in user.does("status", PI_CONFIG_DIR=config)
    user.does("install")
    assert "would omp start emberd? " in user.does("status", PI_TINY_DEVICE="mlx")
