"""`Worker`: the client for programs of threads.

A connection has one thread that reads and writes; callers put lines into its queue and wait for replies on queues of their own. So a caller that is
interrupted or out of time leaves no half line behind, and no reply that another one reads.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self

from emberd.client.core import Client, News
from emberd.client.errors import ConnectionLost, ProtocolError, WorkerError
from emberd.client.launch import Launch
from emberd.client.link import Deadline, at_once
from emberd.client.place import dial
from emberd.client.wire import Conversation, Message, Reply, Status, again

READ = 1 << 18
"""Bytes read at once."""
LONGEST_WAIT = 0.5
"""Seconds that a caller waits before it looks about. An interrupt (Ctrl-C) that comes in the instant before a wait begins is only seen when that ends."""

_fork = threading.Lock()
"""Held while a client makes itself at home in a forked process."""


def _forked() -> None:
    global _fork
    _fork = threading.Lock()  # Whoever held the old one is not in this process.


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _wait(deadline: Deadline) -> float:
    left = deadline.left()
    return LONGEST_WAIT if left is None else min(left, LONGEST_WAIT)


class _Call:
    """One request of a caller that waits in its own thread."""

    def __init__(self, link: _Link, kind: str) -> None:
        self._link = link
        self._kind = kind
        self.replies: SimpleQueue[Reply | WorkerError] = SimpleQueue()
        self.number = ""

    async def reply(self, deadline: Deadline) -> Reply:
        while True:
            try:
                reply = self.replies.get(timeout=_wait(deadline))
            except Empty:
                if deadline.over:
                    raise deadline.passed(f"the worker did not answer a {self._kind}") from None
                continue
            if isinstance(reply, WorkerError):
                raise reply
            return reply

    def drop(self) -> None:
        self._link.drop(self.number)


class _Link:
    """One connection, and the thread that serves it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._awake, self._waker = socket.socketpair()
        for each in (self._awake, self._waker):
            each.setblocking(False)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._conversation = Conversation()
        self._unsent: deque[tuple[str, bytes]] = deque()
        self._ended: WorkerError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="emberd worker client", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._let_go()
            raise

    @property
    def alive(self) -> bool:
        return self._ended is None and self._pid == os.getpid()

    def ask(self, kind: str, fields: Mapping[str, Any]) -> _Call:
        call = _Call(self, kind)
        with self._lock:
            if self._ended is not None:
                raise again(self._ended)
            call.number, line = self._conversation.ask(kind, fields, call.replies.put)
            self._unsent.append((call.number, line))
            self._wake()
        return call

    def drop(self, number: str) -> None:
        with self._lock:
            unsent = [each for each in self._unsent if each[0] == number]
            for each in unsent:
                self._unsent.remove(each)
            self._conversation.drop(number, sent=not unsent)

    def close(self) -> None:
        if self._pid != os.getpid():
            self._let_go()
            return
        with self._lock:
            self._closing = True
            if self._ended is None:
                self._wake()
        self._thread.join()

    def abandon(self) -> None:
        """As `close`, for the garbage collector, which may run in any thread at any point: waits neither for a lock nor for the thread."""
        if self._pid != os.getpid():
            self._let_go()
            return
        self._closing = True
        # Where the lock is held, it is by the connection's own thread, which looks at `_closing` before it sleeps.
        if self._lock.acquire(blocking=False):
            try:
                if self._ended is None:
                    self._wake()
            finally:
                self._lock.release()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # It has yet to look at many wake-ups before this one.
            self._waker.send(b"\0")

    def _let_go(self) -> None:
        """Closes this process's handles on the connection, which for another process may go on."""
        for each in (self._socket, self._awake, self._waker):
            each.close()

    # The thread.

    def _run(self) -> None:
        error: WorkerError = ConnectionLost("a fault in the client's own thread")
        try:
            with selectors.DefaultSelector() as selector:
                error = self._serve(selector)
        except ProtocolError as fault:
            error = fault
        except OSError as fault:
            error = ConnectionLost(f"the connection to the worker broke: {fault.strerror}")
        finally:
            with self._lock:
                self._ended = error
                self._unsent.clear()
                self._conversation.end(error)
                self._let_go()

    def _serve(self, selector: selectors.BaseSelector) -> WorkerError:
        """Reads and writes until the end; returns what it was."""
        selector.register(self._awake, selectors.EVENT_READ)
        selector.register(self._socket, selectors.EVENT_READ)
        line, wanted = memoryview(b""), selectors.EVENT_READ
        heard = True
        while True:
            if not line and heard:
                line = self._next()
            wanting = selectors.EVENT_READ | (selectors.EVENT_WRITE if line else 0)
            if wanting != wanted:
                selector.modify(self._socket, wanting)
                wanted = wanting
            if self._closing:
                return ConnectionLost("this client was closed")
            for key, events in selector.select():
                if key.fileobj is self._awake:
                    self._awake.recv(READ)
                    continue
                if events & selectors.EVENT_READ:
                    data = self._socket.recv(READ)
                    if not data:
                        return ConnectionLost("the worker hung up")
                    with self._lock:
                        self._conversation.feed(data)
                if events & selectors.EVENT_WRITE:
                    try:
                        line = line[self._socket.send(line) :]
                    except BlockingIOError:
                        pass
                    except (BrokenPipeError, ConnectionResetError):
                        # It hears no more, but what it said before is still to be read, up to its end.
                        line, heard = memoryview(b""), False

    def _next(self) -> memoryview:
        with self._lock:
            return memoryview(self._unsent.popleft()[1] if self._unsent else b"")


