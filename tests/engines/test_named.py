"""Snapshots that have a name, and salts: who may start from what, what stays under pressure, and that nothing is lost by it."""

from __future__ import annotations

import random

import pytest

from cases import Case, prompt
from emberd import loop
from emberd.kv import BLOCK, BlockPool
from emberd.onnx import READ_AGAIN, OnnxEngine
from emberd.session import Model
from emberd.snapshots import Named, Snapshots
from fakeport import Admit, Cancel, FakePort, Forget, Sampling, Settings
from test_snapshots import BLOCK_BYTES, FOREVER, LAYERS, cold, row_of, shared, texts


def kept(snapshots: Snapshots, tokens: list[int], salt: str = "", source: Named | None = None) -> int:
    """How much of a text is kept, after a look at what is restored of it."""
    row = row_of([])
    count = snapshots.restore(tokens, row, salt, source)
    for got, expected in zip(row, row_of(tokens[:count]), strict=True):
        assert (got == expected).all()
    return count


def test_salts_share_nothing() -> None:
    snapshots = Snapshots(LAYERS, 20 * BLOCK_BYTES)
    text = list(range(8, 158))
    assert snapshots.save(text, row_of(text), 9, "a") == 150
    assert kept(snapshots, text, "a") == 150
    assert kept(snapshots, text) == kept(snapshots, text, "b") == 0
    before = snapshots.resident
    assert snapshots.save_as(1, text, row_of(text), "b") == 150
    assert snapshots.resident == 2 * before, "not even memory"
    assert snapshots.lease(1, "a") is None and snapshots.lease(1, "b") is not None


def test_what_has_a_name_stays_before_what_has_none() -> None:
    snapshots = Snapshots(LAYERS, 6 * BLOCK_BYTES)
    named, first, second = (list(range(start, start + 3 * BLOCK)) for start in (100, 400, 700))
    snapshots.save_as(1, named, row_of(named))
    for text in (first, second, first, second):
        assert snapshots.save(text, row_of(text), 9) == 3 * BLOCK
        assert kept(snapshots, named) == 3 * BLOCK
    longer = list(range(1000, 1000 + 6 * BLOCK))
    assert snapshots.save(longer, row_of(longer), 9) == 3 * BLOCK, "no name goes for what has none"
    assert kept(snapshots, named) == 3 * BLOCK


def test_of_what_has_a_name_the_least_recently_used_goes_first() -> None:
    snapshots = Snapshots(LAYERS, 6 * BLOCK_BYTES)
    one, two, three = (list(range(start, start + 3 * BLOCK)) for start in (100, 400, 700))
    snapshots.save_as(1, one, row_of(one))
    snapshots.save_as(2, two, row_of(two))
    lease = snapshots.lease(1)
    assert lease is not None
    snapshots.release(lease)
    assert snapshots.save_as(3, three, row_of(three)) == 3 * BLOCK
    assert snapshots.lease(2) is None
    assert snapshots.lease(1) is not None and snapshots.lease(3) is not None


def test_what_somebody_is_about_to_start_from_stays_in_any_case() -> None:
    snapshots = Snapshots(LAYERS, 4 * BLOCK_BYTES)
    one, two = (list(range(start, start + 3 * BLOCK)) for start in (100, 400))
    snapshots.save_as(1, one, row_of(one))
    lease = snapshots.lease(1)
    assert lease is not None
    snapshots.forget(1)
    assert snapshots.lease(1) is None
    assert snapshots.save_as(2, two, row_of(two)) == BLOCK, "what there is room for"
    assert kept(snapshots, one, "", lease) == 3 * BLOCK
    snapshots.release(lease)
    assert snapshots.save_as(3, two, row_of(two)) == 3 * BLOCK
    assert kept(snapshots, one) <= BLOCK


def test_a_named_text_serves_its_own_tokens_and_no_others() -> None:
    snapshots = Snapshots(LAYERS, 20 * BLOCK_BYTES)
    text = list(range(100, 200))
    longer = text + list(range(500, 600))
    other = list(range(800, 900))
    snapshots.save_as(1, text, row_of(text))
    snapshots.save(longer, row_of(longer), 9)  # goes on in the block that the named text ends in
    snapshots.save(other, row_of(other), 9)
    source = snapshots.lease(1)
    assert source is not None
    assert kept(snapshots, longer) == 200 and kept(snapshots, longer, "", source) == 100
    assert kept(snapshots, [*text[:70], *other], "", source) == 70
    assert kept(snapshots, other, "", source) == 0


