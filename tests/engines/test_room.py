"""The memory for keys and values of running requests, over every engine that batches: what has no room waits or makes room, and no answer changes by it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cases import CASES, Case, prompt
from emberd import loop
from emberd.engine import Logprob, Request, Step
from fakeport import Admit, Cancel, FakePort, Sampling, Settings

FOREVER = 1000
"""Pushes between requests of which each has the engine to itself."""

GROWING = ("onnx", "concat", "mlx", "mlx-sliding", "mlx-hybrid")
"""Engines whose caches grow with the text, which those of recurrent layers alone do not."""


@pytest.fixture(params=[case for case in CASES if case.name in GROWING], ids=lambda case: case.name)
def case(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Case:
    """Each engine in turn."""
    return replace(request.param, folder=folders[request.param.name])


class Served:
    """What happened in a run under a budget."""

    def __init__(self) -> None:
        self.preempted: list[int] = []
        """Ids in order, and after how many pushes."""
        self.pushes: list[int] = []
        self.resumed: dict[int, int] = {}
        """After how many pushes each was running again, the first time."""


def serve(
    case: Case,
    port: FakePort,
    kv_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    chunk: int = 32,
    cache_bytes: int = 0,
    max_batch: int = 16,
) -> Served:
    """Serves, and writes down who makes room and who is back."""
    served = Served()
    engine = case.batching(
        lambda id, text: port.fail(id, text),
        Settings(max_batch=max_batch),
        prefill_chunk=chunk,
        cache_bytes=cache_bytes,
        kv_bytes=kv_bytes,
    )
    step, preempt = engine.step, engine._preempt

    def checked() -> list[Step]:
        before = {each.id for each in engine._running}
        made = step()
        for id in {each.id for each in engine._running} - before:
            if id in served.preempted:
                served.resumed.setdefault(id, len(port.pushes))
        held = [each for each in engine._prompts if each.row is None and each.room]
        assert held == [], "what waits holds nothing"
        return made

    def counted(request: Request) -> None:
        served.preempted.append(request.id)
        served.pushes.append(len(port.pushes))
        preempt(request)

    monkeypatch.setattr(engine, "step", checked)
    monkeypatch.setattr(engine, "_preempt", counted)
    loop.serve(engine, port)
    assert engine._budget.has(1, 0) or not engine._budget.could_hold(1), "all has been given back"
    assert not engine.busy
    engine.close()
    assert port.violations == []
    return served


def alone(case: Case, *orders: Admit) -> FakePort:
    """The answers to requests of which each has an engine to itself that keeps nothing and has all the memory."""
    port = FakePort()
    for place, order in enumerate(orders):
        port.at(place * FOREVER, order)
    case.run(port, cache_bytes=0)
    assert port.reason is None and port.failures == {}
    return port


def assert_close(told: list[Logprob], expected: list[Logprob]) -> None:
    """Passes of other shapes round otherwise."""
    assert [[id for id, _ in top] for _, top in told] == [[id for id, _ in top] for _, top in expected]
    assert np.allclose([value for value, _ in told], [value for value, _ in expected], atol=1e-4)


def test_a_prompt_that_could_never_have_room_fails_with_the_reason(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    port = FakePort().at(0, Admit(1, prompt(1, 129), 5), Admit(2, prompt(2, 120), 5))
    serve(case, port, case.kv_bytes(1, 128), monkeypatch)
    assert list(port.failures) == [1]
    said, _, hint = port.failures[1].partition("; hint: ")
    assert said.startswith("the prompt of 129 tokens needs ")
    assert hint == "raise --kv-bytes, or make the prompt or its answer shorter"
    needed, there = (int(word) for word in said.split() if word.isdigit() and word != "129")
    assert needed > there > 0
    assert port.answers[2] == case.single(prompt(2, 120), 5)


def test_an_answer_that_outgrows_all_the_room_fails_alone(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    port = FakePort().at(0, Admit(1, prompt(1, 100), 100), Admit(2, prompt(2, 60), 10))
    serve(case, port, case.kv_bytes(1, 128), monkeypatch)
    assert list(port.failures) == [1]
    assert port.failures[1].startswith("an answer that has come to 129 tokens with its prompt needs ")
    assert "; hint: raise --kv-bytes" in port.failures[1]
    assert port.answers[1] == case.single(prompt(1, 100), 100)[:29]
    assert port.answers[2] == case.single(prompt(2, 60), 10)


def test_an_answer_may_use_the_last_token_of_the_room(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    port = FakePort().at(0, Admit(1, prompt(1, 100), 29))  # the last token of an answer is not run
    serve(case, port, case.kv_bytes(1, 128), monkeypatch)
    assert port.answers[1] == case.single(prompt(1, 100), 29)


def test_without_any_room_every_request_fails_and_none_hangs(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    port = FakePort().at(0, *(Admit(id, prompt(id, 5), 5) for id in range(1, 4)))
    serve(case, port, 0, monkeypatch)
    assert sorted(port.failures) == [1, 2, 3]


def test_the_settings_reach_the_budget(case: Case) -> None:
    port = FakePort().at(0, Admit(1, prompt(1, 129), 5))
    case.run(port, kv_bytes=case.kv_bytes(1, 128, chunk=128))
    assert list(port.failures) == [1]


def test_a_request_waits_for_room_and_may_be_cancelled_meanwhile(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    port = FakePort().at(0, *(Admit(id, prompt(id, 60), 40) for id in range(1, 5))).at(6, Cancel(2)).leave(9, 3)
    served = serve(case, port, case.kv_bytes(1, 128), monkeypatch)
    assert served.preempted == []
    assert port.answers[2] == port.answers[3] == [] and list(port.finishes) == [1, 4]
    assert port.answers[4] == case.single(prompt(4, 60), 40)


def test_prompts_that_have_no_room_wait_in_order(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short ones that would find room do not pass a long one that waits for it."""
    port = FakePort().at(0, Admit(1, prompt(1, 60), 60)).at(4, Admit(2, prompt(2, 190), 5))
    port.at(5, *(Admit(id, prompt(id, 10), 5) for id in range(3, 6)))
    served = serve(case, port, case.kv_bytes(1, 256), monkeypatch)
    assert served.preempted == []
    assert list(port.finishes)[:2] == [1, 2]
    for id, (length, limit) in {1: (60, 60), 2: (190, 5), 3: (10, 5), 4: (10, 5), 5: (10, 5)}.items():
        assert port.answers[id] == case.single(prompt(id, length), limit)


