"""Keys and limits through the whole process: where keys come from, who refuses to start without them, and that they show up nowhere."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest

from support.process import DEADLINE, run
from support.serve import server

if TYPE_CHECKING:
    from pathlib import Path

KEY = "sk-never-to-be-seen"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def status(port: int, path: str, **headers: str) -> int:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_key_of_the_environment_is_asked_for_and_shown_nowhere(home: Path) -> None:
    with server("--log", "trace", home=home, EMBERD_API_KEY=KEY) as one:
        assert status(one.port, "/v1/models") == 401
        assert status(one.port, "/v1/models", authorization=f"Bearer {KEY}") == 200
        assert status(one.port, "/v1/models", **{"x-api-key": KEY}) == 200
        assert status(one.port, "/health") == 200
        told = run("chat", "--url", f"http://127.0.0.1:{one.port}", "hi", home=home, EMBERD_API_KEY=KEY)
        assert told.returncode == 0, told.stderr
        refused = run("chat", "--url", f"http://127.0.0.1:{one.port}", "hi", home=home)
        assert refused.returncode == 1
        assert "the request brings no API key" in refused.stderr
    assert KEY not in told.stdout + told.stderr
    assert KEY not in one.process.said()


def test_keys_of_a_file_let_other_machines_in(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# mine\n{KEY}\nsecond\n")
    path.chmod(0o644)
    arguments = ("serve", "--host", "0.0.0.0", "--port", "0", "--engine", "mock", "--api-key-file", str(path))
    done = run(*arguments, home=home)
    assert done.returncode == 1
    assert "others than its owner may use it (mode 0644)" in done.stderr
    assert "hint: chmod 600" in done.stderr
    assert KEY not in done.stderr
    path.chmod(0o600)
    with server("--host", "0.0.0.0", "--api-key-file", str(path), home=home) as one:
        assert status(one.port, "/v1/models", authorization="Bearer second") == 200
        assert status(one.port, "/v1/models") == 401


def test_a_variable_without_a_key_refuses_to_start(home: Path) -> None:
    done = run("serve", "--port", "0", "--engine", "mock", home=home, EMBERD_API_KEY="")
    assert done.returncode == 1
    assert "EMBERD_API_KEY is set, and holds no key" in done.stderr


def test_help_shows_no_key(home: Path) -> None:
    done = run("serve", "--help", home=home, EMBERD_API_KEY=KEY)
    assert "--api-key-file" in done.stdout
    assert KEY not in done.stdout


def test_every_page_without_a_key_is_warned_about(home: Path) -> None:
    with server("--cors-origin", "*", home=home) as one:
        assert status(one.port, "/v1/models", origin="http://a.example") == 200
        one.process.logged("every web page that a browser on this machine opens can use this server")
