"""The rows of `make bench-engine`: what is asked of both servers, and which figures of the answers are compared.

Ours and the peer get the same texts, greedily, with the same longest answer; tokens are counted as each server's usage
tells them. Servers are started in `engine`, requests are sent by `streams`, peers are made in `engine_peers`.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import streams
from engine_peers import int8_twin
from harness import ROOT, BenchError, run_json
from items import Figures, Row, alternate, compare
from streams import Answer, Json

CLIENTS = (1, 2, 4, 8, 16, 32)
TARGETS = {8: 1.4, 16: 1.6, 32: 1.6}
"""How many times the peer's throughput ours is to be, by the number of clients."""

PROMPT = 512
"""Tokens of a long prompt."""

LONGEST = 600
"""Tokens of the answers that run while long prompts arrive: more than they come to."""

ARRIVALS = 6
"""Long prompts that arrive."""

PAUSE = 0.5
"""Seconds between the first token after one long prompt and the sending of the next."""

WORDS = (
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
)
KINDS = (
    "small",
    "old",
    "quiet",
    "young",
    "brave",
    "lost",
    "green",
    "blue",
    "slow",
    "clever",
    "tired",
    "happy",
    "strange",
)


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    rounds: int
    tokens: int
    """The longest answer."""
    turns: int
    """Answers that each client asks for, one after the other; at 32 clients one."""
    clients: tuple[int, ...]
    threads: int
    quick: bool


@dataclass(frozen=True)
class Side:
    """A server that is measured."""

    address: str
    path: str
    fields: Json
    """What each request says besides its texts and the length of the answer."""

    async def ask(self, body: Json, until: asyncio.Event | None = None) -> Answer:
        """One request; `body` has `turns` and `tokens`, and `one_by_one` where nothing is to be guessed. With `until` the client hangs up."""
        turns, tokens = body["turns"], body["tokens"]
        if self.path.endswith("/responses"):
            asked = {"input": turns, "max_output_tokens": tokens}
            if body.get("one_by_one"):  # several tokens at once, as guesses give them, have no gap between them
                asked["extra_body"] = {"generation_mode": "ar"}
        else:
            asked = {"messages": turns, "max_tokens": tokens}
        return await streams.ask(self.address, self.path, {**self.fields, **asked}, until=until)


def ours(address: str, model: str) -> Side:
    """Our server."""
    return Side(address, "/v1/responses", {"model": model, "stream": True, "temperature": 0})


def peers(address: str) -> Side:
    """llama.cpp's server."""
    options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    return Side(address, "/v1/chat/completions", options)


@dataclass
class Series:
    """What the plot shows, by the number of clients: for ours and the peer in this order."""

    throughput: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Tokens a second."""
    gap: dict[int, tuple[float, float]] = field(default_factory=dict)
    """The median between two texts of an answer, milliseconds."""
    worst: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Its 99th percentile, milliseconds."""


def percentile(values: Sequence[float], percent: float) -> float:
    """By nearest rank."""
    if not values:
        raise BenchError("no answer has two texts")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def story(rng: random.Random, tokens: int) -> Json:
    """A request for a story that nobody else asks for."""
    about = " and ".join(f"a {rng.choice(KINDS)} {rng.choice(WORDS)}" for _ in range(3))
    return {"turns": [{"role": "user", "content": f"Write a long story about {about}."}], "tokens": tokens}


def long_prompt(rng: random.Random, words: int, tokens: int) -> Json:
    """A request whose prompt differs from every other from its second word on, so that next to nothing of it is cached."""
    text = [rng.choice(WORDS) for _ in range(words)]
    # A word is one token where a space stands before it, so none of them is the first.
    turns = [("system", " ".join(["The", *text[:8]])), ("user", " ".join(["The", *text[8:]]))]
    return {"turns": [{"role": role, "content": content} for role, content in turns], "tokens": tokens}


def fit(side: Side, wanted: int) -> int:
    """How many words make a prompt of so many tokens; each of `WORDS` is one."""
    words = wanted // 2
    for _ in range(3):
        answer = streams.run(partial(side.ask, long_prompt(random.Random(0), words, 1)))
        if (tokens := answer.usage[0]) == wanted:
            return words
        words += wanted - tokens
    raise BenchError(f"no prompt of {wanted} tokens could be made: {words} words are {tokens}")