@pytest.mark.parametrize("cache_bytes", [0, 1 << 26], ids=["nothing kept", "all kept"])
def test_the_newest_answer_makes_room_and_goes_on_where_it_was(
    case: Case, monkeypatch: pytest.MonkeyPatch, cache_bytes: int
) -> None:
    hot = Sampling(
        temperature=1.2, seed=5, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2, top_logprobs=3
    )
    port = FakePort().at(0, Admit(1, prompt(1, 50), 140)).at(2, Admit(2, prompt(2, 50), 140, hot))
    served = serve(case, port, case.kv_bytes(2, 128), monkeypatch, cache_bytes=cache_bytes)
    assert served.preempted and set(served.preempted) == {2} == served.resumed.keys()
    expected = alone(case, Admit(2, prompt(2, 50), 140, hot))
    assert port.answers == {1: case.single(prompt(1, 50), 140), 2: expected.answers[2]}
    assert_close(port.logprobs[2], expected.logprobs[2])
    assert port.cached == {}, "what it read again was its own"


def test_those_that_made_room_are_read_before_those_that_came_since(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = FakePort().at(0, *(Admit(id, prompt(id, 60), 80) for id in range(1, 4)))
    for n in range(12):
        port.at(10 + n, Admit(10 + n, prompt(10 + n, 20), 2))
    served = serve(case, port, case.kv_bytes(3, 128, chunk=256), monkeypatch, chunk=256)
    assert served.preempted[0] == 3
    left, back = served.pushes[0], served.resumed[3]
    began = [next(n for n, steps in enumerate(port.pushes) if any(s[0] == id for s in steps)) for id in range(10, 22)]
    assert back > left + 2
    assert not any(left <= n < back for n in began) and any(n > back for n in began)
    for id in range(1, 4):
        assert port.answers[id] == case.single(prompt(id, 60), 80)


def sampling(rng: random.Random) -> Sampling | None:
    seed = rng.randrange(2**64)
    return rng.choice(
        [
            None,
            None,
            Sampling(temperature=1.1, top_p=0.95, seed=seed),
            Sampling(temperature=1.4, seed=seed, frequency_penalty=0.7, presence_penalty=0.3, logit_bias={9: 2.0}),
            Sampling(temperature=0.0, repetition_penalty=1.2, top_logprobs=2),
        ]
    )


@pytest.mark.parametrize("seed", range(3))
def test_whatever_joins_leaves_and_makes_room_the_answers_are_those_of_single_runs(
    case: Case, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    port = FakePort()
    asked: dict[int, Admit] = {}
    cancelled = set()
    for id in range(1, 25):
        text = prompt(rng.randrange(3), rng.choice((0, 40, 70))) + prompt(id, rng.randint(1, 60))
        asked[id] = Admit(id, text, rng.randint(1, 120), sampling(rng), salt=rng.choice("ab"))
        start = rng.randint(0, 150)
        port.at(start, asked[id])
        if rng.random() < 0.3:
            cancelled.add(id)
            end = start + rng.randint(1, 60)
            port.at(end, Cancel(id)) if rng.random() < 0.5 else port.leave(end, id)
    serve(
        case,
        port,
        case.kv_bytes(rng.randint(1, 3), 256),
        monkeypatch,
        chunk=rng.choice((16, 40, 128)),
        cache_bytes=rng.choice((0, 4, 12, 100)) * case.kv_bytes(1, 64),
        max_batch=rng.choice((3, 6, 16)),
    )
    assert port.failures == {}
    expected = alone(case, *asked.values())
    for id, order in asked.items():
        answer = port.answers.get(id, [])
        assert id in cancelled or len(answer) == order.max_tokens
        assert answer == expected.answers[id][: len(answer)]
        if order.sampling is not None and order.sampling.top_logprobs is not None:
            assert_close(port.logprobs.get(id, []), expected.logprobs[id][: len(answer)])


@pytest.mark.parametrize("hot", [False, True], ids=["greedy", "sampled"])
def test_such_runs_do_make_answers_give_way(case: Case, monkeypatch: pytest.MonkeyPatch, hot: bool) -> None:
    orders = [Admit(id, prompt(id, 30), 130, Sampling(seed=id) if hot else None) for id in range(1, 9)]
    port = FakePort().at(0, *orders)
    served = serve(case, port, case.kv_bytes(3, 128), monkeypatch)
    assert served.preempted
    assert all(len(answer) == 130 for answer in port.answers.values()) and len(port.answers) == 8
    assert port.answers == alone(case, *orders).answers
