"""The client of the engine's benchmarks and of the soak: many requests at once, over connections of their own.

While answers come in nothing is read of them: each piece is kept with the time it came at, and taken apart when all are
whole. So the client takes next to nothing of the cores that a server computes on; how much, each run tells. It speaks
the Responses API (`/v1/responses`) and chat completions (`/v1/chat/completions`), as JSON and as server-sent events.
What is asked, and what of it counts, is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, TypeVar, cast

import uvloop

from harness import BenchError

Json = dict[str, Any]
Result = TypeVar("Result")

TIMEOUT = 300.0
"""Seconds an answer may take to its end."""

TERMINAL = ("response.completed", "response.incomplete")


@dataclass
class Answer:
    """What came back for one request, and when. Times are seconds of `time.perf_counter`."""

    status: int
    sent: float
    done: float
    """When the last byte came."""
    whole: bool
    """Whether the body came to its end."""
    events: list[tuple[float, Json]] = field(default_factory=list)
    """The data of each server-sent event with the time of its last byte; `[DONE]` is left out."""
    body: Json = field(default_factory=dict)
    """The object of an answer that is not streamed."""

    @property
    def deltas(self) -> list[float]:
        """When text came."""
        return [at for at, event in self.events if delta(event)]

    @property
    def first(self) -> float:
        """Seconds from the request to the first text."""
        if not (deltas := self.deltas):
            raise BenchError(f"an answer has no text: {self.told()}")
        return deltas[0] - self.sent

    @property
    def usage(self) -> tuple[int, int, int]:
        """Tokens of the prompt, of these the ones that were cached, and tokens of the answer, as the server counts them."""
        for event in [*(event for _, event in reversed(self.events)), self.body]:
            usage = (event.get("response") or event).get("usage")
            if usage and "output_tokens" in usage:
                return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]
            if usage:
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                return usage["prompt_tokens"], cached, usage["completion_tokens"]
        raise BenchError(f"an answer has no usage: {self.told()}")

    def told(self) -> str:
        """The answer in a few words, for an error."""
        last = json.dumps(self.events[-1][1] if self.events else self.body)
        return (
            f"status {self.status}, {len(self.events)} events, {'' if self.whole else 'cut short, '}last {last[:500]}"
        )


def delta(event: Json) -> bool:
    """Whether an event brings text."""
    if event.get("type") == "response.output_text.delta":
        return True
    choices = event.get("choices")
    return bool(choices and choices[0].get("delta", {}).get("content"))


def gaps(answer: Answer, begin: float = 0.0, end: float = float("inf")) -> list[float]:
    """Seconds between texts of an answer that follow each other, where the later one came in `begin..end`."""
    return [later - earlier for earlier, later in pairwise(answer.deltas) if begin <= later <= end]


def request(address: str, path: str, body: Json) -> bytes:
    """The bytes of a POST that asks for the connection to be closed after the answer."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