def cold_prompts(side: Side, words: int, numbers: Iterator[int], count: int) -> Figures:
    """So many long prompts, one after the other."""
    rng = random.Random(f"prompt {next(numbers)}")
    done = streams.run(partial(streams.clients, side.ask, [[long_prompt(rng, words, 1) for _ in range(count)]]))
    rates = [(answer.usage[0] - answer.usage[1]) / answer.first for answer in done.answers]
    tokens = {answer.usage[0] for answer in done.answers}
    return {"rate": median(rates), "tokens": tokens, "cached": max(answer.usage[1] for answer in done.answers)}


def load(side: Side, clients: int, plan: Plan, numbers: Iterator[int]) -> Figures:
    """So many clients at once, each asking for `plan.turns` answers."""
    rng = random.Random(f"story {next(numbers)}")
    turns = 1 if clients > 16 else plan.turns
    bodies = [[story(rng, plan.tokens) for _ in range(turns)] for _ in range(clients)]
    done = streams.run(partial(streams.clients, side.ask, bodies))
    waits = [1e3 * gap for answer in done.answers for gap in streams.gaps(answer)]
    alone = [rate for answer in done.answers if (rate := streams.steady([answer]))]
    return {
        "rate": done.tokens / done.seconds,
        "decode": median(alone) if clients == 1 else streams.steady([answers[0] for answers in done.clients]),
        "gap": median(waits),
        "worst": percentile(waits, 99),
        "tokens": done.tokens / len(done.answers),
        "prompt": done.answers[0].usage[0],
        "busy": done.busy / done.seconds,
    }


async def _with_arrivals(side: Side, running: list[Json], prompts: list[Json]) -> tuple[list[Answer], list[Answer]]:
    """Answers that run while long prompts arrive, one after the other; then their readers hang up."""
    over = asyncio.Event()
    answers = [asyncio.ensure_future(side.ask(body, over)) for body in running]
    arrived: list[Answer] = []
    for prompt in prompts:
        await asyncio.sleep(PAUSE)
        if any(answer.done() for answer in answers):
            break
        arrived.append(await side.ask(prompt))
    over.set()
    return list(await asyncio.gather(*answers)), arrived


def arrivals(side: Side, running: int, words: int, count: int, numbers: Iterator[int]) -> Figures:
    """Gaps of running answers from the sending of the first long prompt on, to the end of the last one."""
    rng = random.Random(f"arrivals {next(numbers)}")
    bodies = [{**story(rng, LONGEST), "one_by_one": True} for _ in range(running)]
    prompts = [long_prompt(rng, words, 1) for _ in range(count)]
    answers, arrived = streams.run(partial(_with_arrivals, side, bodies, prompts))
    if not arrived:
        raise BenchError("the running answers ended before a prompt arrived")
    begin, end = arrived[0].sent, arrived[-1].done
    waits = [1e3 * gap for answer in answers for gap in streams.gaps(answer, begin, end)]
    worst, middle = percentile(waits, 99), median(waits)
    return {"gap": middle, "worst": worst, "ratio": worst / middle}


def both(
    plan: Plan, measure: Callable[..., Figures], sides: tuple[Side, Side], *more: Any
) -> list[tuple[Figures, Figures]]:
    """Measures both sides in turn, with the same texts in a round; `measure` takes a side, `more`, and the rounds' numbers."""
    numbers = [iter(range(plan.rounds)), iter(range(plan.rounds))]
    first, second = (partial(measure, side, *more, own) for side, own in zip(sides, numbers, strict=True))
    return alternate(plan.rounds, first, second)


