"""What every benchmark needs: the load generator, servers that are started and always ended, the machine's description.

Which server is measured against which, and what counts as good, is not decided here.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import platform
import queue
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT = 120.0
"""Seconds a server may take until it is ready; a model is loaded in that time."""


class BenchError(Exception):
    """A measurement that could not be made."""


@dataclass(frozen=True)
class Tools:
    """The programs that the benchmarks run."""

    emberd: tuple[str, ...]
    load: str
    python: str


def find_emberd() -> tuple[str, ...]:
    """The `emberd` command beside this interpreter, or the module where the command is not installed."""
    command = shutil.which("emberd", path=str(Path(sys.executable).parent))
    return (command,) if command else (sys.executable, "-m", "emberd")


def build_load() -> str:
    """Builds the load generator in release mode and returns its path."""
    command = [
        "cargo",
        "build",
        "--release",
        "--locked",
        "-p",
        "emberd-load",
        "--message-format",
        "json-render-diagnostics",
    ]
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if built.returncode != 0:
        raise BenchError("the load generator does not build\nhint: see cargo's messages above")
    for line in built.stdout.splitlines():
        message = json.loads(line)
        if message.get("reason") == "compiler-artifact" and message["target"]["name"] == "emberd-load":
            return str(message["executable"])
    raise BenchError("cargo built no executable named emberd-load")


def run_json(command: Sequence[str], timeout: float = 600.0) -> dict[str, Any]:
    """Runs a program to its end and returns the JSON object on its last line of output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"not done after {timeout:g} s: {' '.join(command)}") from error
    except OSError as error:
        raise BenchError(f"cannot run {command[0]}: {error}") from error
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        raise BenchError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    figures: dict[str, Any] = json.loads(lines[-1])
    return figures


class Server:
    """A child process that says on stdout when and where it listens."""

    def __init__(self, command: Sequence[str], env: dict[str, str] | None = None) -> None:
        self._log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in stop()
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._command = " ".join(command)
        try:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env={**os.environ, **(env or {})},
            )
        except OSError as error:
            self._log.close()
            raise BenchError(f"cannot run {command[0]}: {error}") from error
        threading.Thread(target=self._drain, daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    def _drain(self) -> None:
        """Reads stdout to its end, so that the child never waits for room in the pipe."""
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def await_line(self, pattern: str) -> str:
        """The first group of `pattern` in the first line of stdout that has it."""
        until = time.monotonic() + START_TIMEOUT
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise BenchError(f"{self._command}: not ready after {START_TIMEOUT:g} s\n{self._tail()}") from None
            if line is None:
                raise BenchError(f"{self._command}: ended before it was ready\n{self._tail()}")
            if found := re.search(pattern, line):
                return found[1]

    def await_true(self, ready: Callable[[], bool]) -> None:
        """Asks `ready` every five milliseconds until it says yes."""
        until = time.monotonic() + START_TIMEOUT
        while not ready():
            if self._child.poll() is not None:
                raise BenchError(f"{self._command}: ended with {self._child.returncode}\n{self._tail()}")
            if time.monotonic() > until:
                raise BenchError(f"{self._command}: not ready after {START_TIMEOUT:g} s\n{self._tail()}")
            time.sleep(0.005)

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-2000:]

    def stop(self) -> None:
        """Ends the process, softly first, and reaps it."""
        if self._child.poll() is None:
            self._child.terminate()
            try:
                self._child.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._child.kill()
        self._child.wait()
        self._log.close()


@contextlib.contextmanager
def serving(command: Sequence[str], env: dict[str, str] | None = None) -> Iterator[Server]:
    """A server for the length of a block."""
    server = Server(command, env)
    try:
        yield server
    finally:
        server.stop()


def on_core(core: int, command: Sequence[str]) -> list[str]:
    """The command held to one core, where the system has `taskset` and that core.

    Where threads may move, two cores are enough for a thread to be waited for on one while the other sleeps, and a wake-up
    then costs more than a request.
    """
    taskset = shutil.which("taskset")
    return [taskset, "-c", str(core), *command] if taskset and core < (os.cpu_count() or 1) else list(command)


@contextlib.contextmanager
def http_server(command: Sequence[str]) -> Iterator[str]:
    """Starts an HTTP server on a free port and gives its address, `host:port`, once it can serve."""
    with serving(command) as server:
        yield ready(server)


def ready(server: Server) -> str:
    """The address of an HTTP server, `host:port`, once it can serve.

    The address is read from its first line that holds one, as a URL or as `{"address": …}`; a server that is loading
    answers `/health` with another status than 200.
    """
    address = server.await_line(r'(?:http://|"address":\s*")([^\s/"]+:\d+)')
    server.await_true(lambda: healthy(address))
    return address


def healthy(address: str) -> bool:
    """Whether `GET /health` answers 200."""
    connection = http.client.HTTPConnection(address, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def connectable(path: str) -> bool:
    """Whether something listens on the Unix socket."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(path)
        except OSError:
            return False
    return True


def capture(address: str, body: str) -> bytes:
    """The bytes of one streamed answer."""
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request(
            "POST", "/v1/responses", body, {"content-type": "application/json", "accept": "text/event-stream"}
        )
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise BenchError(f"{address} answered {answer.status}: {content[:500]!r}")
        return content
    finally:
        connection.close()


def machine() -> str:
    """Processor, cores, memory and system, in a few words."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            model = found[1]
    memory = ""
    with contextlib.suppress(OSError, ValueError):
        memory = f", {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{model}, {cores} cores{memory}, {platform.system()} {platform.release()}, CPython {platform.python_version()}"
    )
