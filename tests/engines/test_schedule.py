"""How prompts are read between answers: the pace, on a clock that the tests turn, and the order."""

from __future__ import annotations

import importlib.util
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from cases import Case, prompt
from emberd import loop
from emberd.engine import Request, Step
from emberd.schedule import BOUND, LEAST, LONG_CHUNKS, LONG_EVERY, SHORT, Pace, Queue
from fakeport import Admit, FakePort

needs_mlx = pytest.mark.skipif(importlib.util.find_spec("mlx") is None, reason="the engine over MLX is an extra")

PROMISED = 2.5
"""What 99 in 100 gaps between the tokens of an answer may last beside the median."""

LONGEST = 128


class Clock:
    """Time that passes only where a test says so; passes take what they take of the default model, in seconds."""

    def __init__(self, noise: float = 0.05) -> None:
        self.now = 0.0
        self._noise = noise
        self._rng = random.Random(1)

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds * (1 + self._noise * abs(self._rng.gauss(0, 1)))

    def decode(self, rows: int) -> None:
        self.spend(0.012 if rows == 1 else 0.017 + 0.0023 * rows)

    def read(self, tokens: int) -> None:
        self.spend(0.012 if tokens == 1 else 0.017 + 0.0016 * tokens)


def decode(pace: Pace, clock: Clock, rows: int, times: int = 1) -> None:
    for _ in range(times):
        pace.start()
        clock.decode(rows)
        pace.decoded(rows)


def read(pace: Pace, clock: Clock, unread: int) -> list[int]:
    """Reads of a prompt what may be read before the answers go on, in so many pieces."""
    pieces: list[int] = []
    while (left := unread - sum(pieces)) and (count := min(pace.tokens(left, 1, False), left)):
        pace.start()
        clock.read(count)
        pace.read([count])
        pieces.append(count)
    return pieces


def warm(clock: Clock, rows: int, longest: int = LONGEST) -> Pace:
    """A pace that has seen a prompt and many passes over so many answers."""
    pace = Pace(longest, clock=clock)
    for count in (min(128, longest), min(40, longest)):
        pace.start()
        clock.read(count)
        pace.read([count])
    decode(pace, clock, rows, 300)
    return pace


@pytest.mark.parametrize("rows", [4, 8, 16])
def test_a_prompt_that_comes_alone_keeps_to_the_bound(rows: int) -> None:
    clock = Clock(noise=0)
    pace = warm(clock, rows)
    usual = 0.017 + 0.0023 * rows
    unread, gaps = 512, []
    while unread:
        before = clock.now
        pieces = read(pace, clock, unread)
        assert len(pieces) == 1 and (pieces[0] >= LEAST or pieces[0] == unread)
        unread -= sum(pieces)
        decode(pace, clock, rows)
        gaps.append((clock.now - before) / usual)
    assert max(gaps) <= PROMISED
    assert max(gaps) >= 0.95 * BOUND - 0.0016 / usual, "no time is given away either"


@pytest.mark.parametrize("rows", [1, 2])
def test_where_the_bound_leaves_too_little_a_prompt_waits_for_a_long_gap(rows: int) -> None:
    clock = Clock()
    pace = warm(clock, rows)
    assert read(pace, clock, 512) == [128] * 4, "which there may be at once"
    decode(pace, clock, rows)
    passes = 1
    while not (pieces := read(pace, clock, 900)):
        decode(pace, clock, rows)
        passes += 1
    assert LONG_EVERY <= passes <= LONG_EVERY + 1
    assert pieces == [LONGEST] * LONG_CHUNKS, "and the rest in the next one"
    decode(pace, clock, rows)
    assert read(pace, clock, 900 - 512) == []


def test_a_prompt_that_leaves_some_of_a_long_gap_leaves_it_to_the_next() -> None:
    clock = Clock()
    pace = warm(clock, 1)
    assert sum(read(pace, clock, 128)) == 128, "a quarter of it"
    decode(pace, clock, 1)
    passes = 1
    while not read(pace, clock, 900):
        decode(pace, clock, 1)
        passes += 1
    assert LONG_EVERY // 4 <= passes <= LONG_EVERY // 4 + 2


def test_a_lone_answer_that_is_guessed_lets_prompts_be_read() -> None:
    clock = Clock()
    pace = warm(clock, 1)
    assert read(pace, clock, 512)
    tokens = 0
    while not read(pace, clock, 900):
        pace.start()
        clock.read(9)
        pace.checked(9, alone=True)
        tokens += 9
    assert tokens <= LONG_EVERY + 9