class Worker(Client[_Link]):
    """A worker, for programs of threads: any number of them may call one `Worker` at once.

    Their requests share one connection and are answered in whatever order the work ends. The first call finds the worker, or starts one; so does the
    first call after a connection was lost. In a forked process the client connects anew.

        with emberd.Worker("smollm2") as worker:
            print(worker.chat([{"role": "user", "content": "What is the capital of France?"}]))
    """

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._link: _Link | None = None
        self._finalizer: weakref.finalize[[], Worker] | None = None
        self._connecting = threading.Lock()
        self._closing = threading.Event()

    def ping(self, *, timeout: float | None = None) -> str:
        """The worker's tag. Starts the worker if need be, and loads nothing.

        Args:
            timeout: Seconds for the whole call, the start of a worker included; `None` leaves it at `connect_timeout` and `start_timeout` and, once
                connected, no limit.

        Raises:
            WorkerError: One of its kinds, as described in `emberd.client.errors`.

        """
        return at_once(self._ping(timeout))

    def status(self, *, timeout: float | None = None) -> Status:
        """What the worker is doing. Asking neither loads the model nor keeps an idle worker.

        Raises:
            RequestFailed: The worker is of another make and does not tell.
            WorkerError: As `ping`.

        """
        return at_once(self._status(timeout))

    def load(self, progress: News | None = None, *, timeout: float | None = None) -> None:
        """Fetches the model if need be, and loads it. Returns when it is ready, at once if it is already.

        Args:
            progress: Called with a `Progress` for each piece of news, in the thread that calls `load`. Of several who load at the same time, the one
                who came first hears of the download.
            timeout: As in `ping`. The load goes on in the worker when it is over.

        Raises:
            RequestFailed: The model could not be fetched or loaded.
            WorkerError: As `ping`.

        """
        at_once(self._load(progress, timeout))

    def chat(
        self,
        messages: Iterable[Message | Mapping[str, str]],
        *,
        prefill: str | None = None,
        stop: str | None = None,
        max_new_tokens: int = 256,
        timeout: float | None = None,
    ) -> str:
        """One greedy answer, without thinking. Loads the model first if need be.

        Args:
            messages: The conversation: `{"role": "system" | "user" | "assistant" | "developer", "content": text}`, in any order, perhaps none.
            prefill: Text that the answer is made to begin with; it is not part of what is returned.
            stop: The answer ends with this text, which is part of what is returned.
            max_new_tokens: The longest answer, in tokens; one that is longer is cut.
            timeout: As in `ping`. The worker goes on until the answer's end when it is over, and the answer is dropped.

        Returns:
            What the model said.

        Raises:
            RequestFailed: The request is at fault, or the model could not be loaded, or too much is waiting already.
            TypeError: For messages that are none.
            WorkerError: As `ping`.

        """
        return at_once(self._chat(messages, prefill, stop, max_new_tokens, timeout))

    def shutdown(self, *, timeout: float | None = 5.0) -> None:
        """Ends the worker, whatever it is doing for whom, and waits until it has hung up. Where none listens, there is nothing to do.

        Raises:
            TagMismatch: It is another's worker.
            WorkerTimeout: It has not hung up in time.

        """
        self._own()
        at_once(self._shutdown(timeout))

    def close(self) -> None:
        """Hangs up. Calls that wait end with `ConnectionLost`, and no other may follow; the worker goes on."""
        self._closed = True
        self._closing.set()
        self._own()
        if self._link is not None:
            self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.close()

    # What the core asks for.

    def _own(self) -> None:
        """In a forked process, leaves the parent's connection to the parent."""
        if self._pid == os.getpid():
            return
        with _fork:
            if self._pid != os.getpid():
                link = self._link
                self._link, self._connecting, self._closing = None, threading.Lock(), threading.Event()
                if link is not None:
                    link.close()
                self._pid = os.getpid()

    def _in_use(self) -> _Link | None:
        return self._link

    async def _ready(self, deadline: Deadline) -> _Link:
        self._own()
        link = self._link
        if self._closed:
            raise self._is_closed()
        if link is not None and link.alive:
            return link
        while not self._connecting.acquire(timeout=_wait(deadline)):
            if deadline.over:
                raise deadline.passed("no worker was ready")
        try:
            link = self._link
            if link is None or not link.alive:
                link = await self._reach(deadline)
                if self._finalizer is not None:
                    self._finalizer.detach()
                self._link = link
                self._finalizer = weakref.finalize(self, link.abandon)
                self._finalizer.atexit = False
                if self._closed:
                    link.close()
            return link
        finally:
            self._connecting.release()

    async def _dial(self) -> _Link | None:
        connection = dial(self._settings.socket)
        if connection is None:
            return None
        try:
            return _Link(connection)
        except BaseException:
            connection.close()
            raise

    async def _pause(self, seconds: float) -> None:
        if self._closing.wait(seconds):
            raise self._is_closed()

    async def _launch(self) -> Launch:
        return Launch(self._settings)
