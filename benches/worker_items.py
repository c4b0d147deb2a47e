"""The benchmarks of the worker door with a real model, (f): how long a title takes, from every state a worker can be in.

The peer is a plain worker with one queue (`peers/plain_worker.py`), on the same model folder with the same threads.
"""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from harness import ROOT, BenchError, Tools, serving
from items import Figures, Options, Row, alternate, compare, find_folder

JOBS, JOB_TOKENS = 8, 160
"""Long jobs that one other program has under way, and the length of each in tokens."""

TITLES = 100
"""Titles, one after the other, whose latency is measured in a round."""

SYSTEM = "Write a short title, of at most six words, for the conversation that begins with this message."
MESSAGES = (
    "Please fix the login page: after OAuth it redirects forever between /login and /callback",
    "Why does the nightly backup job run twice since we moved to the new scheduler?",
    "Add a dark theme to the settings screen, and remember the choice",
)


class Connection:
    """A client of a worker."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(600)
        self._socket.connect(path)
        self._file = self._socket.makefile("rb")

    def send(self, *messages: dict[str, Any]) -> None:
        """Says all of it at once."""
        self._socket.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in messages))

    def answer(self) -> dict[str, Any]:
        """The next reply that is no news of a load."""
        while line := self._file.readline():
            reply: dict[str, Any] = json.loads(line)
            if reply["type"] == "error":
                raise BenchError(f"a worker answered: {reply['error']}")
            if reply["type"] != "progress":
                return reply
        raise BenchError("a worker hung up")

    def close(self) -> None:
        """Hangs up."""
        self._file.close()
        self._socket.close()


def title(number: int) -> dict[str, Any]:
    """The request for a title that a coding agent makes."""
    user = f"<user>\n{MESSAGES[number % len(MESSAGES)]}\n</user>"
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
    return {
        "type": "chat",
        "id": str(number),
        "messages": messages,
        "prefill": "<title>",
        "stop": "</title>",
        "maxNewTokens": 20,
    }


def job(number: int) -> dict[str, Any]:
    """A long job."""
    text = f"Write a long story, number {number}, about a lighthouse keeper and the sea."
    return {
        "type": "chat",
        "id": f"job{number}",
        "messages": [{"role": "user", "content": text}],
        "maxNewTokens": JOB_TOKENS,
    }


def timed(ask: Callable[[], object]) -> float:
    """Milliseconds that it takes."""
    start = time.perf_counter()
    ask()
    return (time.perf_counter() - start) * 1000


def one_title(connection: Connection, number: int) -> float:
    """Milliseconds from request to text."""

    def ask() -> None:
        connection.send(title(number))
        connection.answer()

    return timed(ask)


def connected(process: subprocess.Popen[bytes], path: str) -> Connection:
    """A connection to a worker that has just been started, as soon as it listens. Tried every 0.5 ms, which is less than is measured."""
    end = time.perf_counter() + 60
    while True:
        try:
            return Connection(path)
        except OSError:
            if process.poll() is not None or time.perf_counter() > end:
                raise BenchError(f"{process.args!r} does not listen") from None
            time.sleep(0.0005)


def from_nothing(command: Sequence[str], path: str) -> Figures:
    """Starts a worker and asks it at once, as a client does that has just spawned it: ping, then a title."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        connection = connected(process, path)
        connection.send({"type": "ping", "id": "probe"})
        connection.answer()
        pong = (time.perf_counter() - start) * 1000
        connection.send(title(0))
        connection.answer()
        first = (time.perf_counter() - start) * 1000
        connection.close()
    finally:
        process.kill()
        process.wait()
        Path(path).unlink(missing_ok=True)
    return {"pong": pong, "title": first}


def warm(path: str) -> Figures:
    """Titles one after the other, with the worker to themselves."""
    connection = Connection(path)
    one_title(connection, 0)
    times = sorted(one_title(connection, number) for number in range(TITLES))
    connection.close()
    return {"p50": median(times), "p99": times[-1 - TITLES // 100], "slowest": times[-1]}


def beside_jobs(path: str) -> Figures:
    """Titles one after the other for as long as the long jobs of another connection go on; at least one."""
    busy, connection = Connection(path), Connection(path)
    busy.send(*(job(number) for number in range(JOBS)))
    done = threading.Event()
    took: list[float] = []

    def wait() -> None:
        try:
            took.append(timed(lambda: [busy.answer() for _ in range(JOBS)]))
        finally:
            done.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    times: list[float] = []
    while not done.is_set():
        times.append(one_title(connection, len(times)))
    waiter.join()
    if not took:
        raise BenchError("the long jobs were not answered")
    times.sort()
    busy.close()
    connection.close()
    return {"p50": median(times), "slowest": times[-1], "jobs": took[0], "share": times[-1] / took[0]}


def titles(tools: Tools, options: Options) -> Iterator[Row]:
    """(f) Titles by the worker door, against a plain worker with one queue on the same model and threads."""
    folder = options.folder or find_folder(options.model)
    threads = str(options.threads)
    with tempfile.TemporaryDirectory() as place:
        ours, peer = f"{place}/ours", f"{place}/peer"
        command = [*tools.emberd, "worker", "--socket", ours, "--model-key", "bench", "--tag", "bench"]
        command += ["--model", str(folder), "--engine", "onnx", "--threads", threads]
        # The same three messages come again and again: with what is kept of them, little but their answers would be left.
        command += ["--cache-bytes", "0"]
        plain = [tools.python, str(ROOT / "benches/peers/plain_worker.py"), "--socket", peer]
        plain += ["--folder", str(folder), "--threads", threads]
        pairs = alternate(options.rounds, partial(from_nothing, command, ours), partial(from_nothing, plain, peer))
        yield compare("start to first pong", pairs, lambda each: each["pong"], "ms")
        yield compare("start to first title, weights cached", pairs, lambda each: each["title"], "ms")
        with serving(command) as first, serving(plain) as second:
            first.await_line("(listening on)")
            second.await_line("(listening on)")
            pairs = alternate(options.rounds, partial(warm, ours), partial(warm, peer))
            yield compare("title, warm, p50", pairs, lambda each: each["p50"], "ms")
            yield compare("title, warm, p99", pairs, lambda each: each["p99"], "ms")
            pairs = alternate(options.rounds, partial(beside_jobs, ours), partial(beside_jobs, peer))
            beside = f"beside {JOBS} jobs of {JOB_TOKENS} tokens"
            yield compare(f"title {beside}, p50", pairs, lambda each: each["p50"], "ms")
            yield compare(f"title {beside}, slowest", pairs, lambda each: each["slowest"], "ms")
            yield compare("those jobs together", pairs, lambda each: each["jobs"], "ms")
            share = median(each["share"] for each, _ in pairs)
            what = "slowest title, of the jobs' time"
            yield Row(what, f"{share:.1%}", f"{median(each['share'] for _, each in pairs):.1%}")