def test_a_name_that_nothing_has_is_no_error() -> None:
    snapshots = Snapshots(LAYERS, BLOCK_BYTES)
    snapshots.forget(5)
    assert snapshots.lease(5) is None
    nothing = Snapshots(LAYERS, 0)
    assert nothing.save_as(1, [8, 9], row_of([8, 9])) == 0 and nothing.lease(1) is None


@pytest.mark.parametrize("blocks", [1, 3, 8, 25])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_named_and_forgotten_nothing_is_mixed_up(
    seed: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    snapshots = Snapshots(LAYERS, blocks * BLOCK_BYTES)
    evict = snapshots._evict

    def checked(block: object) -> None:
        assert not block.follow and not block.named  # type: ignore[attr-defined]
        evict(block)  # type: ignore[arg-type]

    monkeypatch.setattr(snapshots, "_evict", checked)
    saved: dict[str, list[list[int]]] = {"": [], "a": []}
    named: dict[int, tuple[str, list[int]]] = {}
    leases: list[tuple[Named, list[int]]] = []
    for number, text in enumerate(texts(rng, 250)):
        salt = rng.choice(("", "a"))
        kind = rng.random()
        if kind < 0.45:
            snapshots.save(text, row_of(text), rng.randint(1, 9), salt)
            saved[salt].append(text)
        elif kind < 0.75:
            count = snapshots.save_as(number, text, row_of(text), salt)
            saved[salt].append(text)
            named[number] = (salt, text[:count])
        elif named and kind < 0.85:
            snapshots.forget(rng.choice(list(named)))
        elif named and kind < 0.95:
            salt, held = named[name := rng.choice(list(named))]
            lease = snapshots.lease(name, salt)
            assert snapshots.lease(name, "other") is None
            if lease is not None:
                leases.append((lease, held))
        elif leases:
            snapshots.release(leases.pop(rng.randrange(len(leases)))[0])
        for lease, held in leases:
            assert kept(snapshots, [*held, 5], lease.salt, lease) == len(held)
        text = rng.choice(saved[salt] or [[8]])
        found = kept(snapshots, text, salt)
        assert found <= max((shared(text, each) for each in saved[salt]), default=0)
        assert snapshots.resident <= blocks * BLOCK_BYTES
    for lease, _ in leases:
        snapshots.release(lease)
    for name in named:
        snapshots.forget(name)
    assert len(snapshots._recent) == snapshots._pool.taken, "everything may go again"
    text = list(range(10_000, 10_000 + 70 * blocks))[:500]
    assert snapshots.save(text, row_of(text), 99) == min(len(text), blocks * BLOCK)


# Through the engine.


@pytest.fixture
def block_bytes(onnx_case: Case) -> int:
    """Bytes of a block of the tiny model."""
    return BlockPool(Model(str(onnx_case.folder), Settings()).layers, 0).block_bytes


def serve(case: Case, port: FakePort, chunk: int = 128, cache_bytes: int | None = None) -> OnnxEngine:
    """Serves; the engine is still open, with what it has kept."""
    engine = OnnxEngine(Model(str(case.folder), Settings()), port.fail, chunk, cache_bytes)
    loop.serve(engine, port)
    assert port.violations == [] and port.failures == {}
    return engine


def test_a_turn_starts_from_the_snapshot_of_the_last_and_branches_as_often_as_asked(onnx_case: Case) -> None:
    first = prompt(1, 90)
    answer = cold(onnx_case, first, 20)
    turns = {id: [*first, *answer, *prompt(id, 10)] for id in (2, 3)}
    port = FakePort().at(0, Admit(1, first, 20, save_as=7))
    port.at(FOREVER, *(Admit(id, tokens, 15, start_from=7, save_as=id) for id, tokens in turns.items()))
    third = [*turns[2], *cold(onnx_case, turns[2], 15), *prompt(4, 5)]
    port.at(2 * FOREVER, Admit(4, third, 15, start_from=2))
    serve(onnx_case, port).close()
    assert port.cached == {2: 109, 3: 109, 4: len(turns[2]) + 14}
    for id, tokens in {**turns, 4: third}.items():
        assert port.answers[id] == cold(onnx_case, tokens, 15)


def test_a_request_starts_from_nothing_but_the_snapshot_it_names(onnx_case: Case) -> None:
    tokens = prompt(1, 100)
    port = FakePort().at(0, Admit(1, tokens[:50], 1, save_as=1)).at(FOREVER, Admit(2, tokens, 5))
    port.at(2 * FOREVER, Admit(3, tokens, 5, start_from=1)).at(3 * FOREVER, Admit(4, tokens, 5, start_from=99))
    port.at(4 * FOREVER, Admit(5, tokens, 5))
    serve(onnx_case, port).close()
    assert port.cached == {2: 50, 3: 50, 5: 100 - READ_AGAIN}
    assert all(port.answers[id] == cold(onnx_case, tokens, 5) for id in (2, 3, 4, 5))


def test_requests_of_another_salt_start_from_nothing(onnx_case: Case) -> None:
    tokens = prompt(1, 100)
    port = FakePort().at(0, Admit(1, tokens, 5, salt="one", save_as=1))
    for n, (salt, start) in enumerate([("two", None), ("two", 1), ("", 1), ("one", 1)], 2):
        port.at(n * FOREVER, Admit(n, tokens, 5, salt=salt, start_from=start))
    serve(onnx_case, port).close()
    assert port.cached == {5: 100 - READ_AGAIN}
    assert all(port.answers[id] == cold(onnx_case, tokens, 5) for id in range(1, 6))


def test_a_forgotten_name_serves_nothing_and_what_it_held_serves_the_salt(onnx_case: Case) -> None:
    tokens = prompt(1, 100)
    port = FakePort().at(0, Admit(1, tokens, 5, save_as=1)).at(FOREVER, Forget(1), Admit(2, tokens, 5, start_from=1))
    port.at(2 * FOREVER, Admit(3, tokens, 5), Forget(1), Forget(55))
    serve(onnx_case, port).close()
    assert port.cached == {3: 100 - READ_AGAIN}
    assert port.answers[1] == port.answers[2] == port.answers[3]


def test_a_snapshot_stays_for_a_request_that_waits_to_start_from_it(onnx_case: Case, block_bytes: int) -> None:
    """It queues behind a long prompt, the name is given up meanwhile, and others use up the budget."""
    tokens = prompt(1, 128)
    port = FakePort().at(0, Admit(1, tokens, 1, save_as=1))
    others = [Admit(id, prompt(id, 200), 1) for id in (2, 3, 4)]
    began = 128 // 16
    port.at(began, *others, Admit(9, tokens + prompt(9, 120), 5, start_from=1)).at(began + 1, Forget(1))
    engine = serve(onnx_case, port, 16, 3 * block_bytes)
    assert port.cached == {9: 128}
    assert port.answers[9] == cold(onnx_case, tokens + prompt(9, 120), 5)
    assert len(engine._snapshots._recent) == engine._snapshots._pool.taken, "nothing has a name or a lease any more"
    engine.close()


@pytest.mark.parametrize("way", ["cancelled", "gone", "failed"])
@pytest.mark.parametrize("push", [3, 9])
def test_a_request_that_ends_otherwise_makes_no_snapshot_and_harms_none(
    onnx_case: Case, way: str, push: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of its prompt (after 3 pushes) or of its answer."""
    tokens = prompt(1, 70)
    longer = tokens + prompt(2, 16 * 6)
    began = 5  # chunks of the first prompt
    port = FakePort().at(0, Admit(1, tokens, 1, save_as=1)).at(began, Admit(2, longer, 50, start_from=1, save_as=2))
    if way == "cancelled":
        port.at(began + push, Cancel(2))
    elif way == "gone":
        port.leave(began + push, 2)
    else:
        from emberd.rows import Rows

        for name in ("extend", "draw"):
            real = getattr(Rows, name)

            def faulty(self: Rows, *given: object, real: object = real) -> object:
                if len(port.pushes) == began + push - 1:
                    raise ValueError("a fault of this sequence")
                return real(self, *given)  # type: ignore[operator]

            monkeypatch.setattr(Rows, name, faulty)
        if push == 9:
            port = FakePort().at(0, Admit(1, tokens, 1, save_as=1))
            hot = Sampling(temperature=0.0, logit_bias={9: 0.0001})
            port.at(FOREVER, Admit(2, longer, 50, hot, start_from=1, save_as=2))
    port.at(FOREVER * 2, Admit(3, longer, 9, start_from=2)).at(FOREVER * 3, Admit(4, tokens, 9, start_from=1))
    engine = OnnxEngine(Model(str(onnx_case.folder), Settings()), port.fail, 16)
    loop.serve(engine, port)
    assert port.violations == [] and 2 not in port.finishes
    assert (2 in port.failures) == (way == "failed")
    assert bool(port.answers[2]) == (push == 9)
    assert 3 not in port.cached and port.cached[4] == 70 - READ_AGAIN
    assert list(engine._snapshots._named) == [1]
    engine.close()
    monkeypatch.undo()
    assert port.answers[3] == cold(onnx_case, longer, 9) and port.answers[4] == cold(onnx_case, tokens, 9)


@pytest.mark.parametrize("blocks", [2, 5, 9, 100])
@pytest.mark.parametrize("seed", range(3))
def test_sessions_under_pressure_get_their_cold_answers(
    onnx_case: Case, block_bytes: int, blocks: int, seed: int
) -> None:
    """Turns that start from the snapshot of one before, in two salts, with names that are given up at random."""
    rng = random.Random(seed)
    port = FakePort()
    asked: dict[int, tuple[list[int], int]] = {}
    cancelled = set()
    ends = [(prompt(n, 60), None, "ab"[n % 2]) for n in range(4)]
    for id in range(1, 36):
        text, start, salt = rng.choice(ends)
        tokens = text + prompt(100 + id, rng.randint(1, 25))
        limit = rng.randint(1, 20)
        if len(tokens) + limit > 250:
            continue
        asked[id] = (tokens, limit)
        at = 8 * id + rng.randint(0, 6)
        port.at(at, Admit(id, tokens, limit, salt=salt, start_from=start, save_as=id if rng.random() < 0.7 else None))
        ends.append((tokens + cold(onnx_case, tokens, limit), id, salt))
        if rng.random() < 0.2:
            port.at(at + rng.randint(1, 90), Forget(id))
        if rng.random() < 0.2:
            cancelled.add(id)
            port.at(at + rng.randint(1, 8), Cancel(id))
    engine = serve(onnx_case, port, 24, blocks * block_bytes)
    assert engine._snapshots.resident <= blocks * block_bytes
    named = {block for each in engine._snapshots._named.values() for block in each.path}
    assert len(named) + len(engine._snapshots._recent) == engine._snapshots._pool.taken
    engine.close()
    assert blocks < 5 or port.cached, "something was found"
    for id, (tokens, limit) in asked.items():
        answer = port.answers.get(id, [])
        assert id in cancelled or len(answer) == limit
        assert answer == cold(onnx_case, tokens, limit)[: len(answer)]


def test_all_at_once_names_salts_and_little_memory_for_running_requests(onnx_case: Case, block_bytes: int) -> None:
    """Answers make room, are read again from what was kept of them, and are saved under their names in the end."""
    tokens = {id: prompt(id % 2, 60) + prompt(id, 10) for id in range(1, 7)}
    port = FakePort().at(0, *(Admit(id, text, 90, salt="ab"[id % 2], save_as=id) for id, text in tokens.items()))
    whole = {id: text + cold(onnx_case, text, 90) for id, text in tokens.items()}
    turns = (Admit(10 + id, [*text, 9, 10], 5, salt="ab"[id % 2], start_from=id) for id, text in whole.items())
    port.at(FOREVER, *turns)
    model = Model(str(onnx_case.folder), Settings())
    engine = OnnxEngine(model, port.fail, 24, 100 * block_bytes, 7 * block_bytes)
    loop.serve(engine, port)
    engine.close()
    assert port.violations == [] and port.failures == {}
    assert all(port.cached[10 + id] == 70 + 89 for id in tokens)
    for id, text in whole.items():
        assert port.answers[id] == text[70:]
        assert port.answers[10 + id] == cold(onnx_case, [*text, 9, 10], 5)
