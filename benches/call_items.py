"""The benchmark of reading calls, (j): tokens that are one long call of a tool, against as many that are plain words.

Both come from the mock engine, a byte to a token, through the same door: what differs is what it costs to tell a call apart and
to stream its arguments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial

from harness import Tools, http_server, run_json
from items import Figures, Options, Row, alternate, compare

LENGTH = 2000
"""Bytes of an answer, and so its tokens."""

TOOLS = [
    {
        "type": "function",
        "name": "note",
        "description": "keeps a note",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    }
]
WORDS = 'A note of many words, some of them with \\"quotes\\" and \\n line breaks in it. '


def answers() -> tuple[str, str]:
    """One long call, and as long a text of the same words."""
    head, tail = '<tool_call>\n{"name": "note", "arguments": {"text": "', '"}}\n</tool_call>'
    room = LENGTH - len(head) - len(tail)
    words = (WORDS * (room // len(WORDS))).ljust(room, ".")
    return head + words + tail, words.ljust(LENGTH, ".")


def body(tools: bool) -> str:
    """A request for one of the answers."""
    request = {"model": "mock", "input": "hi", "stream": True}
    return json.dumps({**request, "tools": TOOLS} if tools else request)


def calls(tools: Tools, options: Options) -> Iterator[Row]:
    """(j) Tokens of a call, streamed and parsed, against tokens of plain words: the HTTP door with the mock engine."""
    call, words = answers()
    serve = [*tools.emberd, "serve", "--engine", "mock", "--model", "mock", "--port", "0"]
    with (
        http_server([*serve, f"--mock-answer={call}"]) as called,
        http_server([*serve, f"--mock-answer={words}"]) as said,
    ):
        for streams in (1, 64):

            def measure(address: str, parsed: bool, streams: int = streams) -> Callable[[], Figures]:
                command = [tools.load, "sse", "--url", f"http://{address}/v1/responses", "--body", body(parsed)]
                return partial(run_json, [*command, "--streams", str(streams), "--seconds", f"{options.seconds:g}"])

            many = f"{streams} stream{'s' if streams > 1 else ''}"
            pairs = alternate(options.rounds, measure(called, True), measure(said, False))
            yield compare(f"{many}: a call, against words", pairs, lambda each: each["tokens_per_s"], "tok/s")
            # The parser that looks for calls and finds none.
            pairs = alternate(options.rounds, measure(said, True), measure(said, False))
            yield compare(f"{many}: words with tools, against none", pairs, lambda each: each["tokens_per_s"], "tok/s")
