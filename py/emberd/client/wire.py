"""The line protocol of the worker door, without its socket: requests become lines, bytes become replies, and each reply finds whoever waits for it.

One JSON object a line in both directions, told apart by `type`; the `id` of a request comes back in its replies, in whatever order the work ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

from emberd.client.errors import ProtocolError, RequestFailed, WorkerError

LONGEST = 64 << 20
"""Bytes of a reply. The longest that a worker means to send is the text of one answer."""

Reply = dict[str, Any]
"""A reply as it came: `type`, `id` and what belongs to the type."""

Put = Callable[[Reply | WorkerError], None]
"""Where the replies to one request go, and the error that ends it; called in the order in which they come."""


class Message(TypedDict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Progress:
    """News of a load. What the worker did not say is `None`."""

    model_key: str
    """The key of the model that is being loaded."""
    status: str
    """`initiate`, `download`, `progress` (of a file), `progress_total` (of them all), `done` or `ready`."""
    name: str | None = None
    """The model or repository that the files belong to."""
    file: str | None = None
    """The file."""
    progress: float | None = None
    """Percent, 0 to 100."""
    loaded: int | None = None
    """Bytes that are here."""
    total: int | None = None
    """Bytes in all."""
    model: str | None = None
    """With `ready`: the model behind the key."""

    @classmethod
    def of(cls, reply: Reply) -> Progress:
        """Reads a `progress` reply. Raises `ProtocolError` when it holds no news."""
        event = reply.get("event")
        if not isinstance(event, dict) or not isinstance(event.get("status"), str):
            raise ProtocolError(f"the worker sent progress without an event: {shown(reply)}")
        known = {each: event.get(each) for each in ("name", "file", "progress", "loaded", "total", "model")}
        return cls(model_key=str(event.get("modelKey", "")), status=event["status"], **known)


@dataclass(frozen=True, slots=True)
class Status:
    """What a worker is doing."""

    key: str
    """The key under which clients know the model."""
    tag: str
    """The tag that the worker was started with."""
    pid: int
    """Its process id."""
    uptime_ms: int
    """How long it has been listening, in milliseconds."""
    model: str
    """The model behind the key."""
    state: str
    """`absent`, `loading`, `ready` or `failed`."""
    in_flight: int
    """Loads and chats, of all its clients, that it has yet to answer."""
    connections: int
    """Open connections, this one included."""
    memory_bytes: int | None
    """The resident memory of its process; `None` where its system does not tell."""

    @classmethod
    def of(cls, reply: Reply) -> Status:
        """Reads a `status` reply. Raises `ProtocolError` when something is missing."""
        try:
            return cls(**{field.name: reply[field.name] for field in fields(cls)})
        except KeyError as error:
            raise ProtocolError(f"the worker sent a status without {error}: {shown(reply)}") from None


def failure(reply: Reply) -> RequestFailed:
    """The error of an `error` reply: `what happened (hint: what to do)`."""
    text = str(reply.get("error") or "the worker gave no reason")
    found = re.fullmatch(r"(.*?) \(hint: (.*)\)", text, re.DOTALL)
    return RequestFailed(found[1], found[2]) if found else RequestFailed(text)


def shown(what: object) -> str:
    """A value for a message: as it came, but not as long as it came."""
    text = repr(what)
    return text if len(text) <= 200 else f"{text[:200]}…"


def again(error: WorkerError) -> WorkerError:
    """The same error for one more to raise: each has its own traceback."""
    return type(error)(error.message, error.hint)


class Conversation:
    """What was asked on one connection and has not been answered. Not thread-safe: whoever shares one locks it."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._number = 0
        self._waiting: dict[str, tuple[int, Put]] = {}
        self._late: dict[str, int] = {}
        """Requests that nobody waits for any more, with the lengths of their lines."""

    def ask(self, kind: str, more: Mapping[str, Any], put: Put) -> tuple[str, bytes]:
        """A request's `id` and its line; what is answered goes to `put`. Raises `TypeError` or `ValueError` for what JSON cannot say."""
        number = str(self._number + 1)
        # Escaped, a text that is not Unicode (half a surrogate pair) can be sent as well.
        line = (
            json.dumps({"type": kind, "id": number, **more}, separators=(",", ":"), allow_nan=False).encode("ascii")
            + b"\n"
        )
        self._number += 1
        self._waiting[number] = (len(line), put)
        return number, line

    def drop(self, number: str, *, sent: bool = True) -> None:
        """Nobody waits for this request any more. `sent` is false when its line never left, so that no reply will come."""
        length, _ = self._waiting.pop(number, (0, None))
        if length and sent:
            self._late[number] = length

    def feed(self, data: bytes) -> None:
        """Takes bytes as they came and hands out the replies that are whole. Raises `ProtocolError` for what is no reply."""
        self._rest += data
        if b"\n" in data:
            *lines, rest = self._rest.split(b"\n")
            self._rest = rest
            for line in lines:
                self._take(line)
        if len(self._rest) > LONGEST:
            raise ProtocolError(f"the worker sent {len(self._rest)} bytes without a newline")

    def _take(self, line: bytearray) -> None:
        if not line.strip():
            return
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            raise ProtocolError(f"the worker sent a line that is not JSON: {shown(bytes(line))}") from None
        if not isinstance(reply, dict) or not isinstance(reply.get("type"), str):
            raise ProtocolError(f"the worker sent a line that is no reply: {shown(bytes(line))}")
        number = reply.get("id")
        if number is None and reply["type"] == "error":
            number = self._unread()
        if reply["type"] == "progress":
            _, put = self._waiting.get(number, (0, None)) if isinstance(number, str) else (0, None)
        else:
            _, put = self._waiting.pop(number, (0, None)) if isinstance(number, str) else (0, None)
            self._late.pop(str(number), None)
        if put is not None:
            put(reply)

    def _unread(self) -> str | None:
        """The request that an error without an `id` is about. Lines of ours are always JSON, so it was too long to be read: the longest."""
        lengths = {**self._late, **{number: length for number, (length, _) in self._waiting.items()}}
        return max(lengths, key=lengths.__getitem__, default=None)

    def end(self, error: WorkerError) -> None:
        """The connection is over: whatever waits hears of it."""
        waiting, self._waiting = self._waiting, {}
        self._late.clear()
        for _, put in waiting.values():
            put(again(error))
