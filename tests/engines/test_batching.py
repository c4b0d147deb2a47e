"""What every engine that batches does with its steps, whatever its arrays are: which prompts are read, how much of them, and whose fault is whose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import plain
import tiny
from cases import Case, prompt
from emberd import loop
from emberd.batching import BatchEngine
from emberd.sampling import Sampler
from emberd.schedule import BURST_CHUNKS
from fakeport import Admit, Cancel, FakePort, Sampling, Settings
from test_controls import CONTROLS


@pytest.mark.parametrize("chunk", [1, 7, 64, 100_000])
def test_the_chunk_size_does_not_change_an_answer(batching_case: Case, chunk: int) -> None:
    port = FakePort().at(0, Admit(1, prompt(1, 130), 20), Admit(2, prompt(2, 61), 20)).at(9, Admit(3, prompt(3, 8), 9))
    batching_case.serve(port, prefill_chunk=chunk)
    for id, length, limit in ((1, 130, 20), (2, 61, 20), (3, 8, 9)):
        assert port.answers[id] == batching_case.single(prompt(id, length), limit)


def test_short_prompts_share_a_step_and_a_long_one_is_not_split_to_fill_it(batching_case: Case) -> None:
    port = FakePort().at(0, *(Admit(id, prompt(id, 20), 3) for id in range(1, 5)))
    batching_case.serve(port, prefill_chunk=50)
    assert [step[0] for step in port.pushes[0]] == [1, 2]
    first_of_third = next(n for n, steps in enumerate(port.pushes) if any(step[0] == 3 for step in steps))
    assert [step[0] for step in port.pushes[first_of_third]] == [3, 4]


def test_prompts_that_come_together_are_read_before_their_answers_go_on(batching_case: Case) -> None:
    port = FakePort().at(0, *(Admit(id, prompt(id, 20), 3) for id in range(1, 5)))
    port.at(1, Admit(5, prompt(5, 20), 3))
    batching_case.serve(port, prefill_chunk=20)
    assert [[step[0] for step in steps] for steps in port.pushes[:6]] == [[1], [2], [3], [4], [5], [1, 2, 3, 4, 5]]
    assert len(port.pushes) == 7


def test_answers_wait_for_so_many_prompts_and_then_go_on(batching_case: Case) -> None:
    port = FakePort().at(0, *(Admit(id, prompt(id, 20), 3) for id in range(1, 14)))
    batching_case.serve(port, prefill_chunk=20)
    first_decode = next(n for n, steps in enumerate(port.pushes) if len(steps) > 1)
    assert first_decode == BURST_CHUNKS


def test_a_short_prompt_is_read_between_the_chunks_of_long_ones(batching_case: Case) -> None:
    port = FakePort().at(0, *(Admit(id, prompt(id, 200), 20) for id in range(1, 9)))
    port.at(3, Admit(9, prompt(9, 10), 5))
    batching_case.serve(port, prefill_chunk=20)
    assert next(iter(port.finishes)) == 9
    told = next(n for n, steps in enumerate(port.pushes) if any(step[0] == 9 for step in steps))
    assert told <= 4, "at most one chunk of another prompt after it came"
    for id in range(1, 9):
        assert port.answers[id] == batching_case.single(prompt(id, 200), 20)


def test_a_long_prompt_is_not_held_up_for_ever_by_short_ones(batching_case: Case) -> None:
    port = FakePort().at(0, Admit(1, prompt(1, 100), 2))
    for n in range(60):
        port.at(n, Admit(10 + n, prompt(n, 20), 1))
    batching_case.serve(port, prefill_chunk=20)
    told = next(n for n, steps in enumerate(port.pushes) if any(step[0] == 1 for step in steps))
    assert told <= 10, "every other chunk is the oldest prompt's"


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_prompts_that_are_read_in_turn_change_places_without_a_change_to_their_answers(
    batching_case: Case, batch: int
) -> None:
    port = FakePort()
    asked = {id: (prompt(id, (90, 45, 70, 30)[id % 4]), 5 + id) for id in range(1, 13)}
    for id, (tokens, limit) in asked.items():
        port.at(id * 2 % 9, Admit(id, tokens, limit))
    batching_case.serve(port, Settings(max_batch=batch), prefill_chunk=16)
    assert port.failures == {}
    for id, (tokens, limit) in asked.items():
        assert port.answers[id] == batching_case.single(tokens, limit)


def test_a_step_is_one_chunk_or_one_token_for_all_in_turn(batching_case: Case) -> None:
    port = FakePort().at(0, Admit(1, prompt(1, 4), 30)).at(3, Admit(2, prompt(2, 160), 2))
    batching_case.serve(port, prefill_chunk=16)
    kinds = ["decode" if any(step[0] == 1 for step in steps) else "chunk" for steps in port.pushes[3:21]]
    assert kinds == ["chunk", "decode"] * 9


def test_a_prompt_that_cannot_be_read_fails_alone(batching_case: Case) -> None:
    port = FakePort().at(0, Admit(1, prompt(1, 5), 20)).at(4, Admit(2, [8, tiny.VOCAB + 1000, 9], 20))
    port.at(5, Admit(3, prompt(3, 5), 20))
    batching_case.run(port)
    assert port.reason is None
    assert list(port.failures) == [2]
    assert port.failures[2].startswith("the prompt cannot be read: ")
    for id in (1, 3):
        assert port.answers[id] == batching_case.single(prompt(id, 5), 20)


def test_logits_that_are_no_numbers_fail_their_request_alone(
    batching_case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Sampler.choose

    def choose(self: Sampler, values: Any, ids: Any, logits: Any, n: int, room: Any) -> Any:
        spoilt = np.nan if (self._sampling.seed, n) == (13, 4) else 1.0
        return real(self, values * spoilt, ids, logits * spoilt, n, room)

    monkeypatch.setattr(Sampler, "choose", choose)
    port = FakePort().at(0, *(Admit(id, prompt(id, 5), 12, Sampling(seed=10 + id)) for id in range(1, 6)))
    batching_case.run(port)
    assert port.failures == {3: "no token can be drawn: the highest logit is nan"}
    assert len(port.answers[3]) == 4
    monkeypatch.undo()
    for id in (1, 2, 4, 5):
        assert port.answers[id] == batching_case.single(prompt(id, 5), 12, Sampling(seed=10 + id))


def test_a_pass_over_the_batch_that_fails_is_the_engines_failure(
    batching_case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(1000))
    real = loop.load

    def load(launch: Any) -> BatchEngine:
        engine = real(launch)
        assert isinstance(engine, BatchEngine)
        decode = engine._rows.decode

        def failing(count: int) -> None:
            if next(calls) == 3:
                raise MemoryError("no room for the pass")
            decode(count)

        monkeypatch.setattr(engine._rows, "decode", failing)
        return engine

    monkeypatch.setattr(loop, "load", load)
    port = FakePort().at(0, Admit(1, prompt(1, 5), 20), Admit(2, prompt(2, 5), 20))
    batching_case.run(port)
    assert port.reason is not None
    assert port.reason.startswith(f"the {batching_case.engine} engine failed: MemoryError: no room for the pass\n")
    assert port.finishes == {} and port.failures == {}


def test_rows_close_up_when_sequences_leave_in_any_order(batching_case: Case) -> None:
    for order in ([1, 2, 3, 4, 5], [5, 4, 3, 2, 1], [3, 1, 5, 2, 4]):
        port = FakePort().at(0, *(Admit(id, prompt(id, 3 * id), 60) for id in range(1, 7)))
        for place, id in enumerate(order):
            port.at(10 + 2 * place, Cancel(id))
        batching_case.run(port)
        assert port.answers[6] == batching_case.single(prompt(6, 18), 60)
        for place, id in enumerate(order):
            cut = port.answers[id]
            assert 9 + 2 * place <= len(cut) + 1 <= 12 + 2 * place
            assert cut == batching_case.single(prompt(id, 3 * id), 60)[: len(cut)]


def test_a_prompt_in_prefill_is_not_disturbed_when_running_answers_leave(batching_case: Case) -> None:
    port = FakePort().at(0, *(Admit(id, prompt(id, 4), 60) for id in range(1, 5)))
    port.at(5, Admit(9, prompt(9, 150), 20)).at(9, Cancel(1)).at(11, Cancel(4), Cancel(2))
    batching_case.serve(port, prefill_chunk=16)
    assert port.answers[9] == batching_case.single(prompt(9, 150), 20)
    assert port.answers[3] == batching_case.single(prompt(3, 4), 60)


def test_every_sampler_and_penalty_gives_in_a_batch_what_its_logits_say(
    batching_case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[int, list[Any]] = {}
    real = Sampler.choose

    def recorded(self: Sampler, values: Any, ids: Any, logits: Any, n: int, room: Any) -> Any:
        seen.setdefault(self._sampling.seed, []).append(np.array(logits, np.float32))
        return real(self, values, ids, logits, n, room)

    asked: dict[int, Admit] = {}
    for id, sampling in enumerate(CONTROLS.values(), 1):
        bias = {token % tiny.VOCAB: bias for token, bias in sampling.logit_bias.items()}
        top = id % 7 if id % 3 else None
        own = replace(sampling, seed=id, logit_bias=bias, top_logprobs=top, top_k=sampling.top_k % 300)
        asked[id] = Admit(id, prompt(id, 3 + id), 25, own)
    port = FakePort()
    for id, order in asked.items():
        port.at(id % 5, order, Admit(100 + id, prompt(id, 9), 20))
    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "choose", recorded)
        batching_case.run(port, max_batch=8)
    assert port.reason is None and port.failures == {}
    single = FakePort()
    for id, order in asked.items():
        single.at(1000 * id, order, Admit(100 + id, prompt(id, 9), 20))
    batching_case.run(single, max_batch=1, cache_bytes=0)
    assert port.answers == single.answers, "whatever else is in the batch"
    for id, order in asked.items():
        found, sampling = port.answers[id], order.sampling
        assert sampling is not None and len(found) == len(seen[id]) == 25
        for n, row in enumerate(seen[id]):
            assert found[n] == plain.choose(row, sampling, order.prompt, found[:n]), f"token {n} of {sampling}"
        told = port.logprobs.get(id, [])
        assert len(told) == (0 if sampling.top_logprobs is None else 25)
        for n, (own, top) in enumerate(told):
            expected = plain.log_probabilities(seen[id][n])
            assert own == pytest.approx(expected[found[n]], abs=2e-5)
            likeliest = np.argsort(-seen[id][n], kind="stable")[: sampling.top_logprobs]
            assert [each for each, _ in top] == likeliest.tolist()
