"""The port itself, call by call: what the contract allows, what it refuses, and what crosses the boundary."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from emberd import _core

if not hasattr(_core, "port"):
    pytest.skip("the extension module is not built", allow_module_level=True)


def answer(reader: Any) -> tuple[list[int], str]:
    """The whole answer and how it ended."""
    ids: list[int] = []
    while (chunk := reader.read()) is not None:
        ids += chunk[0]
        if chunk[1] is not None:
            assert reader.read() is None
            return ids, chunk[1]
    raise AssertionError("the answer ended without a finish")


def test_an_engine_that_ends_without_a_finish_fails_what_is_left() -> None:
    doors, port = _core.port()
    port.ready(_core.Capabilities(100, 1, 100, []))
    inside, queued = doors.submit([1], 3), doors.submit([2], 3)
    [order] = port.wait()
    assert port.push([(order.id, [7], None)]) == []
    assert inside.read() == ([7], None)
    port.close()
    for reader in (inside, queued):
        with pytest.raises(RuntimeError, match="the engine ended without a finish"):
            reader.read()
    with pytest.raises(_core.PortError, match="closed by its own side"):
        port.poll()


def test_a_port_that_nobody_holds_any_more_fails_what_is_left() -> None:
    doors, port = _core.port()
    port.ready(_core.Capabilities(100, 1, 100, []))
    reader = doors.submit([1], 3)
    del port
    gc.collect()
    with pytest.raises(RuntimeError, match="the engine ended without a finish"):
        reader.read()


def test_one_request_can_fail_alone() -> None:
    doors, port = _core.port()
    port.ready(_core.Capabilities(100, 2, 100, []))
    bad, good = doors.submit([1], 1), doors.submit([2], 1)
    port.wait()
    port.fail(bad.id, "its cache is broken; hint: ask again\nmore for the log")
    assert port.push([(good.id, [7], "length")]) == []
    assert answer(good) == ([7], "length")
    with pytest.raises(RuntimeError, match=r"^its cache is broken\nhint: ask again$"):
        bad.read()


@pytest.mark.parametrize(
    ("tokens", "finish", "why"),
    [
        ([-1], None, "no list of token ids"),
        ([2**32], None, "no list of token ids"),
        (["one"], None, "no list of token ids"),
        (None, None, "no list of token ids"),
        ([1], "done", "which is no finish"),
        ([1], 3, "which is no finish"),
        ([1, 2, 3, 4], "length", "more tokens than were asked for"),
    ],
)
def test_an_impossible_entry_fails_its_own_request_alone(tokens: Any, finish: Any, why: str) -> None:
    doors, port = _core.port()
    port.ready(_core.Capabilities(100, 4, 100, []))
    bad, good = doors.submit([1], 3), doors.submit([2], 3)
    assert len(port.wait()) == 2
    assert port.push([(bad.id, tokens, finish), (good.id, [7], None)]) == [bad.id]
    with pytest.raises(RuntimeError, match=why):
        bad.read()
    assert good.read() == ([7], None)
    assert port.push([(good.id, [8, 9], "length")]) == []
    assert answer(good) == ([8, 9], "length")
    assert doors.load() == (0, 0)


@pytest.mark.parametrize(
    ("logprobs", "why"),
    [
        ([], None),
        (None, None),
        ([(-0.5, [(7, -0.5), (8, -1.0)])], None),
        ([(-0.5, []), (-0.5, [])], "gave log probabilities for 2"),
        ([-0.5], "no list of log probabilities"),
        ([(-0.5, [(-1, -0.5)])], "no list of log probabilities"),
        ("x", "no list of log probabilities"),
    ],
)
def test_log_probabilities_cross_with_their_ids_or_fail_their_request(logprobs: Any, why: str | None) -> None:
    doors, port = _core.port()
    port.ready(_core.Capabilities(100, 4, 100, []))
    asking = _core.Sampling(0.0, 1.0, 0, 0, top_logprobs=2)
    reader, good = doors.submit([1], 3, asking), doors.submit([2], 3)
    assert len(port.wait()) == 2
    gone = port.push([(reader.id, [7], None, logprobs), (good.id, [7], None)])
    assert good.read() == ([7], None)
    assert good.logprobs() == []
    if why is None:
        assert (gone, reader.read()) == ([], ([7], None))
        assert (reader.logprobs(), reader.logprobs()) == (logprobs or [], [])
    else:
        assert gone == [reader.id]
        with pytest.raises(RuntimeError, match=why):
            reader.read()


@pytest.mark.parametrize(
    "entry", [7, (1, [2]), (1, None), (1, "2"), ("x", 2), [1, [2], None], (1, [2], None, None, None), ("x", [1], None)]
)
def test_what_is_no_entry_at_all_raises(entry: Any) -> None:
    doors, port = _core.port()
    port.ready(_core.Capabilities(100, 4, 100, []))
    reader = doors.submit([1], 3)
    port.wait()
    with pytest.raises((ValueError, TypeError)):
        port.push([entry])
    assert port.push([(reader.id, [5, 5, 5], "length")]) == []
    assert answer(reader) == ([5, 5, 5], "length")


@pytest.mark.parametrize("cached", [4, 5, -1, 2**40])
def test_more_cached_tokens_than_the_prompt_allows_fail_their_request_alone(cached: int) -> None:
    doors, port = _core.port()
    port.ready(_core.Capabilities(100, 4, 100, []))
    bad, good = doors.submit([1, 2, 3, 4], 3), doors.submit([1, 2, 3, 4], 1)
    port.wait()
    assert port.push([(bad.id, cached), (bad.id, [7], None), (good.id, 3), (good.id, [7], "length")]) == [bad.id]
    with pytest.raises(RuntimeError, match=r"of a prompt.* were cached"):
        bad.read()
    assert answer(good) == ([7], "length")
    assert port.push([(good.id, 3)]) == [], "what is told of a request that is over is not heard"


def test_a_push_waits_for_no_reader() -> None:
    doors, port = _core.port()
    port.ready(_core.Capabilities(100_000, 1, 100, []))
    reader = doors.submit([1], 50_000)
    [order] = port.wait()
    for at in range(50_000):
        finish = "length" if at == 49_999 else None
        assert port.push([(order.id, [at % 100], finish)]) == []
    ids, finish = reader.read()
    assert (len(ids), ids[:3], ids[-1], finish) == (50_000, [0, 1, 2], 99, "length")


# Order of calls.


def _calls(port: Any) -> dict[str, Any]:
    return {
        "ready": lambda: port.ready(_core.Capabilities(10, 1, 10, [])),
        "wait": port.wait,
        "poll": port.poll,
        "push": lambda: port.push([]),
    }


@pytest.mark.parametrize("call", ["wait", "poll", "push"])
def test_a_call_before_ready_is_refused(call: str) -> None:
    _doors, port = _core.port()
    with pytest.raises(_core.PortError, match=f"called {call} before ready"):
        _calls(port)[call]()


@pytest.mark.parametrize("call", ["ready", "wait", "poll", "push"])
def test_a_call_after_the_failure_is_refused(call: str) -> None:
    doors, port = _core.port()
    port.ready(_core.Capabilities(10, 1, 10, []))
    port.fail(None, "over")
    with pytest.raises(_core.PortError, match=f"called {call} after it had failed"):
        _calls(port)[call]()
    with pytest.raises(RuntimeError, match=r"^over"):
        doors.submit([1], 1)


def test_ready_is_said_once() -> None:
    _doors, port = _core.port()
    port.ready(_core.Capabilities(10, 1, 10, []))
    with pytest.raises(_core.PortError, match="twice"):
        port.ready(_core.Capabilities(10, 1, 10, []))


@pytest.mark.parametrize("capabilities", [(1, 1, 10, []), (10, 0, 10, []), (10, 1, 0, []), (10, 1, 10, [10])])
def test_capabilities_that_cannot_be_are_refused(capabilities: tuple[int, int, int, list[int]]) -> None:
    doors, port = _core.port()
    with pytest.raises(_core.PortError, match="the engine says"):
        port.ready(_core.Capabilities(*capabilities))
    with pytest.raises(RuntimeError, match="still loading"):
        doors.submit([1], 1)


def test_an_id_that_was_never_admitted_is_refused() -> None:
    doors, port = _core.port()
    port.ready(_core.Capabilities(10, 1, 10, []))
    reader = doors.submit([1], 1)
    port.wait()
    for call in (lambda: port.push([(reader.id + 1, [1], None)]), lambda: port.fail(reader.id + 1, "no")):
        with pytest.raises(_core.PortError, match="never admitted"):
            call()
    assert port.push([(reader.id, [1], "length")]) == []
    assert answer(reader) == ([1], "length")


def test_calls_after_the_close_are_harmless() -> None:
    doors, port = _core.port()
    port.ready(_core.Capabilities(10, 1, 10, []))
    reader = doors.submit([1], 1)
    port.wait()
    doors.close()
    assert port.wait() is None
    assert port.poll() is None
    assert port.push([(reader.id, [1], None)]) == [reader.id]
    with pytest.raises(RuntimeError, match="shutting down"):
        reader.read()


def test_a_port_closed_while_the_engine_loads_lets_it_end_in_peace() -> None:
    doors, port = _core.port()
    doors.close()
    port.ready(_core.Capabilities(10, 1, 10, []))
    assert port.wait() is None


def _instances() -> list[Any]:
    doors, port = _core.port()
    port.ready(_core.Capabilities(10, 1, 10, []))
    reader = doors.submit([1], 1)
    return [
        doors,
        port,
        reader,
        _core.Settings(),
        _core.Cancel(1),
        _core.Admit(1, [1], 1, None),
        _core.Sampling(1.0, 1.0, 0, 0),
        _core.Capabilities(10, 1, 10, []),
    ]


@pytest.mark.parametrize("instance", _instances(), ids=lambda each: type(each).__name__)
def test_nothing_that_crosses_can_be_changed(instance: Any) -> None:
    public = [name for name in dir(instance) if not name.startswith("_")]
    assert public
    for name in [*public, "added"]:
        with pytest.raises(AttributeError):
            setattr(instance, name, 1)


def test_a_prompt_is_a_new_list_each_time() -> None:
    admit = _core.Admit(1, [1, 2], 1, None)
    admit.prompt.append(3)
    assert admit.prompt == [1, 2]