class _Exchange(asyncio.Protocol):
    """One request on a connection of its own. With `leave` the client hangs up after so many pieces of the answer."""

    def __init__(self, message: bytes, leave: int | None) -> None:
        self.ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.pieces: list[tuple[float, bytes]] = []
        self.sent = 0.0
        self._message, self._leave = message, leave
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.sent = time.perf_counter()
        self._transport.write(self._message)
        if self._leave == 0:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))
        if self._leave is not None and len(self.pieces) >= self._leave:
            self._transport.abort()

    def connection_lost(self, fault: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def ask(
    address: str, path: str, body: Json, leave: int | None = None, until: asyncio.Event | None = None
) -> Answer:
    """Sends one request and waits for its whole answer, or until the client hangs up: after `leave` pieces, or with `until`.

    Raises `BenchError` when it takes longer than `TIMEOUT`.
    """
    host, port = address.rsplit(":", 1)
    message = request(address, path, body)
    loop = asyncio.get_running_loop()
    transport, exchange = await loop.create_connection(lambda: _Exchange(message, leave), host, int(port))
    signal = asyncio.ensure_future(until.wait()) if until is not None else None
    waits = {exchange.ended} if signal is None else {exchange.ended, signal}
    try:
        done, _ = await asyncio.wait(waits, timeout=TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
    finally:
        transport.abort()
        if signal is not None:
            signal.cancel()
    if not done:
        raise BenchError(f"{address} has not ended an answer after {TIMEOUT:g} s")
    return read(exchange.sent, exchange.pieces)


def read(sent: float, pieces: Sequence[tuple[float, bytes]]) -> Answer:
    """Takes an answer apart. Each piece is the time it came at, and its bytes."""
    raw = b"".join(data for _, data in pieces)
    ends = list(accumulate(len(data) for _, data in pieces))
    head, found, _ = raw.partition(b"\r\n\r\n")
    if not found:
        return Answer(0, sent, pieces[-1][0] if pieces else sent, False)
    lines = head.decode("latin-1").lower().split("\r\n")
    fields = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
    status, start = int(lines[0].split(" ")[1]), len(head) + 4
    if fields.get("transfer-encoding") == "chunked":
        chunks, whole = _chunks(raw, start)
    else:
        chunks = [(len(raw), raw[start:])]
        whole = len(raw) - start == int(fields.get("content-length", len(raw) - start))
    answer = Answer(status, sent, pieces[-1][0], whole)
    payload = b"".join(data for _, data in chunks)
    if not fields.get("content-type", "").startswith("text/event-stream"):
        if whole:
            answer.body = json.loads(payload)
        return answer
    covered = list(accumulate(len(data) for _, data in chunks))
    for end, data in _events(payload):
        chunk = bisect_left(covered, end)
        at = bisect_left(ends, chunks[chunk][0] - (covered[chunk] - end))
        answer.events.append((pieces[at][0], data))
    return answer


def _chunks(raw: bytes, at: int) -> tuple[list[tuple[int, bytes]], bool]:
    """The chunks of a body from `at` on, each with the place in `raw` where it ends, and whether the last one came."""
    chunks: list[tuple[int, bytes]] = []
    while True:
        line = raw.find(b"\r\n", at)
        if line < 0:
            return chunks, False
        size = int(raw[at:line].split(b";")[0], 16)
        if size == 0:
            return chunks, raw.endswith(b"\r\n\r\n")
        end = line + 2 + size
        if end > len(raw):
            return chunks, False
        chunks.append((end, raw[line + 2 : end]))
        at = end + 2


def _events(payload: bytes) -> Iterator[tuple[int, Json]]:
    """The data of whole events, each with the place in `payload` where the event ends."""
    at = 0
    while (end := payload.find(b"\n\n", at)) >= 0:
        for line in payload[at:end].splitlines():
            if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                yield end + 2, json.loads(data)
        at = end + 2


@dataclass
class Run:
    """The answers to requests that some clients sent, each client's in order, and what the client itself took."""

    clients: list[list[Answer]]
    seconds: float
    """From the first request to the end of the last answer."""
    busy: float
    """Processor seconds of this process, in all its threads."""

    @property
    def answers(self) -> list[Answer]:
        """All answers."""
        return [answer for answers in self.clients for answer in answers]

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(answer.usage[2] for answer in self.answers)


def run(task: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Runs a coroutine to its end."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(task())


async def clients(send: Callable[[Json], Awaitable[Answer]], bodies: Sequence[Sequence[Json]]) -> Run:
    """So many clients at once, each sending its requests one after the other. Raises where one isn't answered whole."""

    async def client(own: Sequence[Json]) -> list[Answer]:
        return [await send(body) for body in own]

    used = time.process_time()
    done = await asyncio.gather(*(client(own) for own in bodies))
    busy = time.process_time() - used
    everything = [answer for answers in done for answer in answers]
    for answer in everything:
        if answer.status != 200 or not answer.whole:
            raise BenchError(f"a request was not answered: {answer.told()}")
    seconds = max(answer.done for answer in everything) - min(answer.sent for answer in everything)
    return Run(done, seconds, busy)


def steady(answers: Sequence[Answer]) -> float | None:
    """Tokens a second while all of these answers decode: from when the last has its first text until the first has its last.

    An event may bring more than one token, or less: over whole answers the ratio is known. `None` where there is no such time.
    """
    times = [answer.deltas for answer in answers]
    if not all(times):
        return None
    begin, end = max(own[0] for own in times), min(own[-1] for own in times)
    if end <= begin:
        return None
    count = sum(begin < at <= end for own in times for at in own)
    tokens = sum(answer.usage[2] for answer in answers) / sum(len(own) for own in times)
    return count * tokens / (end - begin)
