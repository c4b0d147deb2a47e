"""`emberd status`: what it finds of a user's workers, and how it tells them."""

from __future__ import annotations

import json
import os
import re
import socket
from typing import TYPE_CHECKING, Any

import pytest

from support.fake import fake
from support.process import run
from support.worker import KEY, TAG, chat, worker

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def own(place: Path) -> dict[str, str]:
    """An environment in which all that is a user's own is in the test's folder."""
    for folder in ("run/emberd", "omp/run/tiny"):
        (place.parent / folder).mkdir(parents=True)
    names = ("PI_CONFIG_DIR", "XDG_STATE_HOME", "XDG_CACHE_HOME")
    cleared = {name: "" for name in names if name in os.environ}
    return {**cleared, "HOME": str(place.parent), "PI_CONFIG_DIR": "omp", "XDG_RUNTIME_DIR": str(place.parent / "run")}


def listed(home: Path, own: dict[str, str], *more: str | Path) -> list[dict[str, Any]]:
    done = run("status", "--json", *more, home=home, **own)
    assert (done.returncode, done.stderr) == (0, "")
    [(name, workers)] = json.loads(done.stdout).items()
    assert name == "workers"
    assert isinstance(workers, list)
    return workers


def test_no_workers_are_no_failure(place: Path, home: Path, own: dict[str, str]) -> None:
    done = run("status", home=home, **own)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith(f"no workers in {place.parent}/run/emberd, ")
    assert listed(home, own) == []


def test_workers_are_found_where_they_are_and_told_from_the_dead_and_from_others(
    place: Path, home: Path, own: dict[str, str]
) -> None:
    ours, theirs, dead = (
        place.parent / each for each in ("run/emberd/tiny.sock", "omp/run/tiny/x-onnx.sock", "omp/run/tiny/dead.sock")
    )
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(dead))
    (dead.parent / "x-onnx.sock.bind.lock").touch()
    # The other one takes whatever it does not know for work.
    with worker(ours, home=home) as one, fake(theirs, pings=True, answer=lambda peer, asked: peer.pong(asked)) as other:
        with one.connect() as client:
            before = client.ask({"type": "status", "id": 1})
            workers = listed(home, own)
        assert workers[1:] == [
            {"state": "dead", "socket": str(dead)},
            {"tag": "fake", "state": "unknown", "socket": str(theirs)},
        ]
        assert [request["type"] for request in other.requests] == ["ping"]
        found = workers[0]
        assert found.pop("uptime_ms") >= before["uptime_ms"]
        assert found.pop("memory_bytes") > 1 << 20
        assert found == {
            "key": KEY,
            "tag": TAG,
            "pid": one.process.pid,
            "model": before["model"],
            "state": "absent",
            "in_flight": 0,
            "connections": 2,
            "socket": str(ours),
            "counts": dict.fromkeys(
                [
                    *("completed", "incomplete", "failed", "cancelled", "refused", "queue_full"),
                    *("prompt_tokens", "cached_tokens", "output_tokens"),
                ],
                0,
            ),
        }
        with one.connect() as client:
            client.ask(chat(1))
            done = run("status", home=home, **own)
        assert (done.returncode, done.stderr) == (0, "")
        heading, *rows = done.stdout.splitlines()
        assert heading.split("  ")[0] == "KEY"
        assert re.fullmatch(rf"{KEY} +{TAG} +{one.process.pid} +\d+s +yes +0 +\d+\.\d MB +{ours}", rows[0]), rows[0]
        assert re.fullmatch(rf"- +- +- +- +dead +- +- +{dead}", rows[1]), rows[1]
        assert re.fullmatch(rf"- +fake +- +- +unknown +- +- +{theirs}", rows[2]), rows[2]


def test_a_folder_that_is_named_is_looked_into_and_must_be_there(place: Path, home: Path, own: dict[str, str]) -> None:
    at = place.with_name("here.sock")
    with worker(at, home=home) as one:
        assert listed(home, own) == []
        assert [each["pid"] for each in listed(home, own, "--dir", place.parent)] == [one.process.pid]
    done = run("status", "--dir", place.parent / "absent", home=home, **own)
    assert done.returncode == 1
    assert "could not look into" in done.stderr
    assert "hint: " in done.stderr
