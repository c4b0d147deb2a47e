"""Prompts that begin like earlier ones: what is found and kept, that it changes no answer, and that it keeps its budget."""

from __future__ import annotations

import gc
import itertools
import mmap
import random
import weakref
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cases import Case, prompt
from emberd import loop
from emberd.batching import SAVES
from emberd.kv import BLOCK, BlockPool, Layer
from emberd.onnx import READ_AGAIN, OnnxEngine
from emberd.session import Model
from emberd.snapshots import Snapshots, default_budget
from fakeport import Admit, Cancel, FakePort, Sampling, Settings

LAYERS = [Layer("a", "b", heads=2, width=4, dtype="float32"), Layer("c", "d", heads=3, width=8, dtype="float16")]
BLOCK_BYTES = BlockPool(LAYERS, 0).block_bytes
FOREVER = 1000
"""Pushes between requests that follow one another: the port hands the next one over when the engine is idle."""

Row = list[NDArray[np.floating]]


def row_of(tokens: list[int]) -> Row:
    """A row in which the keys and values of every token tell all tokens up to it."""
    values, value = [], 0
    for token in tokens:
        value = (value * 31 + token + 1) % 1009
        values.append(value)
    row: Row = []
    for layer in LAYERS:
        array = np.zeros((layer.heads, 512, layer.width), layer.dtype)
        array[:, : len(tokens)] = np.array(values, layer.dtype)[None, :, None]
        row.append(array)
    return row


def shared(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def texts(rng: random.Random, count: int) -> list[list[int]]:
    """Token lists of up to 500, most of which begin like one before."""
    made: list[list[int]] = []
    for _ in range(count):
        base = rng.choice(made[-30:]) if made and rng.random() < 0.7 else []
        more = [rng.randrange(3) * 300 for _ in range(rng.randint(0, 200))]
        made.append((base[: rng.randint(0, len(base))] + more)[:500])
    return made


@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 50])
def test_what_is_restored_is_what_was_saved_whatever_was_evicted(blocks: int) -> None:
    rng = random.Random(blocks)
    snapshots = Snapshots(LAYERS, blocks * BLOCK_BYTES + BLOCK_BYTES - 1)
    found = 0
    for tokens in texts(rng, 1000):
        row, into = row_of(tokens), [np.full_like(each, -1) for each in row_of([])]
        count = snapshots.restore(tokens, into)
        assert count == snapshots.find(tokens) <= len(tokens)
        for saved, restored in zip(row, into, strict=True):
            assert (restored[:, :count] == saved[:, :count]).all()
            assert (restored[:, count:] == -1).all()
        kept = snapshots.save(tokens, row, rng.choice([0, 1, 3, 100]))
        assert kept <= snapshots.find(tokens)
        assert snapshots.resident <= blocks * BLOCK_BYTES
        found += count
    assert found > 1000


def test_with_room_for_all_the_longest_common_prefix_is_found() -> None:
    snapshots = Snapshots(LAYERS, 4000 * BLOCK_BYTES)
    saved: list[list[int]] = []
    for tokens in texts(random.Random(5), 300):
        assert snapshots.find(tokens) == max((shared(tokens, each) for each in saved), default=0)
        assert snapshots.save(tokens, row_of(tokens), 100) == len(tokens)
        saved.append(tokens)


def test_texts_with_a_common_beginning_share_its_blocks_and_a_continued_text_its_last_one() -> None:
    snapshots = Snapshots(LAYERS, 100 * BLOCK_BYTES)
    common = [5] * (2 * BLOCK)
    for ending in range(4):
        tokens = [*common, ending]
        snapshots.save(tokens, row_of(tokens), 100)
    assert snapshots.resident == (2 + 4) * BLOCK_BYTES
    longer = [*common, 3, 1, 1]
    snapshots.save(longer, row_of(longer), 100)
    assert snapshots.resident == (2 + 4) * BLOCK_BYTES
    assert snapshots.find(longer) == len(longer)


