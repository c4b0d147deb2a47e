"""Speculation without a draft model: what is guessed, when a guess is checked, and that the answers are those of plain runs.

Most tests guess with `Oracle`, which knows the plain answer and errs on purpose, and let checks cost nothing: then every
step is a check wherever one is possible.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import tiny
from cases import Case, prompt
from emberd import verify
from emberd.rows import Rows
from emberd.sampling import Sampler
from emberd.session import Model
from emberd.speculate import NGRAM, Drafter, Rates
from emberd.verify import MARGIN, Costs, Speculation
from fakeport import Admit, Cancel, FakePort, Sampling, Settings

if importlib.util.find_spec("mlx"):
    from emberd.mlx_rows import MlxRows
else:
    MlxRows = None

POSITIONS = 32


class Prices(Costs):
    """Costs that a test sets: of a plain pass, and of a check."""

    def __init__(self, check: float = 0.01, token: float = 0.0) -> None:
        super().__init__(lambda: 0.0)
        self._check, self._token = check, token

    @property
    def known(self) -> bool:
        return True

    def plain(self, rows: int) -> float:
        return float(rows)

    def check(self, tokens: int) -> float:
        return self._check + self._token * tokens


class Oracle(Drafter):
    """Guesses what the plain answer says; one guessed token in six is wrong."""

    answers: dict[tuple[int, ...], list[int]]

    def __init__(self, text: list[int], rates: Rates) -> None:
        super().__init__(text, rates)
        self._plain = self.answers[tuple(text)]
        self._rng = random.Random(len(text))
        self._done = 0

    def follow(self, answer: Sequence[int]) -> None:
        self._done = len(answer)
        self.agreed = 16

    def draft(self, count: int) -> list[int]:
        count = self._rng.randint(1, count)
        rest = [*self._plain[self._done :], *[9] * count][:count]
        return [token if self._rng.random() < 5 / 6 else (token + 1) % tiny.VOCAB for token in rest]


def _mlx(folder: Path, eos: list[int]) -> Path:
    import tiny_mlx

    return tiny_mlx.build(folder, eos=eos)


TARGETS = [
    Case("onnx", "onnx", lambda folder, eos: tiny.build(folder, eos=eos, positions=POSITIONS), long=230),
    *([Case("mlx", "mlx", _mlx, long=230)] if importlib.util.find_spec("mlx") else []),
]
"""Engines that can check guesses; that over ONNX on a graph with logits of every position of a short pass."""


@pytest.fixture(scope="module", params=TARGETS, ids=lambda case: case.name)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Each of them in turn."""
    case: Case = request.param
    return replace(case, folder=case.build(tmp_path_factory.mktemp("positions"), []))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny graph with logits of every position."""
    return tiny.build(tmp_path_factory.mktemp("positions"), eos=[], positions=POSITIONS)


def serve(case: Case, port: FakePort, costs: Costs | None, cache_bytes: int = 0, **settings: int) -> FakePort:
    """Serves with these costs."""
    case.serve(port, Settings(**settings), prefill_chunk=32, cache_bytes=cache_bytes, costs=costs)
    assert port.reason is None
    return port


def plain(case: Case, order: Admit) -> FakePort:
    """One request alone, without speculation."""
    return serve(case, FakePort().at(0, replace(order, id=1, speculation=0)), Prices())


def answered(case: Case, order: Admit) -> list[int]:
    """The answer to it."""
    return plain(case, order).answers[1]


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[tuple[int, ...], list[int]]]:
    """Lets the engine guess with `Oracle`; maps prompts to plain answers."""
    answers: dict[tuple[int, ...], list[int]] = {}
    monkeypatch.setattr(Oracle, "answers", answers, raising=False)
    monkeypatch.setattr(verify, "Drafter", Oracle)
    yield answers


SAMPLINGS = [
    None,
    Sampling(temperature=0.9, seed=3),
    Sampling(temperature=1.2, top_p=0.9, top_k=40, seed=2**63),
    Sampling(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3),
    Sampling(
        temperature=0.8,
        min_p=0.02,
        seed=5,
        repetition_penalty=1.2,
        frequency_penalty=0.7,
        logit_bias={20: 6.0, 21: -50.0},
        top_logprobs=4,
    ),
    Sampling(temperature=0.0, top_logprobs=0),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_answers_are_those_of_plain_runs(
    target: Case, oracle: dict[tuple[int, ...], list[int]], sampling: Sampling | None
) -> None:
    order = Admit(1, prompt(4, 25), 90, sampling)
    alone = plain(target, order)
    oracle[tuple(order.prompt)] = alone.answers[1]
    port = serve(target, FakePort().at(0, order), Prices())
    assert port.answers == alone.answers and port.finishes == {1: "length"}
    several = [len(step[1]) for steps in port.pushes for step in steps if len(step[1]) > 1]
    assert len(several) >= 5 and len(port.pushes) < len(alone.pushes) / 2
    for (logprob, top), (expected, likeliest) in zip(port.logprobs.get(1, []), alone.logprobs.get(1, []), strict=True):
        # A pass of several tokens takes other kernels than a pass of one.
        assert logprob == pytest.approx(expected, abs=1e-4)
        assert [id for id, _ in top] == [id for id, _ in likeliest]
        assert [each for _, each in top] == pytest.approx([each for _, each in likeliest], abs=1e-4)
    assert len(port.logprobs.get(1, [])) == (90 if sampling and sampling.top_logprobs is not None else 0)


@pytest.mark.parametrize("seed", range(4))
def test_answers_are_those_of_plain_runs_whatever_joins_and_leaves(
    target: Case, oracle: dict[tuple[int, ...], list[int]], seed: int
) -> None:
    rng = random.Random(seed)
    port = FakePort()
    orders: dict[int, Admit] = {}
    cancelled = set()
    for id in range(1, 17):
        sampling = rng.choice(SAMPLINGS[:5])
        order = Admit(
            id,
            prompt(seed * 100 + id, rng.randint(1, 70)),
            rng.randint(1, 60),
            sampling,
            speculation=rng.choice([None, 0, 3]),
        )
        orders[id] = order
        oracle[tuple(order.prompt)] = answered(target, order)
        start = rng.randint(0, 20)
        port.at(start, order)
        if rng.random() < 0.4:
            cancelled.add(id)
            if rng.random() < 0.5:
                port.at(start + rng.randint(1, 20), Cancel(id))
            else:
                port.leave(start + rng.randint(1, 20), id)
    serve(target, port, Prices(), max_batch=4)
    assert port.failures == {}
    for id, order in orders.items():
        answer = port.answers.get(id, [])
        assert answer == oracle[tuple(order.prompt)][: len(answer)]
        assert id in cancelled or len(answer) == order.max_tokens
    most = max(len(step[1]) for steps in port.pushes for step in steps)
    assert most > (4 if target.engine == "onnx" else 1), "over MLX an answer is guessed only while it runs alone"


def test_a_limit_is_kept_and_none_is_one_token_a_push(target: Case, oracle: dict[tuple[int, ...], list[int]]) -> None:
    sizes = {}
    for limit in (0, 1, 5, 64, None):
        order = Admit(1, prompt(6, 20), 80, speculation=limit)
        oracle[tuple(order.prompt)] = answered(target, order)
        port = serve(target, FakePort().at(0, order), Prices())
        sizes[limit] = {len(step[1]) for steps in port.pushes for step in steps}
        assert port.answers[1] == oracle[tuple(order.prompt)]
    assert sizes[0] == {0, 1} or sizes[0] == {1}
    assert max(sizes[1]) == 2 and 2 < max(sizes[5]) <= 6
    assert max(sizes[64]) > 6 and max(sizes[None]) > 6


def test_an_eos_id_within_a_guess_ends_the_answer(
    target: Case, oracle: dict[tuple[int, ...], list[int]], tmp_path: Path
) -> None:
    whole = answered(target, Admit(1, prompt(3, 12), 40))
    place = next(place for place in range(10, 40) if whole[place] not in whole[:place])
    ended = target.with_eos(tmp_path, [whole[place]])
    oracle[tuple(prompt(3, 12))] = whole
    ids = (1, 2) if target.engine == "onnx" else (1,)  # over MLX none is guessed beside another
    port = serve(ended, FakePort().at(0, *(Admit(id, prompt(3, 12), 40) for id in ids)), Prices())
    assert port.answers == dict.fromkeys(ids, whole[: place + 1])
    assert port.finishes == dict.fromkeys(ids, "stop")
    assert len(port.pushes) < place


def test_an_answer_fills_the_context_to_the_last_token(target: Case, oracle: dict[tuple[int, ...], list[int]]) -> None:
    order = Admit(1, prompt(2, 60), 40)
    oracle[tuple(order.prompt)] = answered(target, order)
    port = serve(target, FakePort().at(0, order), Prices(), context_length=100)
    assert port.answers[1] == oracle[tuple(order.prompt)] and port.finishes == {1: "length"}
    assert len(port.pushes) < 30


def test_what_was_guessed_wrong_leaves_nothing_behind(target: Case, oracle: dict[tuple[int, ...], list[int]]) -> None:
    """A later request that starts from what was kept of the answer goes on as one that reads everything."""
    order = Admit(1, prompt(7, 70), 100)
    oracle[tuple(order.prompt)] = first = answered(target, order)
    longer = Admit(2, [*order.prompt, *first, *prompt(8, 5)], 50)
    oracle[tuple(longer.prompt)] = answered(target, longer)

    port = FakePort().at(0, order).at(150, longer)
    serve(target, port, Prices(), cache_bytes=1 << 24)
    assert port.cached[2] > 128
    assert port.answers == {1: first, 2: oracle[tuple(longer.prompt)]}


def test_logits_that_are_not_numbers_fail_the_request_alone(
    target: Case, oracle: dict[tuple[int, ...], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = [Admit(id, prompt(id, 10), 60 // id, Sampling(temperature=1.0, seed=id)) for id in (1, 2)]
    for order in orders:
        oracle[tuple(order.prompt)] = answered(target, order)
    place: int | None = None
    """The token of the check that is being made whose logits are looked at."""
    kind: Any = Rows if target.engine == "onnx" else MlxRows
    real_look, real_decode = kind.look, kind.decode

    def look(self: Any, row: int, at: int) -> None:
        nonlocal place
        place = at
        real_look(self, row, at)

    def decode(self: Any, count: int) -> None:
        nonlocal place
        place = None
        real_decode(self, count)

    monkeypatch.setattr(kind, "look", look)
    monkeypatch.setattr(kind, "decode", decode)
    choose = Sampler.choose
    spoilt: list[int] = [3]

    def spoiling(self: Sampler, values: Any, ids: Any, logits: Any, n: int, room: Any) -> Any:
        if place is not None and place in spoilt:
            if place:
                spoilt.remove(place)
            values, logits = values * np.nan, logits * np.nan
        return choose(self, values, ids, logits, n, room)

    monkeypatch.setattr(Sampler, "choose", spoiling)
    port = serve(target, FakePort().at(0, *orders), Prices())
    # Tokens before it are given; the pass after them comes to logits of its own, which here are numbers again.
    assert port.failures == {} and not spoilt
    assert {id: port.answers[id] for id in (1, 2)} == {order.id: oracle[tuple(order.prompt)] for order in orders}
    spoilt.append(0)  # after the row's own token, in every check
    port = serve(target, FakePort().at(0, *orders), Prices())
    assert 1 in port.failures
    assert all(message.startswith("no token can be drawn: ") for message in port.failures.values())


def first_together(port: FakePort) -> int:
    """The number of the first push in which four requests got something."""
    return next(n for n, steps in enumerate(port.pushes) if len(steps) == 4)


def test_others_wait_for_one_check_at_most(target: Case, oracle: dict[tuple[int, ...], list[int]]) -> None:
    for id in range(1, 5):
        order = Admit(id, prompt(id, 10), 60, speculation=None if id == 1 else 0)
        oracle[tuple(order.prompt)] = answered(target, order)
    port = FakePort()
    for id in range(1, 5):
        port.at(0, Admit(id, prompt(id, 10), 60, speculation=None if id == 1 else 0))
    serve(target, port, Prices())
    if target.engine == "mlx":  # whose batch is cut as one, or not at all
        assert max(len(step[1]) for steps in port.pushes if len(steps) > 1 for step in steps) == 1
        return
    together = [len(steps) for steps in port.pushes[first_together(port) :]]
    assert together.count(1) >= 4
    while together and together[-1] != 4:  # the others are through
        together.pop()
    assert (1, 1) not in pairwise(together)


@pytest.fixture(scope="module")
def repeating(target: Case, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A model whose next token depends on the last one alone: its answers go round in a circle."""
    folder = target.build(tmp_path_factory.mktemp("repeating"), [])
    if target.engine == "mlx":
        import mlx.core as mx

        weights = mx.load(str(folder / "model.safetensors"))
        weights |= {name: mx.zeros_like(value) for name, value in weights.items() if ".o_proj." in name}
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
        return replace(target, folder=folder)
    model = onnx.load(str(folder / "model.onnx"))
    for tensor in model.graph.initializer:
        if tensor.name in {f"o{layer}" for layer in range(tiny.LAYERS)}:
            tensor.CopyFrom(numpy_helper.from_array(np.zeros_like(numpy_helper.to_array(tensor)), tensor.name))
    onnx.save(model, str(folder / "model.onnx"))
    return replace(target, folder=folder)


