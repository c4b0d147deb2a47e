"""A command on a terminal of its own, as a person would run it."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from support.process import DEADLINE, command, environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

INTERRUPT = b"\x03"
"""What Ctrl-C types."""


class Terminal:
    """A process whose standard streams, and whose controlling terminal, are one pseudo-terminal."""

    def __init__(self, arguments: list[str], env: dict[str, str]) -> None:
        self._master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        # The leader of a session that opens a terminal gets it as its controlling one: then a key can interrupt it.
        script = 'exec "$@" <"$0" >"$0" 2>&1'
        self.popen = subprocess.Popen(
            ["/bin/sh", "-c", script, os.ttyname(self._slave), *command(), *arguments], env=env, start_new_session=True
        )
        self._shown = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._master, 65536)
            except OSError:  # Linux: the last one who had it open has gone.
                return
            if not piece:
                return
            self._shown += piece

    def type(self, keys: bytes) -> None:
        """Types, as a person at the keyboard."""
        os.write(self._master, keys)

    def wait(self) -> tuple[int, str]:
        """Its exit code and everything that it has shown, once it has ended."""
        code = self.popen.wait(DEADLINE)
        self._hang_up()
        return code, self._shown.decode()

    def _hang_up(self) -> None:
        """Ends the reading: this end has been held open so that the terminal never looks deserted before the end."""
        if self._slave >= 0:
            os.close(self._slave)
            self._slave = -1
        self._thread.join(DEADLINE)

    def end(self) -> None:
        """Kills the process if it still runs, and gives the terminal back."""
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(DEADLINE)
        self._hang_up()
        os.close(self._master)


@contextmanager
def terminal(*arguments: str | Path, home: Path, **env: str) -> Iterator[Terminal]:
    """Runs `emberd` on a terminal of 100 columns for as long as the block runs."""
    one = Terminal([str(each) for each in arguments], environment(home, TERM="xterm", **env))
    try:
        yield one
    finally:
        one.end()