def test_the_least_recently_used_text_goes_first_and_from_its_end() -> None:
    snapshots = Snapshots(LAYERS, 4 * BLOCK_BYTES)
    one, two, three = ([token] * (2 * BLOCK) for token in (1, 2, 3))
    snapshots.save(one, row_of(one), 100)
    snapshots.save(two, row_of(two), 100)
    assert snapshots.find(one) == 2 * BLOCK
    snapshots.save(three[:BLOCK], row_of(three), 100)
    assert [snapshots.find(each) for each in (two, three, one)] == [BLOCK, BLOCK, 2 * BLOCK]


def test_a_text_beyond_the_budget_is_kept_as_far_as_it_goes_and_does_not_evict_itself() -> None:
    snapshots = Snapshots(LAYERS, 3 * BLOCK_BYTES)
    long = list(range(400))
    assert snapshots.save(long, row_of(long), 100) == 3 * BLOCK
    assert snapshots.find(long) == 3 * BLOCK
    assert Snapshots(LAYERS, BLOCK_BYTES - 1).save(long, row_of(long), 100) == 0


def test_the_default_budget_is_a_part_of_the_memory() -> None:
    assert 0 < default_budget() <= 1 << 30


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's own figure of resident memory")
def test_resident_memory_stays_within_the_budget_and_is_given_back() -> None:
    layers = [Layer("past", "present", heads=4, width=64, dtype="float32")] * 8
    row = [np.ones((4, 1024, 64), np.float32)] * 8
    before = resident()
    snapshots = Snapshots(layers, 64 << 20)
    assert resident() - before < 4 << 20, "memory is taken as it is needed"
    for n in range(40):
        snapshots.save([n] * 1024, row, 100)
        assert resident() - before < 68 << 20
    assert resident() - before > 60 << 20
    del snapshots
    gc.collect()
    assert resident() - before < 4 << 20


# In the engine.


def follow(case: Case, *requests: tuple[list[int], int], **settings: int) -> FakePort:
    """Requests 1, 2, …, each after the answer to the one before."""
    port = FakePort()
    for at, (tokens, limit) in enumerate(requests):
        port.at(at * FOREVER, Admit(at + 1, tokens, limit))
    case.run(port, **settings)
    assert port.reason is None and port.failures == {}
    return port


def cold(case: Case, tokens: list[int], limit: int, sampling: Sampling | None = None) -> list[int]:
    """The answer of an engine that keeps nothing."""
    port = case.run(FakePort().at(0, Admit(1, tokens, limit, sampling)), cache_bytes=0)
    assert port.cached == {}
    return port.answers[1]


@pytest.fixture
def block_bytes(onnx_case: Case) -> int:
    """Bytes of a block of the tiny model."""
    return BlockPool(Model(str(onnx_case.folder), Settings()).layers, 0).block_bytes


def test_a_prompt_then_one_that_begins_like_it_then_the_first_again(onnx_case: Case) -> None:
    first = prompt(1, 150)
    second = first[:100] + prompt(2, 70)
    port = follow(onnx_case, (first, 20), (second, 20), (first, 20), (second, 20))
    assert port.cached == {2: 100, 3: 150 - READ_AGAIN, 4: 170 - READ_AGAIN}
    assert port.answers[1] == port.answers[3] == cold(onnx_case, first, 20)
    assert port.answers[2] == port.answers[4] == cold(onnx_case, second, 20)


def test_the_next_turn_starts_after_the_last_answer(onnx_case: Case) -> None:
    first = prompt(3, 70)
    second = first + cold(onnx_case, first, 30) + prompt(13, 8)
    third = second + cold(onnx_case, second, 30) + prompt(23, 8)
    port = follow(onnx_case, (first, 30), (second, 30), (third, 30))
    # The last token of an answer has not been through the model.
    assert port.cached == {2: 70 + 29, 3: 108 + 29}
    assert port.answers[3] == cold(onnx_case, third, 30)


