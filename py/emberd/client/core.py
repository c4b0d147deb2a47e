"""What a client does, once for threads and asyncio: finds or starts its worker, asks, and asks again where that is safe.

The coroutines here wait for nothing but the methods that the two clients have each in its own way (`link`), so both run the same code.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from emberd.client.errors import (
    ConnectionLost,
    ProtocolError,
    RequestFailed,
    TagMismatch,
    WorkerError,
    WorkerNotStarted,
    WorkerTimeout,
)
from emberd.client.launch import Launch, Settings, settings
from emberd.client.link import Call, Deadline, Link
from emberd.client.place import check
from emberd.client.wire import Message, Progress, Reply, Status, failure, shown

FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.2
"""Seconds between two looks at a worker that is starting or ending; the pause grows."""
GOING = 5.0
"""Seconds that a worker may take to go when it is replaced."""

News = Callable[[Progress], object]
L = TypeVar("L", bound=Link)


class Client(ABC, Generic[L]):
    """What `Worker` and `AsyncWorker` have in common."""

    def __init__(
        self,
        model_key: str,
        *,
        socket: str | os.PathLike[str] | None = None,
        tag: str | None = None,
        model: str | os.PathLike[str] | None = None,
        spawn: bool = True,
        replace: bool = False,
        command: Sequence[str] | None = None,
        idle_timeout: float | None = None,
        connect_timeout: float = 3.0,
        start_timeout: float = 120.0,
        retries: int = 1,
    ) -> None:
        """A client of the worker for a model key. Nothing is connected or started before the first call.

        Args:
            model_key: The name under which the worker's clients know its model, such as `lfm2.5-230m`.
            socket: Where the worker listens. By default `<key>.sock` in this user's runtime folder, `$XDG_RUNTIME_DIR/emberd` or `emberd/run` in the
                cache folder, with `_` for what is not in `[A-Za-z0-9._-]`.
            tag: What tells this client's workers from others, compared exactly. A worker is started with it, and one that was started with another is
                refused with `TagMismatch`, or replaced. Without a tag, any worker that listens will do.
            model: The model behind the key, a name or a path, for a worker that this client starts; by default the worker's own choice. A worker that
                listens already keeps the model that it has: give a tag to tell them apart.
            spawn: Whether to start a worker when none listens.
            replace: Whether a worker with another tag is told to go, so that one with the right tag can be started. What it does for others is lost.
            command: The program that starts a worker and its first arguments, to which `--socket`, `--model-key`, `--tag` and the like are added; by
                default `python -m emberd worker` with the Python that runs this program.
            idle_timeout: Seconds without work after which a worker that this client starts ends itself; by default the worker's own 900.
            connect_timeout: Seconds in which a worker that listens must have answered its first ping.
            start_timeout: Seconds in which a worker that was started must have done so.
            retries: How often a call is made anew when the connection was lost before anything was answered to it. Every request but `shutdown` may be
                made twice: a ping or a load changes nothing the second time, and a chat, being greedy, says the same.

        Raises:
            WorkerError: On Windows, where workers are not supported, or when the path is too long for a socket.
            ValueError: For an empty key, or numbers that make no sense.

        """
        if sys.platform == "win32":
            raise WorkerError(
                "workers listen on Unix sockets, which Python does not support on Windows", "use Linux or macOS"
            )
        self._settings: Settings = settings(
            model_key,
            socket=socket,
            tag=tag,
            model=model,
            spawn=spawn,
            replace=replace,
            command=command,
            idle_timeout=idle_timeout,
            connect_timeout=connect_timeout,
            start_timeout=start_timeout,
            retries=retries,
        )
        check(self._settings.socket)
        self._closed = False
        self._begin()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings.model_key!r}, socket={str(self._settings.socket)!r})"

    @property
    def socket(self) -> str:
        """The path of the worker's socket."""
        return str(self._settings.socket)

    @property
    def log(self) -> str:
        """The path of the log of workers that this client starts."""
        return str(self._settings.log)

    def _is_closed(self) -> WorkerError:
        return WorkerError("this client was closed", "make another one")

    # What the two differ in.

    @abstractmethod
    def _begin(self) -> None:
        """Sets up what the client holds between its calls."""

    @abstractmethod
    async def _dial(self) -> L | None:
        """A new connection, not asked anything yet; `None` when nobody listens. Raises as `place.dial`."""

    @abstractmethod
    async def _pause(self, seconds: float) -> None:
        """Waits."""

    @abstractmethod
    async def _launch(self) -> Launch:
        """Starts a worker."""

    @abstractmethod
    async def _ready(self, deadline: Deadline) -> L:
        """The connection that is in use, or, as `_reach` has it, a new one for all calls that come meanwhile."""

    @abstractmethod
    def _in_use(self) -> L | None:
        """The connection that is in use, if there is one."""

    # Requests.

    async def _ask(
        self, kind: str, wanted: str, fields: Mapping[str, Any], timeout: float | None, news: News | None = None
    ) -> Reply:
        """The reply to a request, which is of the `wanted` type."""
        deadline = Deadline(timeout)
        left = self._settings.retries
        while True:
            link = await self._ready(deadline)
            call: Call | None = None
            answered = False
            try:
                call = link.ask(kind, fields)
                while (reply := await call.reply(deadline))["type"] == "progress":
                    answered = True
                    if news is not None:
                        news(Progress.of(reply))
                return _expect(wanted, reply)
            except ConnectionLost:
                if answered or left == 0 or self._closed:
                    raise
                left -= 1
            finally:
                if call is not None:
                    call.drop()

    async def _ping(self, timeout: float | None) -> str:
        return str((await self._ask("ping", "pong", {}, timeout)).get("tag", ""))

    async def _status(self, timeout: float | None) -> Status:
        # Whoever does not know the question answers the ping.
        reply = await self._ask("ping", "", {"status": True}, timeout)
        if reply["type"] == "pong":
            raise RequestFailed(
                "this worker does not tell its status", "it is another program's; start one of emberd's"
            )
        return Status.of(_expect("status", reply))

    async def _load(self, progress: News | None, timeout: float | None) -> None:
        await self._ask("load", "loaded", {}, timeout, progress)

    async def _chat(
        self,
        messages: Iterable[Message | Mapping[str, str]],
        prefill: str | None,
        stop: str | None,
        max_new_tokens: int,
        timeout: float | None,
    ) -> str:
        if isinstance(messages, str | bytes | Mapping):
            raise TypeError(f"messages are a list of {{'role': …, 'content': …}}, not {type(messages).__name__}")
        fields: dict[str, Any] = {"messages": [dict(message) for message in messages]}
        if prefill is not None:
            fields["prefill"] = prefill
        if stop is not None:
            fields["stop"] = stop
        reply = await self._ask("chat", "text", {**fields, "maxNewTokens": max_new_tokens}, timeout)
        if not isinstance(text := reply.get("text"), str):
            raise ProtocolError(f"the worker sent a text without one: {shown(reply)}")
        return text

    async def _shutdown(self, timeout: float | None) -> None:
        if self._closed:
            raise self._is_closed()
        deadline = Deadline(timeout)
        link = self._in_use()
        if link is None or not link.alive:
            found = await self._look(deadline.within(self._settings.connect_timeout))
            if found is None:
                return
            link, tag = found
            if self._settings.tag not in (None, tag):
                link.close()
                raise self._mismatch(tag)
        try:
            await self._dismiss(link, deadline)
        finally:
            link.close()

    async def _dismiss(self, link: L, deadline: Deadline) -> None:
        """Tells a worker to go, and waits until it has hung up."""
        try:
            call = link.ask("shutdown", {})
            try:
                _expect("no reply", await call.reply(deadline))
            finally:
                call.drop()
        except ConnectionLost:
            pass

    # Finding a worker, and starting one.

    async def _reach(self, deadline: Deadline) -> L:
        """A connection to a worker with the right tag; starts one if need be.

        Raises:
            TagMismatch: A worker with another tag listens, and is not to be replaced or does not go.
            WorkerNotStarted: None listens, and it is not to be started or did not come up.
            WorkerTimeout: One listens and says nothing, or the call's time is over.
            ProtocolError: What listens is no worker.

        """
        options = self._settings
        found = await self._look(deadline.within(options.connect_timeout))
        if found is not None:
            link = await self._right(*found, deadline)
            if link is not None:
                return link
        if not options.spawn:
            raise WorkerNotStarted(
                f"no worker listens on {options.socket}", "start one, or allow this client to: spawn=True"
            )
        launch = await self._launch()
        end, pause = Deadline(options.start_timeout), FIRST_PAUSE
        while True:
            # Asked before the look: one that ended because another was faster has seen that one listen, and so will the look.
            exit_code = launch.exit_code
            try:
                found = await self._look(deadline.within(min(options.connect_timeout, end.left() or 0.0)))
            except WorkerTimeout:
                found = None  # Busy, perhaps with starting.
            if found is not None:
                link = await self._right(*found, deadline)
                if link is not None:
                    return link
                # Another's worker was faster than ours, and has been told to go.
                launch = await self._launch()
                continue
            if exit_code is not None:
                ended = f"exited with code {exit_code}" if exit_code >= 0 else f"was ended by signal {-exit_code}"
                raise self._not_started(launch, f"the worker for {options.model_key} {ended}")
            if end.over:
                what = f"the worker for {options.model_key} did not answer on {options.socket} within {options.start_timeout:g} s"
                raise self._not_started(launch, what)
            if deadline.over:
                raise deadline.passed("no worker was ready")
            await self._pause(pause)
            pause = min(LONGEST_PAUSE, pause * 1.5)

    def _not_started(self, launch: Launch, what: str) -> WorkerNotStarted:
        error = WorkerNotStarted(what, f"its log is {self._settings.log}")
        error.log_tail = launch.tail()
        return error

    def _mismatch(self, tag: str) -> TagMismatch:
        expected = self._settings.tag or ""
        what = f"the worker on {self._settings.socket} has the tag {shown(tag)}, not {shown(expected)}"
        error = TagMismatch(what, "replace it with replace=True, or give this client a socket of its own")
        error.expected, error.found = expected, tag
        return error

    async def _look(self, deadline: Deadline) -> tuple[L, str] | None:
        """The worker that listens and its tag, or `None`. Raises `WorkerTimeout` when it says nothing."""
        silent = f"what listens on {self._settings.socket} did not answer a ping"
        while True:
            try:
                link = await self._dial()
                break
            except BlockingIOError:
                if deadline.over:
                    raise deadline.passed(silent) from None
                await self._pause(FIRST_PAUSE)
            except OSError as error:
                what = f"could not connect to {self._settings.socket}: {error.strerror}"
                raise WorkerError(what, "give another path as socket=, or more files to this process") from error
        if link is None:
            return None
        try:
            call = link.ask("ping", {})
            tag = _expect("pong", await call.reply(deadline)).get("tag")
        except ConnectionLost:
            return None  # It was about to go.
        except WorkerTimeout:
            link.close()
            raise deadline.passed(silent) from None
        except BaseException:
            link.close()
            raise
        return link, str(tag)

    async def _right(self, link: L, tag: str, deadline: Deadline) -> L | None:
        """The connection, if its worker has the right tag; if not and it is to be replaced, `None` once it has gone.

        Until then it is looked for and told again, as others may start the like of it.
        """
        options, end = self._settings, Deadline(GOING)
        try:
            while options.tag not in (None, tag):
                if not options.replace or end.over:
                    raise self._mismatch(tag)
                try:
                    await self._dismiss(link, deadline.within(end.left() or 0.0))
                except WorkerTimeout:
                    if deadline.over:
                        raise
                    raise self._mismatch(tag) from None
                link.close()
                await self._pause(FIRST_PAUSE)
                found = await self._look(deadline.within(options.connect_timeout))
                if found is None:
                    return None
                link, tag = found
        except BaseException:
            link.close()
            raise
        return link


def _expect(wanted: str, reply: Reply) -> Reply:
    """The reply, if it is of the wanted type; the empty one is any but an error."""
    if reply["type"] == "error":
        raise failure(reply)
    if wanted not in ("", reply["type"]):
        raise ProtocolError(f"the worker sent {shown(reply)} where {wanted} was due")
    return reply
