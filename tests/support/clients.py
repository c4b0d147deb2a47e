"""The two clients under one face, so that a test holds for both, and an end for every worker that they start."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

import emberd
from support.process import DEADLINE, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

KINDS = ["threads", "asyncio", "uvloop"]


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self, factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self.loop = factory()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(DEADLINE)

    def close(self) -> None:
        self.run(self.loop.shutdown_default_executor())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(DEADLINE)
        self.loop.close()


class Blocking:
    """An `AsyncWorker` that is called as a `Worker` is."""

    def __init__(self, loop: Loop, *arguments: Any, **options: Any) -> None:
        self._loop = loop
        self.worker = emberd.AsyncWorker(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.worker, name)
        if not callable(value):
            return value
        return lambda *arguments, **options: self._loop.run(value(*arguments, **options))


@contextmanager
def callers(count: int | None = None) -> Iterator[ThreadPoolExecutor]:
    """Threads for calls that wait. A test that fails does not wait for them: they end with what they wait for."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def clients(kind: str) -> Iterator[Callable[..., Any]]:
    """What makes clients of a kind; they are closed when the block ends."""
    made: list[Any] = []
    loop = None if kind == "threads" else Loop(asyncio.new_event_loop if kind == "asyncio" else uvloop.new_event_loop)

    def make(*arguments: Any, **options: Any) -> Any:
        client = emberd.Worker(*arguments, **options) if loop is None else Blocking(loop, *arguments, **options)
        made.append(client)
        return client

    try:
        yield make
    finally:
        for each in made:
            each.close()
        if loop is not None:
            loop.close()


def workers(folder: Path) -> list[int]:
    """The processes that were told to use a socket in this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue  # It has ended meanwhile.
            if f"\0{folder}/".encode() in line:
                found.append(int(entry.name))
    return found


def end(folder: Path) -> None:
    """Ends them, and waits until they are gone."""
    for pid in workers(folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    eventually(lambda: not workers(folder), "all workers have ended")