def test_the_last_tokens_of_a_prompt_are_always_run(onnx_case: Case) -> None:
    for length in (1, 2, 3, 63, 64, 65, 128, 129):
        tokens = prompt(4, length)
        port = follow(onnx_case, (tokens, 5), (tokens, 5))
        assert port.cached == ({2: length - READ_AGAIN} if length > READ_AGAIN else {})
        assert port.answers[2] == port.answers[1] == cold(onnx_case, tokens, 5)


def test_without_a_budget_nothing_is_kept(onnx_case: Case) -> None:
    tokens = prompt(1, 150)
    port = follow(onnx_case, (tokens, 20), (tokens, 20), cache_bytes=0)
    assert port.cached == {}
    assert port.answers[2] == port.answers[1]


def test_a_budget_beyond_all_memory_is_refused(onnx_case: Case) -> None:
    port = onnx_case.run(FakePort(), cache_bytes=2**63 + 2**40)
    assert port.reason is not None
    assert (
        port.reason.startswith(f"cache_bytes is {2**63 + 2**40}, which cannot be reserved") and "hint:" in port.reason
    )


def test_a_seed_draws_the_same_answer_from_a_prompt_that_is_kept(onnx_case: Case) -> None:
    tokens, hot = prompt(5, 100), Sampling(temperature=1.3, top_p=0.95, seed=11)
    port = FakePort().at(0, Admit(1, tokens, 20)).at(FOREVER, Admit(2, tokens, 20, hot))
    onnx_case.run(port)
    assert port.cached == {2: 98}
    assert port.answers[2] == cold(onnx_case, tokens, 20, hot)


def serve(case: Case, port: FakePort, chunk: int, cache_bytes: int | None = None, max_batch: int = 16) -> None:
    """Serves with a prefill chunk and a budget of the test's choice, and checks the budget after every step."""
    engine = OnnxEngine(Model(str(case.folder), Settings(max_batch=max_batch)), port.fail, chunk, cache_bytes)
    step = engine.step

    def checked() -> list[object]:
        made = step()
        assert cache_bytes is None or engine._snapshots.resident <= cache_bytes
        return made

    engine.step = checked  # type: ignore[method-assign, assignment]
    loop.serve(engine, port)
    engine.close()
    assert port.violations == [] and port.failures == {}


@pytest.mark.parametrize("blocks", [1, 2, 3, 6, 40])
def test_conversations_under_a_small_budget_get_their_cold_answers(
    onnx_case: Case, block_bytes: int, blocks: int
) -> None:
    rng = random.Random(blocks)
    port = FakePort()
    asked: dict[int, tuple[list[int], int]] = {}
    beginnings = [prompt(seed, 150) for seed in range(4)]
    for id in range(1, 41):
        tokens = rng.choice(beginnings)[: rng.randint(1, 150)] + prompt(id, rng.randint(0, 30))
        asked[id] = (tokens, rng.randint(1, 60))
        port.at(3 * id, Admit(id, *asked[id]))
    serve(onnx_case, port, 32, blocks * block_bytes, max_batch=4)
    assert port.cached, "something was found"
    for id, (tokens, limit) in asked.items():
        assert port.answers[id] == cold(onnx_case, tokens, limit)


def test_many_prompts_at_once_share_what_the_first_of_them_has_read(onnx_case: Case) -> None:
    system = prompt(6, 128)
    asked = {id: system + prompt(id, 5 + id) for id in range(1, 13)}
    port = FakePort().at(0, *(Admit(id, tokens, 20) for id, tokens in asked.items()))
    serve(onnx_case, port, 64)
    assert sum(cached >= 128 for cached in port.cached.values()) >= 11
    for id, tokens in asked.items():
        assert port.answers[id] == cold(onnx_case, tokens, 20)


