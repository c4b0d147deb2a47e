"""Clients that join, leave and hang up at random, and what a well-formed answer to them is. Every choice follows from a seed.

Used by the soak, and in short by the tests. Nothing here depends on how fast the server is.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import streams
from harness import BenchError
from streams import TERMINAL, Answer, Json

WORDS = [
    "lamp",
    "ship",
    "storm",
    "rope",
    "tide",
    "letter",
    "stair",
    "bell",
    "winter",
    "garden",
    "stone",
    "river",
    "bridge",
    "keeper",
    "gull",
    "harbour",
]
QUESTIONS = ("What is the capital of France?", "Write a story about the sea.", "Count from one to fifty.", "Say hello.")
STOPS = (["."], ["the", "The"], ["\n"], [",", " and"])
HISTORIES = 4
"""Long beginnings that several requests share."""


@dataclass
class Tally:
    """What came of all requests."""

    answered: int = 0
    left: int = 0
    """Answers whose reader hung up before their end."""
    tokens: int = 0
    cached: int = 0
    """Tokens of prompts that were not read again."""
    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    """Answers that were not well formed, each in a line."""


def anything(rng: random.Random, longest: int) -> tuple[Json, int | None]:
    """A request as somebody might send it, and after how many pieces of its answer the reader hangs up, if it does."""
    question = rng.choice(QUESTIONS)
    turns: list[Json] = [{"role": "user", "content": question}]
    if rng.random() < 0.4:
        shared = random.Random(rng.randrange(HISTORIES))
        story = " ".join(shared.choice(WORDS) for _ in range(shared.choice((60, 200, 350))))
        turns = [{"role": "user", "content": f"The {story}"}, {"role": "assistant", "content": "Go on."}, *turns]
    elif rng.random() < 0.3:
        turns[0]["content"] = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 300)))
    body: Json = {"input": turns, "max_output_tokens": rng.randint(1, longest), "stream": rng.random() < 0.7}
    if rng.random() < 0.5:
        body |= {"temperature": rng.choice((0.3, 0.8, 1.3)), "seed": rng.randrange(1 << 31)}
        body |= rng.choice(({}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"top_p": 0.8, "top_k": 100}))
        body |= rng.choice(({}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.2}))
    else:
        body["temperature"] = 0
    if rng.random() < 0.3:
        body["stop"] = rng.choice(STOPS)
    leave = rng.randrange(12 if body["stream"] else 1) if rng.random() < 0.25 else None
    return body, leave


def fault(body: Json, answer: Answer) -> str | None:
    """What is wrong with an answer; `None` when nothing is."""
    if answer.status != 200 or not answer.whole:
        return answer.told()
    if not body["stream"]:
        return _wrong_response(body, answer.body)
    events = [event for _, event in answer.events]
    types = [event["type"] for event in events]
    if [event["sequence_number"] for event in events] != list(range(len(events))):
        return f"events are not numbered in order: {types}"
    if types[:2] != ["response.created", "response.in_progress"] or types[-1] not in TERMINAL:
        return f"events begin or end otherwise: {types}"
    if sum(each in TERMINAL for each in types) != 1:
        return f"there is more than one end: {types}"
    middle = [each for each in types[2:-1] if each != "response.output_text.delta"]
    begins = ["response.output_item.added", "response.content_part.added"]
    ends = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    if middle and middle not in ([*begins, *ends], [begins[0], ends[-1]]):
        return f"events come in another order: {types}"
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    if deltas != text(events[-1]["response"]):
        return f"the deltas are {deltas!r}, the text is {text(events[-1]['response'])!r}"
    return _wrong_response(body, events[-1]["response"])


def text(response: Json) -> str:
    """All text of a response."""
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


def _wrong_response(body: Json, response: Json) -> str | None:
    usage, most = response["usage"], body["max_output_tokens"]
    if usage["input_tokens"] + usage["output_tokens"] != usage["total_tokens"]:
        return f"the usage does not add up: {usage}"
    if not 0 <= usage["input_tokens_details"]["cached_tokens"] < usage["input_tokens"]:
        return f"as many tokens were cached as the prompt has, or more: {usage}"
    if not 1 <= usage["output_tokens"] <= most:
        return f"{usage['output_tokens']} tokens, where {most} were allowed"
    if response["status"] == "incomplete" and (
        response["incomplete_details"] != {"reason": "max_output_tokens"} or usage["output_tokens"] != most
    ):
        return f"incomplete for no reason: {response['incomplete_details']}, {usage['output_tokens']} of {most} tokens"
    if response["status"] not in ("completed", "incomplete"):
        return f"its status is {response['status']}: {response['error']}"
    for stop in body.get("stop", ()):
        if stop in text(response):
            return f"the text goes on behind the stop {stop!r}: {text(response)!r}"
    return None


async def client(address: str, seed: str, longest: int, pause: float, again: Callable[[], bool], tally: Tally) -> None:
    """Sends one request after the other as long as `again` says so; between two of them it may be away, `pause` seconds at most."""
    rng = random.Random(seed)
    while again():
        body, leave = anything(rng, longest)
        answer = await streams.ask(address, "/v1/responses", body, leave)
        left = leave is not None and not answer.whole
        tally.kinds["streamed" if body["stream"] else "whole"] += 1
        tally.kinds["greedy" if body["temperature"] == 0 else "sampled"] += 1
        if left:
            tally.left += 1
        elif (wrong := fault(body, answer)) is not None:
            tally.faults.append(f"{wrong} ({body})")
        else:
            tally.answered += 1
            tally.cached += answer.usage[1]
            tally.tokens += answer.usage[2]
        if pause and rng.random() < 0.3:
            await asyncio.sleep(rng.uniform(0, pause))


async def together(address: str, clients: int, tokens: int) -> int:
    """Asks for so many answers at once and gives how many of them ran at the same time, at most."""
    asked = [
        f"Write a long story about a {word} and the sea." for word in (WORDS * (clients // len(WORDS) + 1))[:clients]
    ]
    bodies: list[Json] = [
        {"input": text, "max_output_tokens": tokens, "stream": True, "temperature": 0} for text in asked
    ]
    answers = await asyncio.gather(*(streams.ask(address, "/v1/responses", body) for body in bodies))
    for body, answer in zip(bodies, answers, strict=True):
        if (wrong := fault(body, answer)) is not None:
            raise BenchError(f"one of {clients} answers at once: {wrong}")
    spans = [(answer.deltas[0], answer.deltas[-1]) for answer in answers]
    return max(sum(first <= at <= last for first, last in spans) for at, _ in spans)


def counted(requests: int) -> Callable[[], bool]:
    """Says yes so many times."""
    left = iter(range(requests))
    return lambda: next(left, None) is not None
