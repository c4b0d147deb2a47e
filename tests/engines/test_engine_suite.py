"""What every engine must do, through the strict port: one suite over all of them."""

from __future__ import annotations

import gc
import random
import weakref
from pathlib import Path

import pytest

from cases import Case, prompt
from emberd import loop
from emberd.engine import Engine, Step
from fakeport import Admit, Cancel, FakePort, Launch, Sampling, Settings


def pushes_with(port: FakePort, id: int) -> list[int]:
    """The numbers of the pushes, from 0, in which a request got something."""
    return [n for n, steps in enumerate(port.pushes) if any(step[0] == id and step[1] for step in steps)]


def test_says_what_it_can_do(case: Case) -> None:
    port = case.run(FakePort(), max_batch=3, context_length=100)
    assert port.reason is None
    assert port.capabilities is not None
    assert (port.capabilities.max_batch, port.capabilities.context_length) == (3, 100)


def test_a_context_length_beyond_the_models_own_is_capped(case: Case) -> None:
    port = case.run(FakePort(), context_length=10**6)
    assert port.capabilities is not None
    assert port.capabilities.context_length in (256, 1024)


def test_an_answer_ends_at_its_token_limit(case: Case) -> None:
    for limit in (1, 2, 9):
        port = case.run(FakePort().at(0, Admit(1, prompt(1, 5), limit)))
        assert len(port.answers[1]) == limit
        assert port.finishes == {1: "length"}


def test_an_answer_fills_the_context_to_the_last_token(case: Case) -> None:
    port = case.run(FakePort().at(0, Admit(1, prompt(2, 60), 40)), context_length=100)
    assert port.reason is None
    assert port.answers[1] == case.single(prompt(2, 60), 40)


def test_an_eos_id_ends_the_answer_and_is_part_of_it(case: Case, tmp_path: Path) -> None:
    whole = case.single(prompt(3, 12), 30)
    for place in (0, 4):
        eos = whole[place]
        expected = whole[: whole.index(eos) + 1]
        ended = case.with_eos(tmp_path / str(place), [319, eos])
        port = ended.run(FakePort().at(0, Admit(1, prompt(3, 12), 30)))
        assert port.answers[1] == expected
        assert port.finishes == {1: "stop"}


def test_an_eos_id_that_is_also_the_last_allowed_one_is_a_stop(case: Case, tmp_path: Path) -> None:
    whole = case.single(prompt(3, 12), 30)
    limit = whole.index(whole[4]) + 1
    port = case.with_eos(tmp_path, [whole[4]]).run(FakePort().at(0, Admit(1, prompt(3, 12), limit)))
    assert port.finishes == {1: "stop"}


def test_requests_run_together_in_single_pushes(case: Case) -> None:
    port = FakePort()
    for id in range(1, 9):
        port.at(0, Admit(id, prompt(id, 4 + id), 24))
    case.run(port)
    together = [steps for steps in port.pushes if len(steps) == 8]
    assert len(together) >= 15
    assert all({step[0] for step in steps} == set(range(1, 9)) for steps in together)


@pytest.mark.parametrize("seed", range(4))
def test_ragged_joins_and_leaves_give_the_answers_of_single_runs(case: Case, seed: int) -> None:
    rng = random.Random(seed)
    port = FakePort()
    asked: dict[int, tuple[list[int], int]] = {}
    cancelled = set()
    for id in range(1, 25):
        asked[id] = (prompt(seed * 100 + id, rng.randint(1, 70)), rng.randint(1, 40))
        start = rng.randint(0, 30)
        port.at(start, Admit(id, *asked[id]))
        if rng.random() < 0.5:
            cancelled.add(id)
            if rng.random() < 0.5:
                port.at(start + rng.randint(1, 30), Cancel(id))
            else:
                port.leave(start + rng.randint(1, 30), id)
    case.run(port, max_batch=8)
    assert port.reason is None and port.failures == {}
    alone = case.singles(asked)
    for id, (_, limit) in asked.items():
        answer = port.answers.get(id, [])
        assert answer == alone[id][: len(answer)]
        assert id in cancelled or len(answer) == limit
    assert any(0 < len(port.answers.get(id, [])) < asked[id][1] for id in cancelled), "some were cut while they ran"


