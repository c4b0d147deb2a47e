"""Starts the `emberd` command as a user would, reads what it says as it comes, and ends it.

Nothing here waits a fixed time: whatever is waited for is read, or looked at again until a deadline.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

DEADLINE = 30.0
"""Seconds that anything may take on a busy machine before a test gives up on it."""

T = TypeVar("T")


def command() -> list[str]:
    """The `emberd` that belongs to this interpreter."""
    script = Path(sys.executable).parent / "emberd"
    return [str(script)] if script.exists() else [sys.executable, "-m", "emberd"]


def eventually(look: Callable[[], T], what: str, deadline: float = DEADLINE) -> T:
    """Looks again and again until `look` gives something true; fails with `what` at the deadline."""
    end = time.monotonic() + deadline
    while not (found := look()):
        assert time.monotonic() < end, f"not within {deadline} s: {what}"
        time.sleep(0.005)
    return found


class Output:
    """A stream of a process, read on a thread of its own so that the process never waits for the test."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._lines: list[str] = []
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._stream:
            for line in self._stream:
                with self._changed:
                    self._lines.append(line)
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @property
    def text(self) -> str:
        """Everything so far."""
        with self._changed:
            return "".join(self._lines)

    def until(self, part: str, deadline: float = DEADLINE) -> str | None:
        """The first line that has `part` in it; `None` when the stream ends, or the time, without one."""

        def found() -> str | None:
            return next((line for line in self._lines if part in line), None)

        with self._changed:
            self._changed.wait_for(lambda: self._ended or found() is not None, deadline)
            return found()

    def rest(self) -> str:
        """Everything, once the stream has ended."""
        self._thread.join(DEADLINE)
        return self.text


class Process:
    """A running `emberd`."""

    def __init__(self, arguments: list[str], env: Mapping[str, str]) -> None:
        self.popen = subprocess.Popen(
            [*command(), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            env=env,
        )
        assert self.popen.stdout is not None
        assert self.popen.stderr is not None
        self.out = Output(self.popen.stdout)
        self.err = Output(self.popen.stderr)

    @property
    def pid(self) -> int:
        return self.popen.pid

    def line(self, part: str) -> str:
        """The first line of standard output with `part` in it."""
        found = self.out.until(part)
        assert found is not None, f"no {part!r} on standard output; it said:\n{self.said()}"
        return found

    def logged(self, part: str) -> str:
        """The first line of standard error with `part` in it."""
        found = self.err.until(part)
        assert found is not None, f"no {part!r} on standard error; it said:\n{self.said()}"
        return found

    def wait(self) -> int:
        """Its exit code, once it has ended by itself."""
        try:
            return self.popen.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the process goes on; it said:\n{self.said()}") from None

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def end(self) -> None:
        """Kills it if it still runs, and waits until it is gone."""
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(DEADLINE)
        self.out.rest()
        self.err.rest()

    def said(self) -> str:
        """Both its streams, for a failure's message."""
        return f"--- stdout\n{self.out.text}--- stderr\n{self.err.text}"

    def descriptors(self) -> int:
        """How many files, sockets and the like it holds open."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def resident(self) -> int:
        """Its resident memory, in bytes."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no VmRSS")


def environment(home: Path, **more: str) -> dict[str, str]:
    """This process's environment without anything that would set emberd up otherwise, and with a home of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("EMBERD_", "OMP_TINY_"))}
    return {**kept, "EMBERD_HOME": str(home), **more}


@contextmanager
def emberd(*arguments: str | Path, home: Path, **env: str) -> Iterator[Process]:
    """Runs the command for as long as the block runs."""
    process = Process([str(each) for each in arguments], environment(home, **env))
    try:
        yield process
    finally:
        process.end()


def run(*arguments: str | Path, home: Path, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end."""
    return subprocess.run(
        [*command(), *(str(each) for each in arguments)],
        input=stdin,
        capture_output=True,
        encoding="utf-8",
        env=environment(home, **env),
        timeout=DEADLINE,
        check=False,
    )