def test_a_text_that_repeats_itself_takes_a_fraction_of_the_passes(repeating: Case) -> None:
    order = Admit(1, prompt(1, 5), 240)
    alone = plain(repeating, order)
    assert len(alone.pushes) == 240
    port = serve(repeating, FakePort().at(0, order), Prices(2.0, 0.17))
    assert port.answers == alone.answers
    assert len(port.pushes) < 100


def test_nothing_is_checked_where_it_does_not_pay(repeating: Case) -> None:
    order = Admit(1, prompt(1, 5), 120)
    port = serve(repeating, FakePort().at(0, order), Prices(POSITIONS / MARGIN))
    assert len(port.pushes) == 120


def test_a_graph_that_gives_the_last_logits_only_checks_nothing(onnx_case: Case) -> None:
    port = serve(onnx_case, FakePort().at(0, Admit(1, prompt(1, 5), 60)), Prices())
    assert len(port.pushes) == 60
    assert Model(str(onnx_case.folder), Settings()).positions == 0  # type: ignore[arg-type]


def test_a_row_of_a_check_has_the_logits_of_plain_passes(folder: Path) -> None:
    model = Model(str(folder), Settings())  # type: ignore[arg-type]
    rows = Rows(model, 64)
    rows.extend(0, prompt(1, 40))
    tokens, logits = [], []
    for _ in range(POSITIONS):
        tokens.append(rows.greedy(1)[0])
        rows.feed(0, tokens[-1])
        rows.decode(1)
        logits.append(rows._logits[0, 0].copy())
    rows.keep(0, 40)
    rows.feed(0, tokens[0])
    rows.check(0, tokens[1:])
    for place, expected in enumerate(logits):
        rows.look(0, place)
        assert np.allclose(rows._logits[0, 0], expected, atol=1e-4)
        assert rows.greedy(1)[0] == int(expected.argmax())


