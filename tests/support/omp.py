"""The real client of omp, fetched from the package registry once into the checkout's cache, and a home in which it makes its calls.

`tests/clients/omp` holds what is fetched, pinned to the last file, and the script that drives it.
"""

from __future__ import annotations

import json
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.fetched import CACHE, CLIENTS, npm
from support.process import DEADLINE, command, environment, eventually
from support.worker import Client

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

HERE = CLIENTS / "omp"
VERSION = "18.2.3"
KEY = "lfm2.5-230m"
TAG = f"{VERSION}|onnx||"
ANSWER = 120.0
"""Seconds that a run of the client may take: it loads a model and waits for its answers, beside whatever else the machine does."""


class Omp:
    """The client: a folder of packages, and the engine that runs them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bun = next(folder.glob("node_modules/@oven/bun-*/bin/bun"))
        """Its own package has a script in this place, for npm to replace; nothing of npm's is run here."""


def fetch() -> Omp:
    """The client, fetched if need be."""
    # Not `npm ci`: it wants all optional packages in the file, of which some, for other systems, are not published.
    return Omp(npm("omp", "install"))


class Told:
    """What the driver told, line by line."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self._lines = lines

    def all(self, name: str) -> list[Any]:
        """Every result of this name."""
        return [line[name] for line in self._lines if name in line]

    def one(self, name: str) -> Any:
        """The only result of this name."""
        [result] = self.all(name)
        return result

    @property
    def statuses(self) -> list[str]:
        """Of the progress events, in their order, each once where it repeats."""
        statuses = [event["status"] for event in self.one("events")]
        return [status for at, status in enumerate(statuses) if at == 0 or statuses[at - 1] != status]


class Driver:
    """A run of the client."""

    def __init__(self, omp: Omp, how: str, calls: list[dict[str, Any]], cwd: Path, env: Mapping[str, str]) -> None:
        self.popen = subprocess.Popen(
            [str(omp.bun), str(HERE / "drive.ts"), how, json.dumps(calls)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            cwd=cwd,
            env=env,
        )

    def line(self) -> dict[str, Any]:
        """The next line."""
        assert self.popen.stdout is not None
        line = json.loads(self.popen.stdout.readline())
        assert isinstance(line, dict)
        return line

    def finish(self) -> Told:
        """What it told, once it has ended well."""
        try:
            out, err = self.popen.communicate(timeout=ANSWER)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            out, err = self.popen.communicate()
            raise AssertionError(f"the client goes on; it said:\n{out}{err}") from None
        assert self.popen.returncode == 0, f"the client said:\n{out}{err}"
        return Told([json.loads(line) for line in out.splitlines()])


class Home:
    """A user's home folder, in which nothing was before."""

    def __init__(self, omp: Omp, folder: Path, models: Path, model: str | None) -> None:
        self.omp = omp
        self.folder = folder
        self.run = folder / ".omp" / "run" / "tiny"
        self.ends = folder / "ends"
        kept = {
            name: value for name, value in environment(models).items() if not name.startswith(("OMP_", "PI_", "XDG_"))
        }
        self.env = {
            **kept,
            "HOME": str(folder),
            "TMPDIR": str(folder),
            **({} if model is None else {"EMBERD_WORKER_MODEL": model}),
            # Whatever a test that fails leaves behind goes by itself.
            "OMP_TINY_WORKER_IDLE_MS": "180000",
            "CLIENT": str(omp.folder),
            "EMBERD": program(folder),
            "ENDS": str(self.ends),
            "BUN_RUNTIME_TRANSPILER_CACHE_PATH": str(CACHE / "bun"),
            "DO_NOT_TRACK": "1",
        }

    def socket(self, backend: str = "onnx", key: str = KEY) -> Path:
        return self.run / f"{key}-{backend}.sock"

    def log(self, backend: str = "onnx", key: str = KEY) -> str:
        return self.socket(backend, key).with_suffix(".log").read_text()

    def start(self, how: str, *calls: dict[str, Any], **env: str) -> Driver:
        """Starts the client."""
        return Driver(self.omp, how, list(calls), self.folder, {**self.env, **env})

    def drive(self, how: str, *calls: dict[str, Any], **env: str) -> Told:
        """Runs the client to its end."""
        driver = self.start(how, *calls, **env)
        return driver.finish()

    def emberd(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs the command to its end."""
        return subprocess.run(
            [*command(), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            env={**self.env, **env},
            timeout=DEADLINE,
            check=False,
        )


def program(folder: Path) -> str:
    """The emberd of this interpreter as one executable."""
    words = command()
    if len(words) == 1:
        return words[0]
    script = folder / "emberd"
    script.write_text(f'#!/bin/sh\nexec {" ".join(words)} "$@"\n')
    script.chmod(0o755)
    return str(script)


@contextmanager
def omp_home(omp: Omp, models: Path, model: str | None = None) -> Iterator[Home]:
    """A home of a client, and the end of all workers that were started in it."""
    # A socket's path is short; the folders of a test's own are not.
    folder = Path(tempfile.mkdtemp(prefix="omp", dir="/tmp"))
    home = Home(omp, folder, models, model)
    try:
        yield home
    finally:
        for path in home.run.glob("*.sock"):
            end(path)
        shutil.rmtree(folder, ignore_errors=True)


def peer(client: Client) -> int | None:
    """The process at the other end of a connection, where the system tells."""
    if sys.platform != "linux":
        return None
    credentials = client.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])


def end(path: Path) -> None:
    """Ends the worker at a socket, as a client does that wants another one, and waits until the process is gone."""
    try:
        client = Client(path)
    except (ConnectionRefusedError, FileNotFoundError):
        return
    with client:
        pid = peer(client)
        client.send({"type": "shutdown", "id": "end"})
        client.rest()
    if pid is not None:
        eventually(lambda: not running(pid), f"worker {pid} is gone")


def running(pid: int) -> bool:
    """Whether a process runs; one whose end nobody has taken note of does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
