"""A soak in short, on the real model: clients that join, leave and hang up at random, and a fixed number of requests.

What they send follows from a seed, and nothing here is about time: every answer is well formed or was left by its
reader, and afterwards no slot is lost. The client of the benchmarks, which sends them, is held to its own rules first.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import random
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benches"))

import streams
from support.serve import server
from wild_clients import Tally, anything, client, counted, fault, together

if TYPE_CHECKING:
    from collections.abc import Iterator

CLIENTS = 8
REQUESTS = 6
"""Of each client."""

BODY = {"input": "hi", "max_output_tokens": 3, "stream": True, "stop": ["."]}


@pytest.fixture(scope="module")
def mock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose engine says fixed words."""
    with server("--model", "mock", home=tmp_path_factory.mktemp("home")) as running:
        yield running.address


@pytest.fixture(scope="module")
def real_server(model_home: Path) -> Iterator[str]:
    """A server with the real model and a slot for each client."""
    model = os.environ.get("EMBERD_TEST_MODEL", "smollm2-135m")
    options = ["--model", model, "--max-batch", str(CLIENTS), "--cache-bytes", str(8 << 20)]
    with server(*options, engine="onnx", home=model_home) as running:
        yield running.address


@pytest.mark.model
def test_clients_that_come_and_go_get_whole_answers_and_lose_no_slot(real_server: str) -> None:
    tally = Tally()

    async def all_of_them() -> None:
        runs = (client(real_server, f"1 {each}", 16, 0.0, counted(REQUESTS), tally) for each in range(CLIENTS))
        await asyncio.gather(*runs)

    streams.run(all_of_them)
    assert tally.faults == []
    # The seed makes some of each kind, whoever is fast.
    assert tally.answered + tally.left == CLIENTS * REQUESTS
    assert min(tally.answered, tally.left) > 0
    assert {kind for kind, count in tally.kinds.items() if count > 0} == {"streamed", "whole", "greedy", "sampled"}
    assert streams.run(partial(together, real_server, CLIENTS, 48)) == CLIENTS


def test_the_same_seed_sends_the_same() -> None:
    made = [
        [anything(rng, 16) for _ in range(50)] for rng in (random.Random("a"), random.Random("a"), random.Random("b"))
    ]
    assert made[0] == made[1] != made[2]


def ask(address: str, body: dict[str, Any], leave: int | None = None) -> streams.Answer:
    return streams.run(partial(streams.ask, address, "/v1/responses", body, leave))


def test_the_client_reads_streams_and_whole_answers_alike(mock: str) -> None:
    streamed, whole = ask(mock, BODY), ask(mock, {**BODY, "stream": False})
    assert fault(BODY, streamed) is None
    assert fault({**BODY, "stream": False}, whole) is None
    assert streamed.usage == whole.usage
    assert streamed.usage[2] == 3
    assert len(streamed.deltas) >= 1
    assert streamed.sent < streamed.deltas[0] <= streamed.deltas[-1] <= streamed.done


def test_an_answer_that_was_left_is_not_whole(mock: str) -> None:
    assert not ask(mock, {**BODY, "max_output_tokens": 100_000}, leave=1).whole
    assert ask(mock, BODY, leave=0).status in (0, 200)


@pytest.mark.parametrize("size", [1, 7, 100, 1_000_000])
def test_an_answer_reads_the_same_however_it_is_cut(size: int) -> None:
    events = "".join(f'data: {{"type":"response.output_text.delta","delta":"{each}"}}\n\n' for each in "abc").encode()
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (events[:50], events[50:])) + b"0\r\n\r\n"
    raw = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
    pieces = [(float(at), raw[at : at + size]) for at in range(0, len(raw), size)]
    answer = streams.read(0.0, pieces)
    assert answer.whole
    assert [event["delta"] for _, event in answer.events] == ["a", "b", "c"]
    # An event is there with the piece that brings its last byte.
    assert answer.deltas[0] == (raw.index(b'"a"}\n\n') + 5) // size * size
    assert not streams.read(0.0, pieces[:-1]).whole


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda events: events.reverse(), "not numbered"),
        (lambda events: events.pop(3), "not numbered"),
        (lambda events: events[4].update(delta="other"), "the deltas are"),
        (lambda events: events[-1].update(type="response.failed"), "end otherwise"),
        (lambda events: events[3].update(type="response.output_item.added"), "another order"),
        (lambda events: events[-1]["response"]["usage"].update(total_tokens=1), "does not add up"),
        (lambda events: events[-1]["response"]["usage"].update(output_tokens=2, total_tokens=23), "for no reason"),
        (lambda events: events[-1]["response"]["usage"].update(output_tokens=4, total_tokens=25), "were allowed"),
        (lambda events: events[-1]["response"].update(status="failed"), "its status is"),
    ],
)
def test_an_answer_that_is_not_well_formed_is_told(mock: str, change: Any, says: str) -> None:
    answer = ask(mock, BODY)
    events = copy.deepcopy([event for _, event in answer.events])
    change(events)
    answer.events = [(0.0, event) for event in events]
    told = fault(BODY, answer)
    assert told is not None
    assert says in told, json.dumps(events)
