"""The blocks that are counted for keys and values in the ONNX engine, and that this is all the memory they take."""

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
from emberd.engine import Request, Step
from emberd.kv import BLOCK, KvCache, Layer
from emberd.onnx import OnnxEngine
from emberd.session import Model
from fakeport import Admit, Cancel, FakePort, Settings

LAYERS = [Layer("a", "b", heads=2, width=64, dtype="float32"), Layer("c", "d", heads=3, width=64, dtype="float16")]


@pytest.fixture
def block_bytes(onnx_case: Case) -> int:
    """Bytes of 64 tokens of the tiny model in a row."""
    return KvBudget(Model(str(onnx_case.folder), Settings()).layers, 0).block_bytes


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


@pytest.mark.parametrize("blocks", [3, 4, 6, 9])
def test_what_is_counted_is_what_the_requests_have(
    onnx_case: Case, block_bytes: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(blocks)
    port = FakePort()
    for id in range(1, 25):
        start = rng.randint(0, 150)
        port.at(start, Admit(id, prompt(id, rng.randint(1, 100)), rng.randint(1, 90)))
        if rng.random() < 0.3:
            port.at(start + rng.randint(1, 60), Cancel(id))
    engine = OnnxEngine(Model(str(onnx_case.folder), Settings(max_batch=6)), port.fail, 32, 0, blocks * block_bytes)
    step, most = engine.step, 0

    def checked() -> list[Step]:
        nonlocal most
        made = step()
        budget, rows = engine._budget, engine._rows
        assert isinstance(budget, KvBudget)
        held = {row: each.room for row, each in enumerate(engine._running)}
        held |= {each.row: each.room for each in engine._prompts if each.row is not None}
        assert budget.taken == sum(room // BLOCK for room in held.values())
        assert budget.resident <= blocks * block_bytes
        assert all(rows.length(row) <= held.get(row, 0) for row in range(7))
        most = max(most, budget.taken)
        return made

    monkeypatch.setattr(engine, "step", checked)
    loop.serve(engine, port)
    assert most >= min(blocks - 1, 6) and port.failures == {}
    engine.close()


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