def drafter(text: list[int]) -> Drafter:
    return Drafter(text, Rates())


def test_the_last_occurrence_of_the_longest_run_is_followed() -> None:
    assert drafter([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]).draft(2) == [4, 9]
    assert drafter([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3]).draft(1) == [5]
    assert drafter([7, 4, 7, 5, 7]).draft(2) == [5, 7]
    assert drafter([1, 2, 3]).draft(4) == [] and drafter([1]).draft(4) == []


def test_a_circle_is_guessed_round_and_round() -> None:
    assert drafter([8, 1, 2, 3, 1, 2, 3]).draft(7) == [1, 2, 3, 1, 2, 3, 1]
    assert drafter([5, 5]).draft(3) == [5, 5, 5]


def test_a_guess_is_the_same_however_the_text_came() -> None:
    rng = random.Random(1)
    for _ in range(200):
        text = [rng.randint(1, 6) for _ in range(rng.randint(2, 40))]
        cut = rng.randint(1, len(text))
        grown = drafter(text[:cut])
        grown.follow(text[cut:])
        runs = [
            size
            for size in range(1, NGRAM + 1)
            if any(text[at : at + size] == text[-size:] for at in range(len(text) - size))
        ]
        assert bool(grown.draft(1)) == bool(runs)
        if grown.agreed < NGRAM:
            assert (grown.agreed, grown.draft(5)) == (drafter(text).agreed, drafter(text).draft(5))


