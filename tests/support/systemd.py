"""A service manager for one user of a test: does what `systemctl --user` does with units of emberd's, and writes down what it is told.

It reads a unit by systemd's own rules and starts what it says in an environment in which nothing is but what a manager sets and what the unit says.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

TESTS = Path(__file__).parent.parent


def program(path: Path) -> None:
    """Puts a `systemctl` there. What it is told is in `told` beside its folder, the processes that it has started in `pids`."""
    path.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(TESTS)!r})\n"
        f"from support.systemd import main\nmain({str(path.parent.parent)!r}, sys.argv[1:])\n"
    )
    path.chmod(0o755)


def words(value: str) -> list[str]:
    """The words of a setting whose words are all in double quotes."""
    escapes = {"n": "\n", "\\": "\\", '"': '"'}
    found = []
    for word in re.findall(r'"((?:[^"\\]|\\.)*)"', value):
        plain = re.sub(r"\\(.)", lambda escape: escapes[escape[1]], word)
        assert not re.search(r"%(?!%)", plain.replace("%%", "")), f"a specifier in {value}"
        found.append(plain.replace("%%", "%"))
    return found


def arguments(value: str) -> list[str]:
    """The words of a command line, in which a dollar sign that is meant is written twice."""
    for word in words(value):
        assert "$" not in word.replace("$$", ""), f"a variable in {value}"
    return [word.replace("$$", "$") for word in words(value)]


def settings(unit: str, name: str) -> list[str]:
    """All values of a setting."""
    return [line.removeprefix(f"{name}=") for line in unit.splitlines() if line.startswith(f"{name}=")]


def end(folder: Path, name: str | None = None) -> None:
    """Ends the processes of a unit, or of all."""
    for path in folder.glob(f"pids/{name or '*'}"):
        with suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)
        path.unlink()


def main(folder: str, told: list[str]) -> None:
    """Does what it is told: `--user VERB [--now] [UNIT]`."""
    here = Path(folder)
    with (here / "told").open("a") as file:
        print(*told, file=file)
    if told[1] in ("restart", "disable"):
        end(here, told[-1])
    if told[1] == "restart":
        home = os.environ["HOME"]
        unit = (Path(home) / ".config/systemd/user" / told[-1]).read_text()
        env = {"HOME": home, "PATH": "/usr/bin:/bin"}
        env.update(words(value)[0].split("=", 1) for value in settings(unit, "Environment"))
        [before], [start] = settings(unit, "ExecStartPre"), settings(unit, "ExecStart")
        subprocess.run(arguments(before), env=env, check=True)
        command = arguments(start)
        if (here / "tag").exists():
            command = [f"--tag={(here / 'tag').read_text()}" if word.startswith("--tag=") else word for word in command]
        nothing = subprocess.DEVNULL
        process = subprocess.Popen(
            command, env=env, cwd="/", stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True
        )
        (here / "pids").mkdir(exist_ok=True)
        (here / "pids" / told[-1]).write_text(str(process.pid))