def against_llama(
    plan: Plan, sides: tuple[Side, Side], series: Series, sizes: tuple[int, int], read: float
) -> Iterator[Row]:
    """Rows against `llama-server`. `sizes` are the bytes of weights of both, `read` the bytes a second memory gives."""
    words = fit(sides[0], PROMPT)
    pairs = both(plan, partial(cold_prompts, count=1 if plan.quick else 3), sides, words)
    lengths = {tokens for pair in pairs for each in pair for tokens in each["tokens"]}
    cached = max(each["cached"] for pair in pairs for each in pair)
    what = f"prompt of {'–'.join(map(str, sorted(lengths)))} tokens, at most {cached} cached: read"
    yield compare(what, pairs, lambda each: each["rate"], "tok/s", least=1.5)
    busy = 0.0
    for clients in plan.clients:
        pairs = both(plan, load, sides, clients, plan)
        name = f"{clients} client{'s' if clients > 1 else ''}"
        busy = max([busy, *(each["busy"] for pair in pairs for each in pair)])
        for kept, key in ((series.throughput, "rate"), (series.gap, "gap"), (series.worst, "worst")):
            kept[clients] = (median(pair[0][key] for pair in pairs), median(pair[1][key] for pair in pairs))
        if clients == 1:
            lengths = {round(pair[0]["tokens"]) for pair in pairs}
            what = f"{name}, {pairs[0][0]['prompt']} + {median(lengths):g} tokens: decode"
            yield compare(what, pairs, lambda each: each["decode"], "tok/s", least=1.0)
            shares = [median(pair[side]["decode"] for pair in pairs) * sizes[side] / read for side in (0, 1)]
            what = f"{name}: of what {read / 1e9:.1f} GB/s and {sizes[0] / 1e6:.0f} ({sizes[1] / 1e6:.0f}) MB a token allow"
            yield Row(what, f"{shares[0]:.0%}", f"{shares[1]:.0%}")
        yield compare(f"{name}: throughput", pairs, lambda each: each["rate"], "tok/s", least=TARGETS.get(clients))
        if clients in (8, 16) and all(each["decode"] for pair in pairs for each in pair):
            yield compare(f"{name}: while all decode", pairs, lambda each: each["decode"], "tok/s")
        yield compare(f"{name}: gap between texts, median", pairs, lambda each: each["gap"], "ms")
        yield compare(f"{name}: gap between texts, p99", pairs, lambda each: each["worst"], "ms")
    yield Row("the load generator's share of one core, at most", f"{busy:.1%}", "", "", "< 25%", busy < 0.25)
    for running in (1, 8):
        pairs = both(plan, arrivals, sides, running, words, 2 if plan.quick else ARRIVALS)
        name = f"{running} running, prompts of {PROMPT} arrive: gap"
        yield compare(f"{name}, median", pairs, lambda each: each["gap"], "ms")
        yield compare(f"{name}, p99", pairs, lambda each: each["worst"], "ms")
        middle, other = (median(pair[side]["ratio"] for pair in pairs) for side in (0, 1))
        yield Row(f"{name}, p99 / median", f"{middle:.3g}", f"{other:.3g}", "", "≤ 2.5", middle <= 2.5)


def against_genai(plan: Plan, side: Side, folder: Path, python: str) -> Iterator[Row]:
    """Rows against the generator of onnxruntime-genai, in a process of its own on the same folder: ours still has its door before it.

    Its activations are rounded to bytes, the fastest that the runtime has (ours have 15 bits): the folder's graph is another, the weights are the same file.
    """
    with int8_twin(folder) as rounded:
        yield from _against_genai(plan, side, rounded, python)


def _against_genai(plan: Plan, side: Side, rounded: Path, python: str) -> Iterator[Row]:
    words = fit(side, PROMPT)
    command = [
        python,
        str(ROOT / "benches/peers/genai_loop.py"),
        "--threads",
        str(plan.threads),
        "--folder",
    ]

    def generator(batch: int, prompt: int, tokens: int) -> Figures:
        turns = "1" if plan.quick else "3"
        lengths = ["--batch", str(batch), "--prompt-tokens", str(prompt), "--tokens", str(tokens), "--turns", turns]
        figures = run_json([*command, str(rounded), *lengths])
        return {"rate": prompt / figures["first_s"], "decode": figures["tokens_per_s"]}

    numbers = iter(range(1000, 1000 + plan.rounds))
    prompts = partial(cold_prompts, side, words, numbers, 1 if plan.quick else 3)
    pairs = alternate(plan.rounds, prompts, partial(generator, 1, PROMPT, 2))
    name = "against onnxruntime-genai"
    yield compare(f"{name}: prompt of {PROMPT} tokens: read", pairs, lambda each: each["rate"], "tok/s", least=1.0)
    for clients in (1, 8):
        stories = iter(range(2000, 2000 + plan.rounds))
        pairs = alternate(
            plan.rounds, partial(load, side, clients, plan, stories), partial(generator, clients, 48, plan.tokens)
        )
        if not all(pair[0]["decode"] for pair in pairs):
            raise BenchError(f"{clients} clients never decoded together: the answers are too short")
        what = f"{name}: {clients} client{'s' if clients > 1 else ''}, decode"
        yield compare(what, pairs, lambda each: each["decode"], "tok/s", least=1.0)