def test_prompts_that_were_read_together_teach_what_a_piece_takes() -> None:
    clock = Clock(noise=0)
    pace = Pace(LONGEST, clock=clock)
    pace.start()
    for count in (32, 50, 20):
        clock.read(count)
    pace.read([32, 50, 20])
    decode(pace, clock, 8, 10)
    first = read(pace, clock, 512)
    decode(pace, clock, 8)
    assert first == [LEAST] and LEAST < read(pace, clock, 512)[0] <= 2 * LEAST


def test_the_users_longest_piece_is_kept_to() -> None:
    clock = Clock()
    pace = warm(clock, 16, longest=3)
    for _ in range(20):
        assert read(pace, clock, 512) == [3]
        decode(pace, clock, 16)


def test_pieces_grow_where_prompts_never_cease_and_are_short_again_after_an_idle_time() -> None:
    clock = Clock()
    pace = warm(clock, 8)
    first = read(pace, clock, 512)
    for _ in range(5000):
        decode(pace, clock, 8)
        last = read(pace, clock, 512)
    assert last == [LONGEST]
    pace.rest()
    decode(pace, clock, 8)
    assert first[0] <= 20 and read(pace, clock, 512)[0] <= 32


def test_prompts_that_wait_together_are_read_in_longer_pieces() -> None:
    clock = Clock()
    pace = warm(clock, 8)
    pieces = []
    for prompts in (1, 4, 8):
        for _ in range(5):
            decode(pace, clock, 8)
            piece = pace.tokens(512, prompts, True)
        pieces.append(piece)
    assert pieces[0] + 5 < pieces[1] and pieces[1] + 5 < pieces[2] <= 4 * pieces[0]


def test_a_pass_that_something_else_has_held_up_changes_little() -> None:
    clock = Clock(noise=0)
    pace = warm(clock, 8)
    for _ in range(40):
        decode(pace, clock, 8, 4)
        (before,) = read(pace, clock, 512)
    decode(pace, clock, 8)
    pace.start()
    clock.spend(30.0)
    pace.read([before])
    decode(pace, clock, 8, 6)
    (after,) = read(pace, clock, 512)
    assert before / 2 <= after <= before


def test_a_clock_that_stands_still_bounds_nothing() -> None:
    pace = Pace(LONGEST, clock=lambda: 0.0)
    pace.start()
    pace.read([30])
    for rows in range(1, 9):
        pace.start()
        pace.decoded(rows)
        assert pace.tokens(512, 1, True) == LONGEST


@pytest.mark.parametrize("pause", [0, 10, 50, 200])
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
def test_however_often_long_prompts_come_the_gaps_stay_even(rows: int, pause: int) -> None:
    """Prompts of 512 tokens, and so many passes over the answers after the end of each before the next one."""
    clock = Clock()
    pace = warm(clock, rows)
    gaps: list[float] = []
    unread, rest, ends = 512, 0, 0
    while len(gaps) < 1500:
        before = clock.now
        if unread:
            unread -= sum(read(pace, clock, unread))
            ends, rest = (ends + 1, pause) if not unread else (ends, rest)
        elif rest:
            rest -= 1
        else:
            unread = 512
        decode(pace, clock, rows)
        gaps.append(clock.now - before)
    assert ends >= 3
    for count in (200, 400, 800, 1500):
        assert np.percentile(gaps[:count], 99) <= PROMISED * np.median(gaps[:count])


@pytest.fixture(params=["onnx", pytest.param("mlx", marks=needs_mlx)])
def long_case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """The tiny model with room for prompts of 512 tokens, over either engine."""
    if request.param == "onnx":
        monkeypatch.setattr(tiny, "CONTEXT", 1024)
        folder = tiny.build(tmp_path / "long", eos=[])
    else:
        import tiny_mlx

        config = tiny_mlx.LLAMA | {"max_position_embeddings": 1024}
        folder = tiny_mlx.build(tmp_path / "long", config, eos=[])
    return Case(request.param, request.param, lambda folder, _: folder, long=230, folder=folder)


