"""`AsyncWorker`: the client for asyncio, and `run` for programs that use it.

Everything happens on the loop's own thread, except that a worker is started beside it.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from emberd.client.core import Client, News
from emberd.client.errors import ConnectionLost, ProtocolError, WorkerError, WorkerTimeout
from emberd.client.launch import Launch
from emberd.client.link import Deadline
from emberd.client.place import dial
from emberd.client.wire import Conversation, Message, Reply, Status, again

T = TypeVar("T")


class _Call:
    """One request of a task that waits."""

    def __init__(self, link: _Link, kind: str) -> None:
        self._link = link
        self._kind = kind
        self.replies: asyncio.Queue[Reply | WorkerError] = asyncio.Queue()
        self.number = ""

    async def reply(self, deadline: Deadline) -> Reply:
        try:
            async with asyncio.timeout(deadline.left()):
                reply = await self.replies.get()
        except TimeoutError:
            raise deadline.passed(f"the worker did not answer a {self._kind}") from None
        if isinstance(reply, WorkerError):
            raise reply
        return reply

    def drop(self) -> None:
        self._link.drop(self.number)


class _Link(asyncio.Protocol):
    """One connection of one loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._conversation = Conversation()
        self._unsent: deque[tuple[str, bytes]] = deque()
        self._paused = False
        self._ended: WorkerError | None = None
        self._transport: asyncio.Transport | None = None
        self.gone: asyncio.Future[None] = self._loop.create_future()
        """Done when the connection holds nothing any more."""

    @property
    def alive(self) -> bool:
        return self._ended is None and self._pid == os.getpid() and self._loop is asyncio.get_running_loop()

    def ask(self, kind: str, fields: Mapping[str, Any]) -> _Call:
        if self._ended is not None:
            raise again(self._ended)
        call = _Call(self, kind)
        call.number, line = self._conversation.ask(kind, fields, call.replies.put_nowait)
        self._unsent.append((call.number, line))
        self._send()
        return call

    def drop(self, number: str) -> None:
        unsent = [each for each in self._unsent if each[0] == number]
        for each in unsent:
            self._unsent.remove(each)
        self._conversation.drop(number, sent=not unsent)

    def close(self) -> None:
        self._end(ConnectionLost("this client was closed"))

    def leave(self) -> None:
        """Hangs up from another loop than the connection's own."""
        if self._pid == os.getpid() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.close)

    def _send(self) -> None:
        while self._unsent and not self._paused and self._transport is not None:
            self._transport.write(self._unsent.popleft()[1])

    def _end(self, error: WorkerError) -> None:
        if self._ended is None:
            self._ended = error
            self._unsent.clear()
            self._conversation.end(error)
            if self._transport is not None:
                self._transport.abort()

    # Called by the loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are none by their class.

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._send()

    def data_received(self, data: bytes) -> None:
        try:
            self._conversation.feed(data)
        except ProtocolError as error:
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None:
            self._end(ConnectionLost("the worker hung up"))
        else:
            self._end(ConnectionLost(f"the connection to the worker broke: {getattr(exc, 'strerror', None) or exc}"))
        if not self.gone.done():
            self.gone.set_result(None)


class AsyncWorker(Client[_Link]):
    """A worker, for asyncio: any number of tasks may call one `AsyncWorker` at once.

    Their requests share one connection and are answered in whatever order the work ends. The first call finds the worker, or starts one; so does the
    first call after a connection was lost. A client belongs to the loop that it is used in; used in another one, it connects anew.

        async with emberd.AsyncWorker("smollm2") as worker:
            print(await worker.chat([{"role": "user", "content": "What is the capital of France?"}]))
    """

    def _begin(self) -> None:
        self._link: _Link | None = None
        self._connecting: asyncio.Task[_Link] | None = None

    async def ping(self, *, timeout: float | None = None) -> str:
        """The worker's tag. As `Worker.ping`."""
        return await self._ping(timeout)

    async def status(self, *, timeout: float | None = None) -> Status:
        """What the worker is doing. As `Worker.status`."""
        return await self._status(timeout)

    async def load(self, progress: News | None = None, *, timeout: float | None = None) -> None:
        """Fetches the model if need be, and loads it. As `Worker.load`; `progress` is called in the loop and must not block."""
        await self._load(progress, timeout)

    async def chat(
        self,
        messages: Iterable[Message | Mapping[str, str]],
        *,
        prefill: str | None = None,
        stop: str | None = None,
        max_new_tokens: int = 256,
        timeout: float | None = None,
    ) -> str:
        """One greedy answer. As `Worker.chat`."""
        return await self._chat(messages, prefill, stop, max_new_tokens, timeout)

    async def shutdown(self, *, timeout: float | None = 5.0) -> None:
        """Ends the worker, whatever it is doing for whom. As `Worker.shutdown`."""
        await self._shutdown(timeout)

    async def close(self) -> None:
        """Hangs up. Calls that wait end with `ConnectionLost`, and no other may follow; the worker goes on."""
        self._closed = True
        if self._connecting is not None and _is_here(self._connecting.get_loop()):
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        if self._link is not None and _is_here(self._link.gone.get_loop()):
            self._link.close()
            await self._link.gone

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        await self.close()

    # What the core asks for.

    def _in_use(self) -> _Link | None:
        return self._link

    async def _ready(self, deadline: Deadline) -> _Link:
        if self._closed:
            raise self._is_closed()
        link = self._link
        if link is not None and link.alive:
            return link
        connecting = self._connecting
        if connecting is None or connecting.done() or not _is_here(connecting.get_loop()):
            if link is not None and not link.gone.done():
                link.leave()
            # A task of its own: those who wait for it may leave, and the others still get their connection.
            connecting = self._connecting = asyncio.create_task(self._connect(), name="emberd worker client")
            connecting.add_done_callback(_heard)
        try:
            async with asyncio.timeout(deadline.left()):
                return await asyncio.shield(connecting)
        except WorkerTimeout:
            raise
        except TimeoutError:
            raise deadline.passed("no worker was ready") from None
        except asyncio.CancelledError:
            if self._closed and connecting.cancelled():
                raise self._is_closed() from None
            raise

    async def _connect(self) -> _Link:
        link = await self._reach(Deadline(None))
        self._link = link
        return link

    async def _dial(self) -> _Link | None:
        connection = dial(self._settings.socket)
        if connection is None:
            return None
        try:
            _, link = await asyncio.get_running_loop().create_unix_connection(_Link, sock=connection)
        except BaseException:
            connection.close()
            raise
        return link

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _launch(self) -> Launch:
        return await asyncio.to_thread(Launch, self._settings)


def _is_here(loop: asyncio.AbstractEventLoop) -> bool:
    return loop is asyncio.get_running_loop()


def _heard(task: asyncio.Task[_Link]) -> None:
    """Takes note of a failure that nobody waited for: those who did have heard of it."""
    if not task.cancelled():
        task.exception()


def run(main: Coroutine[Any, Any, T], *, debug: bool | None = None) -> T:
    """Runs a program of `AsyncWorker`s, as `asyncio.run` does: on uvloop where that is installed (`pip install 'emberd[fast]'`), else on asyncio's loop.

    Raises whatever `main` raises, and `RuntimeError` when a loop runs in this thread already.
    """
    with asyncio.Runner(debug=debug, loop_factory=_loop_factory()) as runner:
        return runner.run(main)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
