"""What crossing the boundary costs an engine: calls on the port of the real extension, without a door and a model.

`pytest benches/test_engines.py` prints the times. An engine pays one `push` and one `poll` a step; a step of a small
model takes milliseconds, so a crossing of some microseconds is lost in it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

core = pytest.importorskip("emberd._core", reason="the extension is not installed: maturin develop --release")

ROWS = 32
ROUNDS = 2000
LIMIT = 1 << 20
"""Tokens that each request may get: more than the rounds push."""


class Bench:
    """A port with `ROWS` requests in it, and their readers, who read only when told to."""

    def __init__(self, rows: int) -> None:
        self.doors, self.port = core.port()
        self.port.ready(core.Capabilities(context_length=2 * LIMIT, max_batch=rows, vocab_size=1000, eos_ids=[2]))
        self.readers = [self.doors.submit([1, 2, 3], LIMIT) for _ in range(rows)]
        admitted = self.port.wait()
        assert [order.id for order in admitted] == [reader.id for reader in self.readers]
        self.ids = [order.id for order in admitted]


@pytest.fixture
def bench() -> Iterator[Bench]:
    """A port that is closed afterwards."""
    made = Bench(ROWS)
    yield made
    made.doors.close()
    made.port.close()


def pushed(benchmark: BenchmarkFixture, bench: Bench, step: list[tuple[int, list[int], None]]) -> object:
    """Pushes the step ten times `ROUNDS`: a free number of rounds could run past `LIMIT`."""
    benchmark.pedantic(bench.port.push, args=(step,), rounds=ROUNDS, iterations=10)  # type: ignore[no-untyped-call]
    return bench.port.push(step)


def test_push_of_a_step(benchmark: BenchmarkFixture, bench: Bench) -> None:
    """One token for each of 32 requests, as the batched decode pushes it."""
    step = [(id, [7], None) for id in bench.ids]
    assert pushed(benchmark, bench, step) == []
    tokens, finish = bench.readers[0].read()
    assert set(tokens) == {7}
    # The rounds, and the calls that pytest-benchmark makes besides.
    assert len(tokens) >= 10 * ROUNDS
    assert finish is None


def test_push_of_several_tokens(benchmark: BenchmarkFixture, bench: Bench) -> None:
    """Four tokens for each of 32 requests, as speculation would push them."""
    step = [(id, [7, 8, 9, 10], None) for id in bench.ids]
    assert pushed(benchmark, bench, step) == []


def test_push_of_nothing(benchmark: BenchmarkFixture, bench: Bench) -> None:
    """The question who left, as a prefill asks it between two chunks."""
    assert benchmark(bench.port.push, []) == []


def test_poll_without_orders(benchmark: BenchmarkFixture, bench: Bench) -> None:
    """The question what is new, before every step."""
    assert benchmark(bench.port.poll) == []


def test_a_request_from_submit_to_its_end(benchmark: BenchmarkFixture) -> None:
    """Submit, admission, one token, finish, read: the crossings of the shortest request there is."""
    doors, port = core.port()
    port.ready(core.Capabilities(context_length=64, max_batch=1, vocab_size=1000, eos_ids=[2]))

    def answer() -> tuple[list[int], str | None]:
        reader = doors.submit([1, 2, 3], 1)
        (admit,) = port.wait()
        port.push([(admit.id, [2], "stop")])
        read: tuple[list[int], str | None] = reader.read()
        return read

    assert benchmark(answer) == ([2], "stop")
    doors.close()
    port.close()