class TimedPort(FakePort):
    """Keeps when each token of a request was pushed, by the test's clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.times: dict[int, list[float]] = {}

    def push(self, steps: list[Step]) -> list[int]:
        for step in steps:
            if len(step) > 2:
                self.times.setdefault(step[0], []).append(self.clock.now)
        return super().push(steps)  # type: ignore[arg-type]


def serve_timed(case: Case, port: TimedPort, bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serves on the port's clock, on which only passes take time."""
    pace = Pace(LONGEST, bound, port.clock)
    engine = case.batching(port.fail, prefill_chunk=LONGEST, cache_bytes=0, pace=pace)
    rows: Any = engine._rows
    # MLX reads the last token of a prompt in a pass of its own, and the others by `read`.
    reads = "extend" if case.engine == "onnx" else "read"
    real_read, real_decode = getattr(rows, reads), rows.decode

    def read(row: int, tokens: list[int]) -> None:
        port.clock.read(len(tokens))
        real_read(row, tokens)

    def decode(count: int) -> None:
        port.clock.decode(count)
        real_decode(count)

    with monkeypatch.context() as patch:
        patch.setattr(rows, reads, read)
        patch.setattr(rows, "decode", decode)
        loop.serve(engine, port)
    engine.close()
    assert port.violations == [] and port.failures == {}


@pytest.mark.parametrize("running", [1, 8])
def test_answers_go_on_evenly_while_long_prompts_arrive(
    long_case: Case, running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ratio(bound: float) -> float:
        port = TimedPort(Clock())
        port.at(0, *(Admit(id, prompt(id, 8), 500) for id in range(1, running + 1)))
        for n in range(3):
            port.at(40 + n * 300, Admit(100 + n, prompt(100 + n, 512), 1))
        serve_timed(long_case, port, bound, monkeypatch)
        assert all(len(port.answers[100 + n]) == 1 for n in range(3))
        worst = 0.0
        for id in range(1, running + 1):
            gaps = np.diff(port.times[id])[8:]  # without the burst of the beginning
            worst = max(worst, float(np.percentile(gaps, 99) / np.median(gaps)))
        return worst

    assert ratio(BOUND) <= PROMISED < ratio(math.inf)


def test_a_short_prompt_is_read_at_once_and_passes_one_that_waits_for_a_long_gap(
    long_case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = TimedPort(Clock()).at(0, Admit(1, prompt(1, 8), 400))
    lengths = {2: 300, 3: SHORT, 4: SHORT + 1, 5: SHORT}
    for id, at in {2: 30, 3: 60, 4: 70, 5: 80}.items():
        port.at(at, Admit(id, prompt(id, lengths[id]), 1))
    serve_timed(long_case, port, BOUND, monkeypatch)

    def told(id: int) -> int:
        return next(n for n, steps in enumerate(port.pushes) if any(step[0] == id for step in steps))

    assert told(2) <= 33 and told(3) <= 61 and told(5) <= 81
    waited = (
        LONG_EVERY * lengths[2] // (LONG_CHUNKS * LONGEST)
    )  # a prompt that leaves some of a long gap leaves it to the next
    assert 30 + waited <= told(4) <= 40 + waited
    for id, length in lengths.items():
        assert port.answers[id] == long_case.single(prompt(id, length), 1)


def queue(*unread: int) -> tuple[Queue, list[Request]]:
    requests = [Request(Admit(id, [8] * length, 1)) for id, length in enumerate(unread)]  # type: ignore[arg-type]
    queue = Queue()
    for request in requests:
        queue.add(request)
    return queue, requests


def test_the_oldest_and_the_shortest_take_turns() -> None:
    line, (first, _, short, _) = queue(90, 40, 10, 70)
    order = []
    for _ in range(4):
        order.append(line.next(lambda _: True))
        line.turn()
    assert order == [first, short, first, short]


def test_where_the_first_has_no_room_nothing_else_begins() -> None:
    line, (long, short) = queue(900, 10)
    assert line.next(lambda each: each is short) is None
    line.turn()
    assert line.next(lambda each: each is short) is None
    short.row = 3
    assert line.next(lambda each: each is short) is short, "what has begun goes on"
    assert line.next(lambda _: True) is short
    line.turn()
    assert line.next(lambda _: True) is long


def test_what_had_to_make_room_is_read_before_all_else_in_order_of_arrival() -> None:
    line, (a, b, c, d) = queue(50, 5, 60, 70)
    line.remove(d)
    line.remove(c)
    line.add_again(d)
    line.add_again(c)
    line.turn()
    assert line.next(lambda _: True) is c, "neither the oldest nor the shortest"
    assert line.next(lambda each: each is not c) is None
    for again in (c, d):
        assert line.next(lambda _: True) is again
        line.remove(again)
    assert line.next(lambda _: True) is b
    line.turn()
    assert line.next(lambda _: True) is a
