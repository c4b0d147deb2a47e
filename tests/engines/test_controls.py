"""Penalties, biases, min-p and log probabilities against the plain reference over the full row of logits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

import plain
import tiny
from cases import Case, prompt
from emberd.adjust import Adjustments
from emberd.engine import Request
from emberd.rows import Rows
from emberd.sampling import CANDIDATES, LOWEST_LOGPROB, Room, Sampler, draw, highest, logprob, uniform
from fakeport import Admit, FakePort, Sampling

VOCAB = 3000
PROMPT = [5, 17, 17, 2999, 40, 41, 42, 0]

CONTROLS = {
    "greedy": Sampling(0.0),
    "greedy, repetition": Sampling(0.0, repetition_penalty=1.3),
    "greedy, rewarded repetition": Sampling(0.0, repetition_penalty=0.6),
    "greedy, presence": Sampling(0.0, presence_penalty=1.5),
    "greedy, frequency": Sampling(0.0, frequency_penalty=2.0),
    "greedy, rewarded frequency": Sampling(0.0, frequency_penalty=-0.5),
    "greedy, bias": Sampling(0.0, logit_bias={7: 3.0, 8: -100.0, 2999: 0.25}),
    "greedy, all": Sampling(0.0, 1.0, 0, 0, 0.0, 1.2, 0.7, 0.3, {11: 4.0, 5: -2.0}),
    "repetition": Sampling(1.0, seed=1, repetition_penalty=1.5),
    "bias": Sampling(1.2, seed=2, logit_bias={7: 5.0, 1: -100.0, 2: 100.0 / 16}),
    "all": Sampling(0.9, 1.0, 0, 3, 0.0, 1.1, 0.5, 0.5, {11: 2.0}),
    "all, top_k": Sampling(0.9, 1.0, 30, 4, 0.0, 1.1, 0.5, 0.5, {11: 2.0}),
    "all, wide top_k": Sampling(2.0, 1.0, 400, 5, 0.0, 1.1, 0.5, 0.5, {11: 2.0}),
    "all, top_p": Sampling(1.0, 0.8, 0, 6, 0.0, 1.4, -0.5, 1.5, {11: 2.0}),
    "all, min_p": Sampling(1.0, 1.0, 0, 7, 0.05, 1.4, -0.5, 1.5, {11: 2.0}),
    "all filters": Sampling(1.5, 0.9, 50, 8, 0.02, 1.1, 0.1, 0.1, {11: 2.0}),
    "min_p": Sampling(1.0, seed=9, min_p=0.1),
    "small min_p": Sampling(3.0, seed=10, min_p=1e-4),
    "min_p and top_p": Sampling(1.5, top_p=0.7, seed=11, min_p=0.2),
    "small min_p and top_p": Sampling(4.0, top_p=0.97, seed=11, min_p=1e-6),
    "min_p and top_k": Sampling(1.5, top_k=20, seed=12, min_p=0.2),
    "min_p of 1": Sampling(1.5, seed=12, min_p=1.0),
}


def rows(kind: str, count: int) -> list[NDArray[np.floating]]:
    """Rows of logits, always the same; the likeliest tokens of one are likely in the next, as in a text that repeats."""
    rng = np.random.Generator(np.random.PCG64(23))
    common = rng.standard_normal(VOCAB)
    result: list[NDArray[np.floating]] = []
    for _ in range(count):
        row = {
            "peaked": 4.0 * (common + 0.3 * rng.standard_normal(VOCAB)),
            "flat": 0.3 * (common + rng.standard_normal(VOCAB)),
            "level": np.round(common + 0.2 * rng.standard_normal(VOCAB)),
            "half": 4.0 * (common + 0.3 * rng.standard_normal(VOCAB)),
            "masked": np.where(np.arange(VOCAB) % 3, 2.0 * common, -np.inf),
        }[kind]
        result.append(row.astype(np.float16 if kind == "half" else np.float32))
    return result


def answer(logits: list[NDArray[np.floating]], sampling: Sampling, seen: list[int]) -> list[int]:
    """What a sampler makes of the rows, one token each."""
    sampler, room = Sampler(sampling, seen), Room(VOCAB)
    return [sampler.choose(*highest(row), row, n, room)[0] for n, row in enumerate(logits)]


@pytest.mark.parametrize("kind", ["peaked", "flat", "level", "half", "masked"])
@pytest.mark.parametrize("name", CONTROLS)
def test_every_token_is_that_of_the_full_row(kind: str, name: str) -> None:
    logits, sampling = rows(kind, 60), CONTROLS[name]
    found = answer(logits, sampling, PROMPT)
    for n, row in enumerate(logits):
        assert found[n] == plain.choose(row, sampling, PROMPT, found[:n]), f"token {n}"


def test_the_penalties_change_what_is_said() -> None:
    logits = rows("peaked", 60)
    plainly = answer(logits, Sampling(0.0), PROMPT)
    assert len(set(plainly)) < 20
    for name in ("greedy, repetition", "greedy, presence", "greedy, frequency"):
        assert len(set(answer(logits, CONTROLS[name], PROMPT))) > len(set(plainly)), name
    for name in ("greedy, rewarded repetition", "greedy, rewarded frequency"):
        assert len(set(answer(logits, CONTROLS[name], PROMPT))) < len(set(plainly)), name


def test_the_prompt_counts_for_the_repetition_penalty_and_for_no_other() -> None:
    row = np.zeros((1, VOCAB), np.float32)
    row[0, 9], row[0, 8] = 2.0, 1.5
    assert answer(list(row), Sampling(0.0, repetition_penalty=2.0), [9]) == [8]
    assert answer(list(row), Sampling(0.0, presence_penalty=2.0, frequency_penalty=2.0), [9]) == [9]


def test_a_token_that_is_as_likely_as_it_was_told_twice_is_penalised_twice() -> None:
    row = np.zeros(VOCAB, np.float32)
    row[9], row[8] = 3.0, 1.5
    assert answer([row] * 4, Sampling(0.0, frequency_penalty=1.0), []) == [9, 9, 8, 9]
    assert answer([row] * 4, Sampling(0.0, presence_penalty=1.0), []) == [9, 9, 9, 9]


def test_bias_can_ban_and_can_force() -> None:
    for row in rows("peaked", 20):
        best = int(row.argmax())
        assert answer([row], Sampling(0.0, logit_bias={best: -100.0}), []) != [best]
        assert answer([row], Sampling(1.0, seed=3, logit_bias={1234: 100.0}), []) == [1234]


@pytest.mark.parametrize("size", [1, 40, CANDIDATES, VOCAB])
@pytest.mark.parametrize("kind", ["peaked", "level"])
def test_the_highest_of_an_adjusted_row_are_the_first_of_its_order(kind: str, size: int) -> None:
    row = rows(kind, 1)[0]
    rng = np.random.Generator(np.random.PCG64(5))
    sampling = replace(CONTROLS["greedy, all"], logit_bias={int(each): 3.0 for each in rng.integers(0, VOCAB, 30)})
    adjustments = Adjustments.of(sampling, PROMPT)
    assert adjustments is not None
    for token in np.argsort(-row)[:90:3].tolist() * 2:
        adjustments.count(token)
    changed = adjustments.apply(row, np.zeros(VOCAB, np.float32))
    values, ids = adjustments.highest(*highest(row, size), changed)
    order = np.argsort(-changed, kind="stable")
    assert ids.tolist() == order[: len(ids)].tolist()
    assert values.tolist() == changed[ids].tolist()
    assert size < VOCAB or len(ids) == VOCAB


def test_a_row_whose_candidates_are_all_pushed_down_is_sorted_anew() -> None:
    row = rows("peaked", 1)[0]
    down = {int(each): -100.0 for each in np.argsort(-row)[: CANDIDATES + 5]}
    for sampling in (Sampling(0.0, logit_bias=down), Sampling(1.0, seed=2, logit_bias=down)):
        [token] = answer([row], sampling, [])
        assert token not in down
        assert token == plain.choose(row, sampling, [], [])


@pytest.mark.parametrize("kind", ["peaked", "flat", "masked"])
@pytest.mark.parametrize(
    "name", ["min_p", "small min_p", "min_p and top_p", "min_p and top_k", "small min_p and top_p"]
)
def test_every_token_gets_its_exact_share_under_min_p(kind: str, name: str) -> None:
    [row], sampling, grid = rows(kind, 1), CONTROLS[name], 3000
    drawn = [draw(*highest(row), row, sampling, (i + 0.5) / grid) for i in range(grid)]
    counts = np.bincount(drawn, minlength=VOCAB)
    assert np.abs(counts - plain.probabilities(row, sampling) * grid).max() <= 1.0 + 1e-3


def test_min_p_keeps_what_is_just_likely_enough() -> None:
    row = np.log(np.array([0.5, 0.25, 0.2, 0.05], np.float64)).astype(np.float32)
    for min_p, expected in ((0.05, {0, 1, 2, 3}), (0.3, {0, 1, 2}), (0.45, {0, 1}), (0.6, {0}), (1.0, {0})):
        drawn = {draw(*highest(row), row, Sampling(min_p=min_p), i / 200) for i in range(200)}
        assert drawn == expected


# Log probabilities.


@pytest.mark.parametrize("kind", ["peaked", "flat", "level", "half", "masked"])
def test_log_probabilities_are_the_models_own(kind: str) -> None:
    room = Room(VOCAB)
    for sampling in (CONTROLS["greedy"], CONTROLS["all filters"], Sampling(3.0, seed=4)):
        asking = replace(sampling, top_logprobs=20)
        sampler = Sampler(asking, PROMPT)
        for n, row in enumerate(rows(kind, 10)):
            token, told = sampler.choose(*highest(row), row, n, room)
            assert told is not None
            expected = plain.log_probabilities(row)
            assert told[0] == pytest.approx(max(expected[token], LOWEST_LOGPROB), abs=2e-5)
            assert [id for id, _ in told[1]] == np.argsort(-row, kind="stable")[:20].tolist()
            assert [each for _, each in told[1]] == pytest.approx([expected[id] for id, _ in told[1]], abs=2e-5)


def test_asking_for_log_probabilities_changes_no_token() -> None:
    logits = rows("peaked", 30)
    for sampling in CONTROLS.values():
        asking = replace(sampling, top_logprobs=0)
        assert answer(logits, asking, PROMPT) == answer(logits, sampling, PROMPT)


def test_a_token_that_cannot_come_has_a_number_all_the_same() -> None:
    row = np.array([0.0, -np.inf, -np.inf], np.float32)
    assert logprob(*highest(row), row, 1, 3) == (LOWEST_LOGPROB, [(0, 0.0), (1, LOWEST_LOGPROB), (2, LOWEST_LOGPROB)])
    with pytest.raises(ValueError, match="sum to nan"):
        logprob(np.zeros(1), np.zeros(1, np.int64), np.array([0.0, np.nan]), 0, 1)


# Through the engine.


@pytest.mark.parametrize("heads", ["onnx", "onnx-logits-only"])
def test_the_engines_tokens_are_those_of_its_full_logits(
    heads: str, folders: dict[str, object], onnx_case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[int, list[NDArray[np.floating]]] = {}
    real = Rows.draw

    def recorded(self: Rows, row: int, request: Request) -> int:
        seen.setdefault(request.id, []).append(self._logits[row, 0].copy())
        return real(self, row, request)

    monkeypatch.setattr(Rows, "draw", recorded)
    case = replace(onnx_case, folder=folders[heads])
    port = FakePort()
    asked: dict[int, tuple[list[int], Sampling]] = {}
    for id, sampling in enumerate(CONTROLS.values(), 1):
        bias = {token % tiny.VOCAB: bias for token, bias in sampling.logit_bias.items()}
        asked[id] = (prompt(id, 3 + id), replace(sampling, logit_bias=bias, top_logprobs=id % 7 if id % 3 else None))
        port.at(id % 5, Admit(id, asked[id][0], 30, asked[id][1]))
        port.at(id % 5, Admit(100 + id, prompt(id, 9), 20))
    case.run(port, max_batch=8)
    assert port.reason is None and port.failures == {}
    for id, (tokens, sampling) in asked.items():
        found = port.answers[id]
        assert len(found) == 30
        for n, row in enumerate(seen[id]):
            assert found[n] == plain.choose(row, sampling, tokens, found[:n]), f"token {n} of {sampling}"
        told = port.logprobs.get(id, [])
        assert len(told) == (0 if sampling.top_logprobs is None else 30)
        for n, (own, top) in enumerate(told):
            expected = plain.log_probabilities(seen[id][n])
            assert own == pytest.approx(expected[found[n]], abs=2e-5)
            assert [each for each, _ in top] == np.argsort(-seen[id][n], kind="stable")[
                : sampling.top_logprobs
            ].tolist()
        assert case.single(tokens, 30, sampling) == found, "whatever else is in the batch"
        assert port.answers[100 + id] == case.single(prompt(id, 9), 20), "greedy neighbours stay greedy"


def test_a_seed_is_a_seed_under_penalties_too(onnx_case: Case) -> None:
    def told(seed: int) -> list[int]:
        sampling = Sampling(1.0, seed=seed, repetition_penalty=1.2, frequency_penalty=0.5)
        return onnx_case.single(prompt(4, 9), 20, sampling)

    assert told(1) == told(1) != told(2)
    assert uniform(1, 0) != uniform(2, 0)
