"""The `emberd` command: hands its arguments to Rust, and gives a thread to every engine that Rust asks for.

Nothing is imported here before it is needed: a worker must answer its first ping long before an engine could be imported.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

from emberd import _core

if TYPE_CHECKING:
    from threading import Thread

LAST_STEP = 0.25
"""Seconds that an engine may take for its last step when the process ends."""


def main() -> NoReturn:
    """Runs the command of `sys.argv` to its end and exits with its code.

    The process leaves without tearing the interpreter down: an engine may still be inside a step, and native libraries have been seen to
    crash when they are unloaded under one.
    """
    # The doors decide what an interrupt means. Python's own handler would raise it here, at the end, as a second opinion.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    app = _core.start(sys.argv[1:], sys.executable, mlx_is_best())
    engines: list[Thread] = []
    while (launch := app.next_launch()) is not None:
        engines = [thread for thread in engines if thread.is_alive()]
        engines.append(_start(launch))
        del launch
    code = app.finish()
    for thread in engines:
        thread.join(LAST_STEP)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def mlx_is_best() -> bool:
    """Whether this is Apple silicon, and what the engine over MLX needs is installed. Nothing is imported to tell."""
    if sys.platform != "darwin" or os.uname().machine != "arm64":
        return False
    from importlib.util import find_spec

    from emberd.loop import EXTRAS

    return all(find_spec(package) is not None for package in EXTRAS["mlx"])


def _start(launch: _core.Launch) -> Thread:
    import threading

    thread = threading.Thread(target=_run, args=(launch,), name=f"{launch.engine} engine", daemon=True)
    thread.start()
    return thread


def _run(launch: _core.Launch) -> None:
    from emberd import loop

    try:
        loop.run(launch)
    finally:
        launch.port.close()
