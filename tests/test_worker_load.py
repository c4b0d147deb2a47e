"""Many clients at once, and clients that leave whenever they please: everybody is answered, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from support.process import command, environment, eventually
from support.worker import KEY, TAG, Client, Worker, chat, worker

if TYPE_CHECKING:
    from pathlib import Path

linux = pytest.mark.skipif(sys.platform != "linux", reason="descriptors and memory are read from /proc")

PATIENCE = 120
"""Seconds after which a hung conversation is given up."""

WORDS = " a small model keeps warm and answers now"


async def ask(path: Path, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    """Opens a connection, says all of it, and hears as many answers."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.writelines(json.dumps(message).encode() + b"\n" for message in messages)
    answers: list[dict[str, Any]] = []
    while len(answers) < len(messages):
        reply = json.loads(await reader.readline())
        if reply["type"] != "progress":
            answers.append(reply)
    writer.close()
    return answers


@linux
def test_a_thousand_connections_and_two_hundred_chats(place: Path, home: Path) -> None:
    async def crowd(path: Path) -> None:
        idle = [await asyncio.open_unix_connection(str(path)) for _ in range(800)]
        chats = [
            ask(path, chat(f"c{at}", tokens=8 * (1 + at % 100)), {"type": "ping", "id": f"p{at}"}) for at in range(200)
        ]
        for at, answers in enumerate(await asyncio.wait_for(asyncio.gather(*chats), PATIENCE)):
            by_type = {answer["type"]: answer for answer in answers}
            assert by_type["pong"] == {"type": "pong", "id": f"p{at}", "tag": TAG}
            assert by_type["text"] == {"type": "text", "id": f"c{at}", "text": WORDS * (1 + at % 100)}
        for at, (reader, writer) in enumerate(idle):
            writer.write(json.dumps({"type": "ping", "id": at}).encode() + b"\n")
            assert json.loads(await asyncio.wait_for(reader.readline(), PATIENCE))["id"] == at
            writer.close()

    with worker(place, home=home) as one:
        with one.connect() as client:
            assert client.ask(chat("first"))["type"] == "text"
            before = one.process.descriptors() - 1
        for _ in range(2):
            asyncio.run(crowd(one.path))
            eventually(lambda: one.process.descriptors() <= before, "all connections are gone from the worker")
        assert one.process.resident() < 128 << 20


def connectable(path: Path) -> bool:
    """Whether somebody answers there."""
    try:
        Client(path).close()
    except OSError:
        return False
    return True


@linux
def test_a_low_limit_of_descriptors_is_raised_as_far_as_it_may_be(place: Path, home: Path) -> None:
    arguments = ["worker", "--socket", str(place), "--model-key", KEY, "--tag", TAG, "--engine", "mock"]
    limited = ["bash", "-c", 'ulimit -Sn 64; exec "$@"', "bash", *command(), *arguments]
    process = subprocess.Popen(limited, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(home))
    try:
        eventually(lambda: connectable(place), "the worker listens")
        clients = [Client(place) for _ in range(200)]
        for client in clients:
            assert client.ask({"type": "ping", "id": "1"})["type"] == "pong"
            client.close()
    finally:
        process.kill()
        process.wait(PATIENCE)


async def leave_at_random(path: Path, seed: int, end: float) -> int:
    """Connects, asks, hangs up wherever it happens to be; over and over. Returns how many answers it stayed for."""
    rng, answered = random.Random(seed), 0
    while time.monotonic() < end:
        reader, writer = await asyncio.open_unix_connection(str(path))
        text = "Tell me about lighthouses. " * rng.choice([1, 1, 5, 40])
        lines = [json.dumps(chat(n, text, tokens=rng.choice([2, 20, 200]))) + "\n" for n in range(rng.randint(1, 3))]
        data = "".join(lines).encode()
        kind = rng.random()
        if kind < 0.2:
            data = data[: rng.randrange(1, len(data))]
        writer.write(data)
        try:
            async with asyncio.timeout(rng.expovariate(1 / 0.7)):
                while line := await reader.readline():
                    answered += json.loads(line)["type"] == "text"
        except TimeoutError:
            pass
        if kind > 0.8:
            writer.transport.abort()
        writer.close()
    return answered


async def many_that_leave(path: Path, seconds: float) -> int:
    end = time.monotonic() + seconds
    return sum(await asyncio.gather(*(leave_at_random(path, seed, end) for seed in range(50))))


async def in_order(path: Path) -> list[str]:
    """Who is answered first, of eight clients with long questions, all alike, and a ninth with a short one behind them.

    With eight places the eight end together, and the ninth follows. Were a place lost, one of the eight would start
    when another has ended, beside the ninth, and end long after it.
    """
    ended: list[str] = []

    async def one(name: str, tokens: int) -> None:
        await ask(path, chat(name, "Write a long story about a lighthouse.", tokens=tokens))
        ended.append(name)

    first = [asyncio.create_task(one("long", 200)) for _ in range(8)]
    while (await ask(path, {"type": "status", "id": "s"}))[0]["in_flight"] < 8:
        await asyncio.sleep(0)  # The eight have been read before the ninth is sent.
    last = asyncio.create_task(one("ninth", 40))
    await asyncio.wait_for(asyncio.gather(*first, last), PATIENCE)
    return ended


@linux
def test_fifty_clients_hang_up_at_random_on_the_real_engine(place: Path, model_home: Path) -> None:
    question = chat("q", "What is the capital of France?", tokens=20)

    def quiet(one: Worker) -> None:
        with one.connect() as client:
            assert "Paris" in client.ask(question)["text"]

    # A budget that the first ten seconds use up, so that what is kept of their prompts does not look like a leak.
    options = ("--model", "smollm2-135m", "--max-batch", "8")
    with worker(place, *options, engine="onnx", home=model_home) as one:
        quiet(one)
        asyncio.run(many_that_leave(one.path, 10))  # What is made once has been made then.
        quiet(one)
        descriptors, resident = one.process.descriptors(), one.process.resident()
        answered = asyncio.run(many_that_leave(one.path, 60))
        assert answered > 0, "somebody stayed for an answer"
        assert asyncio.run(in_order(one.path)) == ["long"] * 8 + ["ninth"], "every place is free again"
        eventually(lambda: one.process.descriptors() <= descriptors, "all connections are gone from the worker")
        eventually(lambda: one.process.resident() < resident + (32 << 20), "the memory of the rows is given back")


def test_of_twenty_starts_at_once_one_worker_is_left(place: Path, home: Path) -> None:
    arguments = ["worker", "--socket", str(place), "--model-key", KEY, "--tag", TAG, "--engine", "mock"]
    starts = [
        subprocess.Popen(
            [*command(), *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment(home),
            text=True,
        )
        for _ in range(20)
    ]
    try:
        eventually(lambda: sum(each.poll() is None for each in starts) == 1, "one is left")
        losers = [each for each in starts if each.poll() is not None]
        assert {each.returncode for each in losers} == {1}
        for each in losers:
            assert each.stderr is not None
            assert each.stderr.read() == f"error: tiny worker already listening on {place}\n"
        with Client(place) as client:
            assert client.ask({"type": "ping", "id": "1"})["type"] == "pong"
            client.send({"type": "shutdown", "id": "2"})
            assert client.line() == b""
        [winner] = [each for each in starts if each not in losers]
        assert winner.wait(PATIENCE) == 0
        assert not place.exists()
    finally:
        for each in starts:
            if each.poll() is None:
                each.kill()
            each.wait(PATIENCE)
            if each.stderr is not None:
                each.stderr.close()
