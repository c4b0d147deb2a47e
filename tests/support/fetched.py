"""Clients that nobody here wrote, fetched from the package registries once into the checkout's cache; and runs of them that come to an end.

What is fetched is pinned to the last file: by a package-lock.json, or by a file of requirements.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).parent.parent.parent
CACHE = ROOT / ".cache" / "clients"
CLIENTS = ROOT / "tests" / "clients"
FETCH = 800.0
"""Seconds that fetching one client may take."""


@contextmanager
def once(folder: Path, pins: Path) -> Iterator[bool]:
    """Whether the folder has to be filled: it was not, or with other pins. It counts as filled when the block ends well."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = hashlib.sha256(pins.read_bytes()).hexdigest()
    done = folder / "done"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists() and done.read_text() == wanted:
            yield False
            return
        yield True
        done.write_text(wanted)


def npm(name: str, how: str = "ci") -> Path:
    """The folder that npm has filled as `tests/clients/NAME/package-lock.json` says."""
    here, folder = CLIENTS / name, CACHE / name
    with once(folder, here / "package-lock.json") as wanted:
        if wanted:
            for file in ("package.json", "package-lock.json"):
                shutil.copy(here / file, folder / file)
            command = ["npm", how, "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
            ended(command, folder, os.environ, FETCH)
    return folder


def python(requirements: Path) -> Path:
    """The interpreter of an environment of its own that has what the file lists: other clients pin other versions of what this one has."""
    folder = CACHE / requirements.stem
    program = folder / "venv" / "bin" / "python"
    with once(folder, requirements) as wanted:
        if wanted:
            ended([sys.executable, "-m", "venv", "--clear", str(folder / "venv")], folder, os.environ, FETCH)
            pip = [str(program), "-m", "pip", "install", "--quiet", "--no-deps", "--requirement", str(requirements)]
            ended(pip, folder, os.environ, FETCH)
    return program


def ended(command: list[str], cwd: Path, env: Mapping[str, str], seconds: float) -> str:
    """The standard output of a program that ends well, and in time; else it is killed, with whatever it has started."""
    code, out, err = run(command, cwd, env, seconds)
    assert code == 0, f"{command[0]} ended with {code}; it said:\n{out}{err}"
    return out


def run(command: list[str], cwd: Path, env: Mapping[str, str], seconds: float) -> tuple[int, str, str]:
    """How a program ends, with all that it said; killed, with whatever it has started, where it does not come to an end."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        cwd=cwd,
        env=env,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{command[0]} was still running after {seconds} s; it said:\n{out}{err}") from None
    return process.returncode, out, err


def alone(home: Path, **more: str) -> dict[str, str]:
    """An environment in which a client finds nothing of the user's, and reaches nothing but this machine."""
    nowhere = "http://127.0.0.1:9"
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "TMPDIR": str(home),
        "LANG": "C.UTF-8",
        "HTTP_PROXY": nowhere,
        "HTTPS_PROXY": nowhere,
        "http_proxy": nowhere,
        "https_proxy": nowhere,
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        "DO_NOT_TRACK": "1",
        **more,
    }