@pytest.mark.parametrize("seed", range(4))
def test_joins_and_leaves_among_shared_beginnings_give_cold_answers(
    onnx_case: Case, block_bytes: int, seed: int
) -> None:
    rng = random.Random(seed)
    port = FakePort()
    asked: dict[int, tuple[list[int], int]] = {}
    cancelled = set()
    for id in range(1, 41):
        asked[id] = (prompt(id % 3, 20 + 40 * (id % 4)) + prompt(id, rng.randint(0, 20)), rng.randint(1, 90))
        start = rng.randint(0, 120)
        port.at(start, Admit(id, *asked[id]))
        if rng.random() < 0.4:
            cancelled.add(id)
            end = start + rng.randint(1, 40)
            port.at(end, Cancel(id)) if rng.random() < 0.5 else port.leave(end, id)
    serve(onnx_case, port, 24, (5, 10, 20, 1000)[seed] * block_bytes, max_batch=5)
    for id, (tokens, limit) in asked.items():
        answer = port.answers.get(id, [])
        assert id in cancelled or len(answer) == limit
        assert answer == cold(onnx_case, tokens, limit)[: len(answer)]


def test_a_prompt_that_is_cancelled_while_it_is_extended_leaves_what_it_has_read(onnx_case: Case) -> None:
    first = prompt(7, 80)
    second = first + prompt(8, 120)
    port = FakePort().at(0, Admit(1, first, 2)).at(100, Admit(2, second, 20)).at(FOREVER, Admit(3, second, 20))
    started = 6  # 5 chunks of the first prompt, and the second token of its answer
    port.leave(started + 5, 2)
    serve(onnx_case, port, 16)
    assert port.answers[2] == []
    assert port.cached == {3: 80 + 5 * 16}
    assert port.answers[3] == cold(onnx_case, second, 20)


def test_an_answer_that_is_cancelled_can_be_continued(onnx_case: Case) -> None:
    """A stop string ends an answer so: its row is released in the step in which the rest of it is kept."""
    tokens = prompt(9, 60)
    others = [Admit(id, prompt(id, 30), 120) for id in (1, 2)]
    port = FakePort().at(0, *others, Admit(3, tokens, 150)).at(90, Cancel(3))
    serve(onnx_case, port, 128)
    turn = [*tokens, *port.answers[3], *prompt(10, 5)]
    again = FakePort().at(0, *others, Admit(3, tokens, 150)).at(90, Cancel(3)).at(91, Admit(4, turn, 30))
    serve(onnx_case, again, 128)
    assert again.cached == {4: len(turn) - 5 - 1}
    assert again.answers[4] == cold(onnx_case, turn, 30)
    assert all(again.answers[each.id] == cold(onnx_case, each.prompt, 120) for each in others)


def test_what_a_step_copies_is_bounded(onnx_case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    store = BlockPool.store

    def counted(self: BlockPool, block: int, row: Row, start: int, first: int, end: int) -> None:
        copies.append(end - first)
        store(self, block, row, start, first, end)

    monkeypatch.setattr(BlockPool, "store", counted)
    engine = OnnxEngine(Model(str(onnx_case.folder), Settings()), FakePort().fail)
    for id in range(1, 9):
        engine.take(Admit(id, prompt(id, 40), 200))
    saved = 0
    for _ in range(150):
        copies.clear()
        if len(engine.step()) == 8:
            assert len(copies) <= 2 * SAVES
            saved += sum(copies)
    assert saved >= 8 * 64, "all of them are kept as they grow"
    engine.close()


def test_a_closed_engine_holds_its_session_no_more(onnx_case: Case) -> None:
    engine = OnnxEngine(Model(str(onnx_case.folder), Settings()), FakePort().fail)
    rows = weakref.ref(engine._rows)
    engine.close()
    assert rows() is None


def test_an_engine_that_is_closed_frees_what_it_kept(onnx_case: Case) -> None:
    port = FakePort().at(0, Admit(1, prompt(1, 150), 50)).close_at(3)
    engine = OnnxEngine(Model(str(onnx_case.folder), Settings()), port.fail)
    loop.serve(engine, port)
    assert engine._snapshots.resident > 0
    kept = weakref.ref(engine._snapshots)
    engine.close()
    gc.collect()
    assert kept() is None