def test_a_burst_beyond_the_batch_is_served_to_the_end(case: Case) -> None:
    port = FakePort()
    for id in range(1, 41):
        port.at(0, Admit(id, prompt(id, 1 + id % 13), 1 + id % 7))
    case.run(port, max_batch=4)
    assert port.reason is None
    assert {id: len(answer) for id, answer in port.answers.items()} == {id: 1 + id % 7 for id in range(1, 41)}
    assert max(len(steps) for steps in port.pushes) == 4


def test_a_batch_of_one_serves_requests_in_the_order_they_came(case: Case) -> None:
    port = FakePort()
    for id in range(1, 6):
        port.at(0, Admit(id, prompt(id, 6), 5))
    case.run(port, max_batch=1)
    assert list(port.finishes) == [1, 2, 3, 4, 5]


def test_a_long_prompt_is_read_in_chunks_while_others_go_on(case: Case) -> None:
    port = FakePort().at(0, Admit(1, prompt(1, 3), 25)).at(6, Admit(2, prompt(2, case.long), 4))
    case.run(port)
    first = pushes_with(port, 2)[0]
    assert first >= 7, "the prompt took more than one step"
    for n in range(6, first):
        assert {n, n + 1} & set(pushes_with(port, 1)), "the running answer waited for longer than a chunk"
    assert port.answers[1] == case.single(prompt(1, 3), 25)
    assert port.answers[2] == case.single(prompt(2, case.long), 4)


@pytest.mark.parametrize("way", ["order", "push"])
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_a_cancelled_request_frees_its_slot_within_one_step(case: Case, phase: str, way: str) -> None:
    """One slot, so that the next request starts only where the cancelled one has left it."""
    port = FakePort()
    step = 1
    if phase == "queued":
        # Handed over together with a long prompt, and still waiting for its turn.
        port.at(0, Admit(1, prompt(1, case.long), 2), Admit(2, prompt(2, 4), 20))
    elif phase == "prefill":
        port.at(0, Admit(2, prompt(2, case.long), 20))
    else:
        step = 6
        port.at(0, Admit(2, prompt(2, 4), 20))
    port.at(step, Cancel(2)) if way == "order" else port.leave(step, 2)
    port.at(step, Admit(3, prompt(3, 4), 5))
    case.run(port, max_batch=2 if phase == "queued" else 1)
    assert port.reason is None
    queued = 1 if case.engine == "echo" else 0  # an echo reads all prompts at once: nothing queues in it
    assert len(port.answers[2]) == {"queued": queued, "prefill": 0, "decode": 6}[phase]
    assert port.answers[3] == case.single(prompt(3, 4), 5)
    if phase != "queued":
        assert pushes_with(port, 3)[0] == step, "its successor answers in the very next step"
        assert all(n < step for n in pushes_with(port, 2))
    else:
        assert port.answers[1] == case.single(prompt(1, case.long), 2)


def test_cancelling_what_is_not_there_is_no_error(case: Case) -> None:
    engine = load(case)
    engine.drop([5, 6])
    engine.take(Cancel(7))
    assert not engine.busy
    assert engine.step() == []
    engine.close()


def test_an_idle_engine_waits_and_a_busy_one_polls(case: Case) -> None:
    port = FakePort().at(0, Admit(1, prompt(1, 3), 4)).at(50, Admit(2, prompt(2, 3), 4))
    case.run(port)
    assert port.waits == 3, "before the first request, between the two, and at the end"
    assert len(port.pushes) == 8


def test_a_port_closed_with_work_in_flight_ends_the_engine_and_frees_it(case: Case) -> None:
    port = FakePort().at(0, Admit(1, prompt(1, 4), 50), Admit(2, prompt(2, case.long), 20)).close_at(2)
    case.run(port)
    assert port.reason is None
    assert port.finishes == {}
    assert len(port.pushes) == 2


