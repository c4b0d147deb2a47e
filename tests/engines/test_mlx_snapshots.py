"""Prompts that begin like earlier ones, over MLX: what is found, for each kind of cache, and that it changes no answer."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

import tiny_mlx
from cases import CASES, Case, prompt
from emberd import loop
from emberd.mlx import MlxEngine
from emberd.mlx_caches import Sizes, copied, size
from emberd.mlx_model import Model
from emberd.mlx_snapshots import FIRST_POINT, Snapshots, next_point
from fakeport import Admit, Cancel, FakePort, Forget, Settings
from test_mlx import KINDS
from test_reuse import cold, follow


@pytest.fixture(params=[case for case in CASES if case.engine == "mlx"], ids=lambda case: case.name)
def mlx_case(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Case:
    """Each kind of cache in turn."""
    return replace(request.param, folder=folders[request.param.name])


@pytest.fixture(params=["mlx-recurrent", "mlx-hybrid"])
def exact_case(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Case:
    """The kinds that cannot be cut."""
    [case] = [each for each in CASES if each.name == request.param]
    return replace(case, folder=folders[request.param])


@pytest.fixture
def llama_case(folders: dict[str, Path]) -> Case:
    """The kind that can be cut anywhere."""
    [case] = [each for each in CASES if each.name == "mlx"]
    return replace(case, folder=folders["mlx"])


# Alone.


def filled(model: Model, tokens: list[int]) -> list[object]:
    caches = model.new_caches()
    mx.eval(model(mx.array([tokens]), caches))
    return copied(caches, len(tokens)) if caches[0].is_trimmable() else copied(caches)


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    return Model(str(tiny_mlx.build(tmp_path, KINDS[request.param])), Settings())


@pytest.fixture
def llama(tmp_path: Path) -> Model:
    return Model(str(tiny_mlx.build(tmp_path)), Settings())


def test_the_budget_is_kept_and_the_least_recently_used_goes_first(model: Model) -> None:
    texts = [prompt(n, 60) for n in range(5)]
    one = size(filled(model, texts[0]))
    snapshots = Snapshots(3 * one)
    for text in texts[:3]:
        snapshots.save(text, filled(model, text))
    assert snapshots.find(texts[0]) == 60
    for text in texts[3:]:
        snapshots.save(text, filled(model, text))
        assert snapshots.resident <= 3 * one
    assert [snapshots.find(text) for text in texts] == [60, 0, 0, 60, 60]


def test_what_has_a_name_outlasts_what_has_none_until_it_is_forgotten(llama: Model) -> None:
    texts = [prompt(n, 60) for n in range(5)]
    one = size(filled(llama, texts[0]))
    snapshots = Snapshots(2 * one)
    snapshots.save(texts[0], filled(llama, texts[0]), name=7)
    for text in texts[1:3]:
        snapshots.save(text, filled(llama, text))
    assert [snapshots.find(text) for text in texts[:3]] == [60, 0, 60]
    snapshots.forget(7)
    snapshots.forget(8)
    assert snapshots.lease(7) is None
    assert snapshots.find(texts[0]) == 60
    for text in texts[3:]:
        snapshots.save(text, filled(llama, text))
    assert snapshots.find(texts[0]) == 0
    for name, text in enumerate(texts[:3]):
        snapshots.save(text, filled(llama, text), name=name)
    assert [snapshots.find(text) for text in texts[:3]] == [0, 60, 60], "among names, too, the least recently used goes"


def test_a_text_that_another_begins_with_is_kept_once(llama: Model) -> None:
    snapshots = Snapshots(1 << 30)
    long = prompt(1, 100)
    for count in (40, 100, 70, 100):
        snapshots.save(long[:count], filled(llama, long[:count]))
    assert snapshots.resident == size(filled(llama, long))
    assert snapshots.find(long[:50] + prompt(2, 10)) == 50
    snapshots.save(long[:60], filled(llama, long[:60]), name=1)
    snapshots.save(long, filled(llama, long))
    assert snapshots.lease(1, "a") is None
    assert snapshots.find(long, "", snapshots.lease(1)) == 60, "a name stands for its own text"


def test_a_text_beyond_the_budget_is_cut_where_it_can_be(llama: Model) -> None:
    long = prompt(1, 100)
    whole = size(filled(llama, long))
    snapshots = Snapshots(whole // 2)
    snapshots.save(long, filled(llama, long))
    assert 40 <= snapshots.find(long) <= 50
    assert snapshots.resident <= whole // 2


def test_points_double() -> None:
    assert [next_point(n) for n in (0, 1, 63, 64, 127, 128, 500)] == [64, 64, 64, 128, 128, 256, 512]


# In the engine.


def test_a_cache_that_can_be_cut_serves_every_beginning(llama_case: Case) -> None:
    first = prompt(1, 150)
    second = first[:100] + prompt(2, 70)
    port = follow(llama_case, Admit(1, first, 20), Admit(2, second, 20), Admit(3, first[:31], 20))
    assert port.cached == {2: 100, 3: 30}
    assert port.answers[2] == cold(llama_case, second, 20)
    assert port.answers[3] == cold(llama_case, first[:31], 20)


def test_a_cache_that_cannot_be_cut_serves_the_points_at_which_it_was_kept(exact_case: Case) -> None:
    first = prompt(1, 200)
    for shared, found in ((40, 0), (64, 64), (100, 64), (127, 64), (128, 128), (180, 128)):
        second = first[:shared] + prompt(2, 20)
        port = follow(exact_case, Admit(1, first, 5), Admit(2, second, 20))
        assert port.cached == ({2: found} if found else {})
        assert port.answers[2] == cold(exact_case, second, 20)


def test_a_window_that_has_moved_on_serves_only_as_a_whole(folders: dict[str, Path]) -> None:
    [case] = [each for each in CASES if each.name == "mlx-sliding"]
    case = replace(case, folder=folders["mlx-sliding"])
    short, long = prompt(1, tiny_mlx.WINDOW - 9), prompt(2, 150)
    port = follow(case, Admit(1, short, 4), Admit(2, [*short[:9], 50, 51], 20))
    assert port.cached == {2: 9}, "within the window it can be cut"
    assert port.answers[2] == cold(case, [*short[:9], 50, 51], 20)
    other = long[:100] + prompt(3, 20)
    port = follow(case, Admit(1, long, 20), Admit(2, other, 20))
    assert port.cached == {2: FIRST_POINT}
    assert port.answers[2] == cold(case, other, 20)


def test_a_request_that_came_before_its_snapshot_was_forgotten_starts_from_it(mlx_case: Case) -> None:
    tokens = prompt(4, 30)
    engine = MlxEngine(Model(str(mlx_case.folder), Settings()), FakePort().fail)
    engine.take(Admit(1, tokens, 1, save_as=5))
    steps = engine.step()
    for order in (Admit(2, [*tokens, 9, 9], 3, start_from=5), Forget(5), Admit(3, [*tokens, 9, 9], 3, start_from=5)):
        engine.take(order)
    while engine.busy:
        steps += engine.step()
    assert [step for step in steps if len(step) == 2] == [(2, 30)]
    engine.close()


def test_an_answer_that_is_cut_short_can_be_continued(mlx_case: Case) -> None:
    """A stop string ends an answer so."""
    tokens = prompt(9, 60)
    others = [Admit(id, prompt(id, 30), 120) for id in (1, 2)]

    def port() -> FakePort:
        return FakePort().at(0, *others, Admit(3, tokens, 150)).at(20, Cancel(3))

    first = mlx_case.run(port())
    turn = [*tokens, *first.answers[3], *prompt(10, 5)]
    again = mlx_case.run(port().at(21, Admit(4, turn, 30)))
    assert again.cached == {4: len(turn) - 5}, "the pass over its last token had been started"
    assert again.answers[4] == cold(mlx_case, turn, 30)
    assert all(again.answers[each.id] == cold(mlx_case, each.prompt, 120) for each in others)


@pytest.mark.parametrize(("texts", "ahead"), [(1, True), (3, False), (40, True)])
def test_conversations_under_a_small_budget_get_their_cold_answers(mlx_case: Case, texts: int, ahead: bool) -> None:
    rng = random.Random(texts)
    port = FakePort()
    asked: dict[int, Admit] = {}
    beginnings = [prompt(seed, 150) for seed in range(3)]
    for id in range(1, 25):
        tokens = rng.choice(beginnings)[: rng.randint(1, 150)] + prompt(id, rng.randint(0, 30))
        names = {"start_from": rng.randint(1, id), "save_as": 100 + id} if id % 4 == 0 else {}
        asked[id] = Admit(id, tokens, rng.randint(1, 40), salt="a" if id % 5 == 0 else "", **names)
        port.at(3 * id, asked[id])
        if id % 6 == 0:
            port.at(3 * id + rng.randint(1, 20), Cancel(id))
    model = Model(str(mlx_case.folder), Settings(max_batch=4))
    budget = texts * Sizes(model, 32).of(150)
    engine = MlxEngine(model, port.fail, 32, budget, ahead=ahead)
    step = engine.step

    def checked() -> list[object]:
        made = step()
        assert engine._snapshots.resident <= budget
        assert engine._snapshots.resident == sum(size(each.caches) for each in engine._snapshots._held)
        return made

    engine.step = checked  # type: ignore[method-assign, assignment]
    loop.serve(engine, port)
    engine.close()
    assert port.violations == [] and port.failures == {}
    assert port.cached or texts == 1, "something was found"
    for id, order in asked.items():
        answer = port.answers.get(id, [])
        assert id % 6 == 0 or len(answer) == order.max_tokens
        assert answer == cold(mlx_case, order.prompt, order.max_tokens)[: len(answer)]
