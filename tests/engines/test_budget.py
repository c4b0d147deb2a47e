"""The memory for keys and values of running requests: what is counted is what is there, what has no room waits or makes room, and no answer changes by it."""

from __future__ import annotations

import ctypes
import mmap
import random
import sys

import numpy as np
import pytest

from cases import Case, prompt
from emberd import loop
from emberd.budget import KvBudget, default_kv_bytes
from emberd.engine import Logprob, Request, Step
from emberd.kv import BLOCK, KvCache, Layer
from emberd.onnx import OnnxEngine
from emberd.session import Model
from fakeport import Admit, Cancel, FakePort, Sampling, Settings

LAYERS = [Layer("a", "b", heads=2, width=64, dtype="float32"), Layer("c", "d", heads=3, width=64, dtype="float16")]


def blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


@pytest.fixture
def block_bytes(onnx_case: Case) -> int:
    """Bytes of 64 tokens of the tiny model in a row."""
    return KvBudget(Model(str(onnx_case.folder), Settings()).layers, 0).block_bytes


class Served:
    """What happened in a run under a budget."""

    def __init__(self) -> None:
        self.preempted: list[int] = []
        """Ids in order, and after how many pushes."""
        self.pushes: list[int] = []
        self.resumed: dict[int, int] = {}
        """After how many pushes each was running again, the first time."""
        self.most = 0


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
    """Serves, and checks the budget and what is counted after every step."""
    served = Served()
    model = Model(str(case.folder), Settings(max_batch=max_batch))
    engine = OnnxEngine(model, port.fail, chunk, cache_bytes, kv_bytes)
    step, preempt = engine.step, engine._preempt

    def checked() -> list[Step]:
        before = {each.id for each in engine._running}
        made = step()
        budget, rows = engine._budget, engine._rows
        held = {row: each.room for row, each in enumerate(engine._running)}
        held |= {each.row: each.room for each in engine._prompts if each.row is not None}
        assert budget.taken == sum(room // BLOCK for room in held.values())
        assert budget.resident <= max(kv_bytes, 0)
        assert all(rows.length(row) <= held.get(row, 0) for row in range(max_batch + 1))
        served.most = max(served.most, budget.taken)
        now = {each.id for each in engine._running}
        for id in now - before:
            if id in served.preempted:
                served.resumed.setdefault(id, len(port.pushes))
        return made

    def counted(request: Request) -> None:
        served.preempted.append(request.id)
        served.pushes.append(len(port.pushes))
        preempt(request)

    monkeypatch.setattr(engine, "step", checked)
    monkeypatch.setattr(engine, "_preempt", counted)
    loop.serve(engine, port)
    assert engine._budget.taken == 0 and not engine.busy
    engine.close()
    assert port.violations == []
    return served


def test_blocks_are_held_and_given_back() -> None:
    page = mmap.PAGESIZE
    block = (2 * -(-64 * 64 * 4 // page) + 3 * -(-64 * 64 * 2 // page)) * page
    budget = KvBudget(LAYERS, 5 * block + block - 1)
    assert (budget.block_bytes, budget.capacity) == (block, 5)
    one, other = (Request(Admit(id, [1], 1)) for id in (1, 2))  # type: ignore[arg-type]
    assert budget.hold(one, 65) and (budget.taken, one.room) == (2, 128)
    assert budget.hold(one, 128) and budget.taken == 2
    assert budget.hold(other, 129) and budget.resident == 5 * block
    assert not budget.hold(one, 129) and one.room == 128
    assert budget.could_hold(5 * BLOCK) and not budget.could_hold(5 * BLOCK + 1)
    budget.give_back(other)
    assert budget.has(3 * BLOCK, 0) and budget.has(2 * BLOCK, 1) and not budget.has(2 * BLOCK + 1, 1)
    budget.give_back(one)
    budget.give_back(one)
    assert budget.taken == 0


def test_the_default_is_a_part_of_the_memory() -> None:
    assert default_kv_bytes() > 0


def test_a_prompt_that_could_never_have_room_fails_with_the_reason(
    onnx_case: Case, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = FakePort().at(0, Admit(1, prompt(1, 129), 5), Admit(2, prompt(2, 120), 5))
    serve(onnx_case, port, 2 * block_bytes, monkeypatch)
    assert port.failures == {
        1: f"the prompt of 129 tokens needs {3 * block_bytes} bytes for keys and values, and there is room for "
        f"{2 * block_bytes}; hint: raise --kv-bytes, or make the prompt or its answer shorter"
    }
    assert port.answers[2] == onnx_case.single(prompt(2, 120), 5)


def test_an_answer_that_outgrows_all_the_room_fails_alone(
    onnx_case: Case, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = FakePort().at(0, Admit(1, prompt(1, 100), 100), Admit(2, prompt(2, 60), 10))
    serve(onnx_case, port, 2 * block_bytes, monkeypatch)
    assert list(port.failures) == [1]
    assert port.failures[1].startswith("an answer that has come to 129 tokens with its prompt needs ")
    assert "; hint: raise --kv-bytes" in port.failures[1]
    assert port.answers[1] == onnx_case.single(prompt(1, 100), 100)[:29]
    assert port.answers[2] == onnx_case.single(prompt(2, 60), 10)


def test_an_answer_may_use_the_last_token_of_the_room(
    onnx_case: Case, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = FakePort().at(0, Admit(1, prompt(1, 100), 29))  # the last token of an answer is not run
    serve(onnx_case, port, 2 * block_bytes, monkeypatch)
    assert port.answers[1] == onnx_case.single(prompt(1, 100), 29)


def test_without_any_room_every_request_fails_and_none_hangs(onnx_case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    port = FakePort().at(0, *(Admit(id, prompt(id, 5), 5) for id in range(1, 4)))
    serve(onnx_case, port, 0, monkeypatch)
    assert sorted(port.failures) == [1, 2, 3]


def test_the_settings_reach_the_budget(onnx_case: Case, block_bytes: int) -> None:
    port = FakePort().at(0, Admit(1, prompt(1, 129), 5))
    onnx_case.run(port, kv_bytes=2 * block_bytes)
    assert list(port.failures) == [1]


def test_prompts_that_have_no_room_wait_in_order(
    onnx_case: Case, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short ones that would find room do not pass a long one that waits for it."""
    port = FakePort().at(0, Admit(1, prompt(1, 60), 60)).at(4, Admit(2, prompt(2, 128), 5))
    port.at(5, *(Admit(id, prompt(id, 10), 5) for id in range(3, 6)))
    served = serve(onnx_case, port, 3 * block_bytes, monkeypatch)
    assert served.preempted == []
    assert list(port.finishes)[:2] == [1, 2]
    for id, (length, limit) in {1: (60, 60), 2: (128, 5), 3: (10, 5), 4: (10, 5), 5: (10, 5)}.items():
        assert port.answers[id] == onnx_case.single(prompt(id, length), limit)


@pytest.mark.parametrize("cache_blocks", [0, 100])
def test_the_newest_answer_makes_room_and_goes_on_where_it_was(
    onnx_case: Case, block_bytes: int, monkeypatch: pytest.MonkeyPatch, cache_blocks: int
) -> None:
    hot = Sampling(
        temperature=1.2, seed=5, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2, top_logprobs=3
    )
    port = FakePort().at(0, Admit(1, prompt(1, 50), 140)).at(2, Admit(2, prompt(2, 50), 140, hot))
    served = serve(onnx_case, port, 4 * block_bytes, monkeypatch, cache_bytes=cache_blocks * block_bytes)
    assert served.preempted and set(served.preempted) == {2} == served.resumed.keys()
    alone = onnx_case.run(FakePort().at(0, Admit(2, prompt(2, 50), 140, hot)))
    assert port.answers == {1: onnx_case.single(prompt(1, 50), 140), 2: alone.answers[2]}
    assert_close(port.logprobs[2], alone.logprobs[2])
    assert port.cached == {}, "what it read again was its own"


def test_those_that_made_room_are_read_before_those_that_came_since(
    onnx_case: Case, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = FakePort().at(0, *(Admit(id, prompt(id, 60), 70) for id in range(1, 4)))
    for n in range(12):
        port.at(10 + n, Admit(10 + n, prompt(10 + n, 20), 2))
    served = serve(onnx_case, port, 5 * block_bytes, monkeypatch)
    assert served.preempted == [3]
    left, back = served.pushes[0], served.resumed[3]
    began = [next(n for n, steps in enumerate(port.pushes) if any(s[0] == id for s in steps)) for id in range(10, 22)]
    assert back > left + 2
    assert not any(left <= n < back for n in began) and any(n > back for n in began)
    for id in range(1, 4):
        assert port.answers[id] == onnx_case.single(prompt(id, 60), 70)


def assert_close(told: list[Logprob], expected: list[Logprob]) -> None:
    """Passes of other shapes round otherwise."""
    assert [[id for id, _ in top] for _, top in told] == [[id for id, _ in top] for _, top in expected]
    assert np.allclose([value for value, _ in told], [value for value, _ in expected], atol=1e-4)


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


@pytest.mark.parametrize("seed", range(12))
def test_whatever_joins_leaves_and_makes_room_the_answers_are_those_of_single_runs(
    onnx_case: Case, block_bytes: int, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    port = FakePort()
    asked: dict[int, Admit] = {}
    cancelled = set()
    for id in range(1, 31):
        text = prompt(rng.randrange(3), rng.choice((0, 40, 70))) + prompt(id, rng.randint(1, 60))
        asked[id] = Admit(id, text, rng.randint(1, 120), sampling(rng), salt=rng.choice("ab"))
        start = rng.randint(0, 150)
        port.at(start, asked[id])
        if rng.random() < 0.3:
            cancelled.add(id)
            end = start + rng.randint(1, 60)
            port.at(end, Cancel(id)) if rng.random() < 0.5 else port.leave(end, id)
    served = serve(
        onnx_case,
        port,
        rng.randint(4, 8) * block_bytes,
        monkeypatch,
        chunk=rng.choice((16, 40, 128)),
        cache_bytes=rng.choice((0, 4, 12, 100)) * block_bytes,
        max_batch=rng.choice((3, 6, 16)),
    )
    assert served.most >= 4 and port.failures == {}
    for id, order in asked.items():
        answer = port.answers.get(id, [])
        assert id in cancelled or len(answer) == order.max_tokens
        alone = onnx_case.run(FakePort().at(0, Admit(1, order.prompt, order.max_tokens, order.sampling)))
        assert answer == alone.answers[1][: len(answer)]
        if order.sampling is not None and order.sampling.top_logprobs is not None:
            assert_close(port.logprobs.get(id, []), alone.logprobs[1][: len(answer)])


def test_such_runs_do_make_answers_give_way(onnx_case: Case, block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    port = FakePort().at(0, *(Admit(id, prompt(id, 30), 130) for id in range(1, 9)))
    served = serve(onnx_case, port, 6 * block_bytes, monkeypatch)
    assert len(served.preempted) >= 2 and served.most == 6
    assert all(len(answer) == 130 for answer in port.answers.values()) and len(port.answers) == 8


def in_memory(array: np.ndarray) -> int:
    """Bytes of an array that are in memory."""
    pages = -(-array.nbytes // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(array.ctypes.data)
    assert libc.mincore(address, ctypes.c_size_t(array.nbytes), flags) == 0
    return sum(flag & 1 for flag in flags) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which pages are in memory")
def test_what_is_counted_is_all_that_the_rows_take(
    onnx_case: Case, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffers hold 17 rows of 5 blocks; answers join, grow, make room, move and leave in 9 blocks of memory."""
    port = FakePort().at(0, *(Admit(id, prompt(id, 20 + 7 * id), 40 + 20 * (id % 4)) for id in range(1, 9)))
    port.at(60, Cancel(1)).leave(75, 4)
    engine = OnnxEngine(Model(str(onnx_case.folder), Settings()), port.fail, 32, 0, 9 * block_bytes)
    step, seen = engine.step, []

    def checked() -> list[Step]:
        made = step()
        resident = sum(in_memory(buffer) for buffer in engine._rows._kv.buffers)
        assert resident <= engine._budget.resident <= 9 * block_bytes
        seen.append(resident)
        return made

    monkeypatch.setattr(engine, "step", checked)
    loop.serve(engine, port)
    assert max(seen) >= 7 * block_bytes and seen[-1] == 0
    engine.close()


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which pages are in memory")
def test_a_move_takes_no_more_memory_than_one_tensor_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KvCache([LAYERS[0]] * 8, rows=3, context_length=1024)
    for buffer in cache.buffers:
        buffer[2, :, :512] = 1.0
    before = sum(in_memory(buffer) for buffer in cache.buffers)
    seen: list[int] = []
    release = cache._release

    def looking(index: int, row: int) -> None:
        seen.append(sum(in_memory(buffer) for buffer in cache.buffers))
        release(index, row)

    monkeypatch.setattr(cache, "_release", looking)
    cache.move(2, 0, 512)
    assert max(seen) <= before + before // 8
    assert all(buffer[0, :, :512].min() == 1.0 for buffer in cache.buffers)
    assert sum(in_memory(buffer) for buffer in cache.buffers) == before