def test_a_port_that_closes_during_a_step_takes_back_what_it_made(case: Case) -> None:
    engine = load(case)
    engine.take(Admit(1, prompt(1, 4), 50))
    steps = engine.step()
    engine.drop([step[0] for step in steps])
    assert not engine.busy
    engine.close()


def test_a_closed_engine_is_freed(case: Case) -> None:
    engine = load(case)
    engine.take(Admit(1, prompt(1, 4), 50))
    engine.step()
    engine.close()
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None


def test_the_same_seed_gives_the_same_answer_whatever_else_runs(case: Case) -> None:
    hot = Sampling(temperature=1.3, top_p=0.95, top_k=0, seed=2**64 - 5)
    alone = case.single(prompt(4, 9), 30, hot)
    port = FakePort().at(4, Admit(99, prompt(4, 9), 30, hot))
    for id in range(1, 8):
        others = None if id % 2 else Sampling(temperature=0.8, top_p=0.9, top_k=id * 50, seed=id)
        port.at(id, Admit(id, prompt(id, 3 + id), 10 + id, others))
    case.run(port)
    assert port.answers[99] == alone
    for id in range(1, 8, 2):
        assert port.answers[id] == case.single(prompt(id, 3 + id), 10 + id), "greedy neighbours stay greedy"


def test_the_coldest_draws_are_the_greedy_answer(case: Case) -> None:
    greedy = case.single(prompt(4, 9), 20)
    assert case.single(prompt(4, 9), 20, Sampling(temperature=1e-9, seed=3)) == greedy
    assert case.single(prompt(4, 9), 20, Sampling(temperature=5.0, top_k=1, seed=3)) == greedy
    assert case.single(prompt(4, 9), 20, Sampling(temperature=5.0, top_p=1e-9, seed=3)) == greedy


def test_an_exception_in_step_fails_the_engine_and_frees_the_model(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    real = loop.load
    closed: list[bool] = []

    def load_faulty(launch: object) -> Engine:
        engine = real(launch)
        step, close, calls = engine.step, engine.close, iter(range(100))

        def faulty() -> list[Step]:
            if next(calls) == 3:
                raise RuntimeError("the third step\nhas a second line")
            return step()

        def closing() -> None:
            closed.append(True)
            close()

        monkeypatch.setattr(engine, "step", faulty)
        monkeypatch.setattr(engine, "close", closing)
        return engine

    monkeypatch.setattr(loop, "load", load_faulty)
    port = case.run(FakePort().at(0, Admit(1, prompt(1, 4), 50)))
    assert port.reason is not None
    first, *rest = port.reason.splitlines()
    assert first == f"the {case.engine} engine failed: RuntimeError: the third step has a second line"
    assert any("Traceback" in line for line in rest)
    assert closed == [True]
    assert len(port.pushes) == 3


def test_a_folder_that_is_not_there_is_refused(case: Case) -> None:
    for folder in ("/nowhere/at/all", __file__):
        port = FakePort()
        loop.run(_launch(case, folder, port))
        assert port.reason is not None
        assert folder in port.reason.splitlines()[0] and "hint:" in port.reason


def test_a_config_that_is_not_json_is_refused(case: Case, tmp_path: Path) -> None:
    case.build(tmp_path, [])
    for text in ("{", "[1]"):
        (tmp_path / "config.json").write_text(text)
        port = FakePort()
        loop.run(_launch(case, str(tmp_path), port))
        assert port.reason is not None
        assert "config.json" in port.reason and "JSON" in port.reason and "hint:" in port.reason


def test_settings_below_one_are_refused(case: Case) -> None:
    for name in ("max_batch", "context_length"):
        port = FakePort()
        case.run(port, **{name: 0})
        assert port.reason is not None
        assert port.reason.startswith(f"{name} is 0; hint:")


def load(case: Case) -> Engine:
    return loop.load(_launch(case, str(case.folder), FakePort()))


def _launch(case: Case, folder: str, port: FakePort) -> Launch:
    return Launch(case.engine, folder, Settings(), port)
