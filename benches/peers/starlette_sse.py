"""The peer of the streaming benchmark: the Responses event stream served by Starlette on uvicorn, uvloop and httptools.

Built the way a competent author would in that stack: one dict an event, one `json.dumps`, one `yield` of an async
generator into a `StreamingResponse`. With `--engine loop` the engine is a loop over words in the same task, with no
queue and no task switch between token and event: a real engine adds both, so this flatters the peer. With
`--engine queue` one task steps all requests and hands each its token by an `asyncio.Queue`. There is no model, no
session, no store and no validation here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

WORDS = (" the", " warm", " ember", " keeps", " small", " models", " near", " every", " program", " here")
encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


Engine = Callable[[int], AsyncIterator[str]]


async def loop_engine(count: int) -> AsyncIterator[str]:
    """So many words, without ever giving way."""
    for index in range(count):
        yield WORDS[index % len(WORDS)]


class QueueEngine:
    """Steps all requests together, a word for each in a step, and gives way to their readers after each step."""

    def __init__(self) -> None:
        self._running: dict[asyncio.Queue[str | None], int] = {}
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, count: int) -> AsyncIterator[str]:
        """So many words, as the steps make them."""
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        self._running[queue] = count
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._steps())
        try:
            while (word := await queue.get()) is not None:
                yield word
        finally:
            self._running.pop(queue, None)

    async def _steps(self) -> None:
        made = dict.fromkeys(self._running, 0)
        while self._running:
            for queue, count in list(self._running.items()):
                index = made.get(queue, 0)
                queue.put_nowait(WORDS[index % len(WORDS)] if index < count else None)
                made[queue] = index + 1
                if index == count:
                    del self._running[queue], made[queue]
            await asyncio.sleep(0)


def response_object(request: dict[str, Any], response_id: str, created_at: int) -> dict[str, Any]:
    """The response object, every key of it, as it stands before there is output."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": request["max_output_tokens"],
        "max_tool_calls": None,
        "metadata": {},
        "model": request["model"],
        "output": [],
        "parallel_tool_calls": True,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": None,
        "user": None,
    }


async def events(request: dict[str, Any], engine: Engine) -> AsyncIterator[str]:
    """The stream of one response of `max_output_tokens` words, each an event."""
    response = response_object(request, f"resp_{secrets.token_hex(16)}", int(time.time()))
    item_id = f"msg_{secrets.token_hex(16)}"
    place = {"item_id": item_id, "output_index": 0, "content_index": 0}
    number = 0

    def event(kind: str, fields: dict[str, Any]) -> str:
        nonlocal number
        data = encode({"type": kind, "sequence_number": number, **fields})
        number += 1
        return f"event: {kind}\ndata: {data}\n\n"

    yield event("response.created", {"response": response})
    yield event("response.in_progress", {"response": response})
    item: dict[str, Any] = {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": "in_progress",
        "content": [],
    }
    yield event("response.output_item.added", {"output_index": 0, "item": item})
    part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    yield event("response.content_part.added", {**place, "part": part})

    words = []
    async for word in engine(request["max_output_tokens"]):
        words.append(word)
        yield event("response.output_text.delta", {**place, "delta": word, "logprobs": []})

    text = "".join(words)
    yield event("response.output_text.done", {**place, "text": text, "logprobs": []})
    part = {**part, "text": text}
    yield event("response.content_part.done", {**place, "part": part})
    item = {**item, "status": "incomplete", "content": [part]}
    yield event("response.output_item.done", {"output_index": 0, "item": item})
    final = {
        **response,
        "status": "incomplete",
        "incomplete_details": {"reason": "max_output_tokens"},
        "output": [item],
        "usage": {
            "input_tokens": 1,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": len(words),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 1 + len(words),
        },
    }
    yield event("response.incomplete", {"response": final})
    yield "data: [DONE]\n\n"


async def respond(request: Request) -> StreamingResponse:
    """`POST /v1/responses`, always streaming."""
    body = await request.json()
    return StreamingResponse(
        events(body, request.app.state.engine), media_type="text/event-stream", headers={"cache-control": "no-cache"}
    )


async def health(_: Request) -> JSONResponse:
    """`GET /health`."""
    return JSONResponse({"status": "ok"})


def main() -> None:
    """Binds a loopback port, prints `{"address"}`, and serves until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="port on the loopback address; 0 takes a free one")
    parser.add_argument("--engine", choices=("loop", "queue"), default="loop", help="how words are made")
    options = parser.parse_args()
    app = Starlette(routes=[Route("/v1/responses", respond, methods=["POST"]), Route("/health", health)])
    app.state.engine = QueueEngine() if options.engine == "queue" else loop_engine
    config = uvicorn.Config(app, loop="uvloop", http="httptools", log_level="warning", access_log=False, backlog=2048)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", options.port))
        # Connections queue from here on, so the address is good before the loop runs.
        listener.listen(2048)
        print(json.dumps({"address": "{}:{}".format(*listener.getsockname())}), flush=True)
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