def test_a_text_is_taken_up_again_after_an_edit() -> None:
    text = list(range(100, 160))
    copy = [*text[:20], 7, *text[21:23]]  # one token for another
    edited = drafter([*text, 1])
    edited.follow(copy)
    assert edited.draft(3) == text[23:26] and edited.agreed == 8
    edited = drafter([*text, 1])
    edited.follow([*text[:20], 7, 8, 9, *text[20:22]])  # three put in
    assert edited.draft(3) == text[22:25]
    edited = drafter([*text, 1])
    edited.follow([*text[:20], *text[23:25]])  # three left out
    assert edited.draft(3) == text[25:28]


def test_rates_learn_from_one_request_for_the_next() -> None:
    everyone = Rates()
    before = everyone.chance(20)
    mine = Rates(everyone)
    for _ in range(100):
        mine.note(20, False)
    assert mine.chance(20) < 0.01 < everyone.chance(20) < before
    assert Rates(everyone).chance(20) == everyone.chance(20)
    assert everyone.chance(3) == Rates().chance(3)


def test_costs_are_guessed_from_those_that_are_known_and_then_measured() -> None:
    costs = Costs()
    assert not costs.known
    for _ in range(3):
        costs.note_plain(1, 0.010)
    assert costs.known and costs.plain(1) == pytest.approx(0.010)
    assert 0.020 < costs.check(2) < costs.check(8) < costs.check(32) < 0.080
    costs.note_check(8, 0.5)
    assert costs.check(8) < 0.05, "one that was slow is not believed yet"
    costs.note_check(7, 0.5)
    costs.note_check(6, 0.5)
    assert costs.check(8) > 0.4 and costs.check(32) < 0.080
    for _ in range(1024):
        costs.note_plain(1, 0.010)
    assert costs.check(8) < 0.05, "and one that is long ago no more"


def test_the_depth_is_the_one_that_promises_the_most(folder: Path) -> None:
    rows = Rows(Model(str(folder), Settings()), 32)  # type: ignore[arg-type]
    speculation = Speculation(rows, POSITIONS - 1, Prices(2.0, 0.17))
    guesser = drafter([1, 2, 3, 4] * 5)

    def depth(came_true: list[bool], limit: int = POSITIONS - 1, patience: float | None = None) -> int:
        for each in came_true:
            guesser.rates.note(16, each)
        return speculation._depth(guesser, limit, 1.0, patience)[0]

    assert depth([False] * 100) == 0
    sure = depth([True] * 400)
    assert sure == POSITIONS - 1
    assert depth([], limit=5) == 5
    assert depth([], patience=3.5) == 7
    less = depth([False, True, True, True, True, True, True])
    assert 0 < less < sure
