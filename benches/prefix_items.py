"""The benchmark of prefix reuse, (g): the next turn of a long conversation, with what was kept of it and without.

Ours keeps prompts and answers, as by default; the peer is the same server with `--cache-bytes 0`.
"""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

from harness import BenchError, Tools, http_server
from items import Figures, Options, Row, alternate, compare

HISTORY = 4000
"""Tokens that the turns of a conversation share, at least."""

WORDS = ("lamp", "ship", "storm", "harbour", "keeper", "rope", "gull", "tide", "letter", "stair", "bell", "winter")


def ask(address: str, model: str, turns: list[dict[str, str]], tokens: int) -> Figures:
    """The response to a conversation."""
    return post(address, {"model": model, "input": turns, "max_output_tokens": tokens, "temperature": 0})


def post(address: str, body: Figures) -> Figures:
    """The response to a request."""
    host, port = address.rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=600)
    connection.request("POST", "/v1/responses", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    response: Figures = json.loads(answer.read())
    connection.close()
    if answer.status != 200:
        raise BenchError(f"{address} answered {answer.status}: {response}")
    return response


def conversation(address: str, model: str, numbers: Iterator[int]) -> Figures:
    """A first turn of `HISTORY` tokens that nobody has sent before, the next turn after it, and a longer answer."""
    rng = random.Random(next(numbers))
    user = " ".join(rng.choice(WORDS) for _ in range(HISTORY))
    first = ask(address, model, [{"role": "user", "content": user}], 16)
    text = first["output"][0]["content"][0]["text"]
    turns = [{"role": "user", "content": user}, {"role": "assistant", "content": text}]
    turns.append({"role": "user", "content": "Thank you. What came after that?"})
    after = ask(address, model, turns, 4)
    story = ask(address, model, [{"role": "user", "content": "Write a long story about the sea."}], 256)
    if first["usage"]["input_tokens"] < HISTORY:
        raise BenchError(f"the first turn has {first['usage']['input_tokens']} tokens, not {HISTORY}")
    return {"first": first["usage"], "next": after["usage"], "story": story["usage"]}


def to_first(turn: str, figures: Figures) -> float:
    """Milliseconds from a turn to the first token of its answer."""
    time: float = figures[turn]["time_to_first_token_ms"]
    return time


def prefixes(tools: Tools, options: Options) -> Iterator[Row]:
    """(g) The next turn of a conversation of 4,000 tokens, against the same server with `--cache-bytes 0`."""
    serve = [*tools.emberd, "serve", "--model", options.model, "--engine", "onnx"]
    serve += ["--threads", str(options.threads), "--port", "0"]
    numbers = range(options.rounds)
    with http_server(serve) as ours, http_server([*serve, "--cache-bytes", "0"]) as peer:
        # The same conversations for both.
        measure: list[Any] = [partial(conversation, each, options.model, iter(numbers)) for each in (ours, peer)]
        pairs = alternate(options.rounds, *measure)
    cached = min(pair[0]["next"]["cached_prefix_tokens"] for pair in pairs)
    asked = pairs[0][0]["next"]["input_tokens"]
    yield Row("tokens of the next turn, and those that were kept", f"{asked:,}", f"{cached:,}", f"{cached / asked:.3g}")
    yield compare("first turn: time to first token", pairs, partial(to_first, "first"), "ms")
    yield compare("next turn: time to first token", pairs, partial(to_first, "next"), "ms", most=1 / 15)
    what = "an answer of 256 tokens: decode"
    yield compare(what, pairs, lambda each: each["story"]["decode_tokens_per_second"], "tok/s")
