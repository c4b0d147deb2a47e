"""The port as Python meets it: the echo engine in the real loop, on real ports of the extension module."""

from __future__ import annotations

import gc
import subprocess
import sys
import sysconfig
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from emberd import _core, echo, loop
from support.process import DEADLINE, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

if not hasattr(_core, "port"):
    pytest.skip("the extension module is not built", allow_module_level=True)

CHUNK = echo.PREFILL_CHUNK


@dataclass(frozen=True)
class Launch:
    """What the process would hand to the loop."""

    engine: str
    folder: str
    settings: Any
    port: Any


class Loop:
    """The echo engine's loop on a thread of its own, started and ended as the command does it."""

    def __init__(self, folder: Path, queue: int = 256, **settings: int) -> None:
        self.doors, self.port = _core.port(queue)
        self.launch = Launch("echo", str(folder), _core.Settings(**settings), self.port)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            loop.run(self.launch)
        finally:
            self.port.close()

    def submit(self, prompt: list[int], max_tokens: int, sampling: Any = None) -> Any:
        """A request, as soon as the engine is ready."""

        def submitted() -> Any:
            try:
                return self.doors.submit(prompt, max_tokens, sampling)
            except RuntimeError as error:
                if "still loading" in str(error):
                    return None
                raise

        return eventually(submitted, "the engine is ready")

    def end(self) -> None:
        self.doors.close()
        self.thread.join(DEADLINE)
        assert not self.thread.is_alive(), "the loop goes on after its port was closed"


@contextmanager
def running(folder: Path, queue: int = 256, **settings: int) -> Iterator[Loop]:
    one = Loop(folder, queue, **settings)
    try:
        yield one
    finally:
        one.end()


def answer(reader: Any) -> tuple[list[int], str]:
    """The whole answer and how it ended."""
    ids: list[int] = []
    while (chunk := reader.read()) is not None:
        ids += chunk[0]
        if chunk[1] is not None:
            assert reader.read() is None
            return ids, chunk[1]
    raise AssertionError("the answer ended without a finish")


class Steps:
    """Lets the echo engine step only when told, and keeps what it heard."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.admitted: list[int] = []
        self.cancelled: list[int] = []
        self.dropped: list[int] = []
        self.engines: list[echo.EchoEngine] = []
        self._go = threading.Semaphore(0)
        self._made = threading.Semaphore(0)
        take, step, drop = echo.EchoEngine.take, echo.EchoEngine.step, echo.EchoEngine.drop

        def taking(engine: Any, order: Any) -> None:
            if hasattr(order, "prompt"):
                self.admitted.append(order.id)
                take(engine, order)
            else:
                self.cancelled.append(order.id)
                engine._requests.pop(order.id, None)

        def stepping(engine: Any) -> Any:
            assert self._go.acquire(timeout=DEADLINE), "the test let the engine wait"
            self._made.release()
            return step(engine)

        def dropping(engine: Any, gone: Any) -> None:
            gone = list(gone)
            self.dropped += gone
            drop(engine, gone)

        monkeypatch.setattr(echo.EchoEngine, "take", taking)
        monkeypatch.setattr(echo.EchoEngine, "step", stepping)
        monkeypatch.setattr(echo.EchoEngine, "drop", dropping)

    def go(self, steps: int = 1) -> None:
        """Lets it make this many steps, and waits until it has begun the last."""
        for _ in range(steps):
            self._go.release()
            assert self._made.acquire(timeout=DEADLINE)

    def free(self) -> None:
        """Lets it go on by itself."""
        self._go.release(100_000)

    def heard(self) -> list[int]:
        """Ids that the engine was told to forget, by whichever way."""
        return self.cancelled + self.dropped


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    scripted = Steps(monkeypatch)
    yield scripted
    scripted.free()


# Answers.


def test_an_answer_crosses_the_boundary_and_back(tmp_path: Path) -> None:
    with running(tmp_path) as one:
        assert answer(one.submit([5, 6, 7], 5)) == ([5, 6, 7, 5, 6], "length")


def test_an_eos_id_ends_an_answer_and_is_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 9, "vocab_size": 100}')
    with running(tmp_path) as one:
        assert answer(one.submit([5, 9, 7], 50)) == ([5, 9], "stop")


def test_more_requests_than_places_all_get_their_own_answers(tmp_path: Path) -> None:
    with running(tmp_path, max_batch=4) as one:
        readers = [one.submit([at, at + 1], at % 7 + 1) for at in range(1, 60)]
        for at, reader in enumerate(readers, 1):
            ids, finish = answer(reader)
            assert ids == ([at, at + 1] * 4)[: at % 7 + 1]
            assert finish == "length"
        assert one.doors.load() == (0, 0)


def test_no_more_than_max_batch_are_in_the_engine(tmp_path: Path, steps: Steps) -> None:
    with running(tmp_path, max_batch=2) as one:
        readers = [one.submit([1, 2, 3], 4) for _ in range(5)]
        steps.go(2)
        assert one.doors.load() == (3, 2)
        steps.free()
        assert [answer(reader)[0] for reader in readers] == [[1, 2, 3, 1]] * 5


def test_sampling_arrives_as_it_was_sent() -> None:
    doors, port = _core.port()
    port.ready(_core.Capabilities(100, 1, 100, []))
    sampling = _core.Sampling(
        0.5,
        0.25,
        40,
        2**64 - 1,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=0.75,
        logit_bias={7: -100.0, 3: 0.5},
        top_logprobs=4,
    )
    reader = doors.submit([1], 1, sampling)
    [order] = port.wait()
    assert order.sampling == sampling
    assert (order.sampling.min_p, order.sampling.repetition_penalty) == (0.125, 1.5)
    assert (order.sampling.presence_penalty, order.sampling.frequency_penalty) == (-1.0, 0.75)
    assert (order.sampling.logit_bias, order.sampling.top_logprobs) == ({3: 0.5, 7: -100.0}, 4)
    assert (order.sampling.temperature, order.sampling.top_p) == (0.5, 0.25)
    assert (order.sampling.top_k, order.sampling.seed) == (40, 2**64 - 1)
    assert (order.id, order.prompt, order.max_tokens) == (reader.id, [1], 1)


def test_a_sampling_is_neutral_where_it_says_nothing() -> None:
    sampling = _core.Sampling(0.5, 0.25, 40, 1)
    assert (sampling.min_p, sampling.logit_bias, sampling.top_logprobs) == (0.0, {}, None)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.0, 0.0)
    sampling.logit_bias[1] = 5.0
    assert sampling.logit_bias == {}
    assert sampling != _core.Sampling(0.5, 0.25, 40, 1, min_p=0.5)
    assert sampling == _core.Sampling(0.5, 0.25, 40, 1, logit_bias={})


def test_sampling_that_cannot_be_is_refused() -> None:
    doors, port = _core.port()
    port.ready(_core.Capabilities(100, 1, 100, []))
    for sampling, why in (
        (_core.Sampling(-1.0, 1.0, 0, 0), "`temperature` must be at least 0"),
        (_core.Sampling(1.0, 1.0, 0, 0, repetition_penalty=0.0), "`repetition_penalty` must be above 0"),
        (_core.Sampling(0.0, 1.0, 0, 0, logit_bias={100: 1.0}), "token id 100, outside the vocabulary of 100"),
    ):
        with pytest.raises(RuntimeError, match=why):
            doors.submit([1], 1, sampling)
    assert port.poll() == []


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "why"),
    [
        ([], 1, "the prompt is empty"),
        ([1], 0, "no tokens were asked for"),
        ([1] * 60, 41, "the window is 100"),
        ([100], 1, "outside the vocabulary"),
    ],
)
def test_a_request_that_the_engine_must_not_see_is_refused(prompt: list[int], max_tokens: int, why: str) -> None:
    doors, port = _core.port()
    port.ready(_core.Capabilities(100, 1, 100, []))
    with pytest.raises(RuntimeError, match=why):
        doors.submit(prompt, max_tokens)
    assert port.poll() == []


def test_a_full_queue_refuses_the_next(tmp_path: Path, steps: Steps) -> None:
    with running(tmp_path, queue=2, max_batch=1) as one:
        first = one.submit([1], 2)
        eventually(lambda: one.doors.load() == (0, 1), "the first is in the engine")
        waiting = [one.submit([1], 2), one.submit([1], 2)]
        with pytest.raises(RuntimeError, match="2 requests are waiting already"):
            one.doors.submit([1], 2)
        steps.free()
        assert [answer(each)[0] for each in [first, *waiting]] == [[1, 1]] * 3


# Faults.


def test_an_exception_in_step_ends_every_request_with_its_reason(
    tmp_path: Path, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, max_batch=1) as one:
        inside, queued = one.submit([1, 2], 9), one.submit([3], 9)
        eventually(lambda: one.doors.load() == (1, 1), "one in the engine, one in the queue")

        def broken(self: Any) -> None:
            raise ValueError("the weights are\nsoft")

        monkeypatch.setattr(echo.EchoEngine, "step", broken)
        steps.free()
        reason = "^the echo engine failed: ValueError: the weights are soft$"
        for reader in (inside, queued):
            with pytest.raises(RuntimeError, match=reason):
                answer(reader)
            assert reader.read() is None
        with pytest.raises(RuntimeError, match=reason):
            one.doors.submit([1], 1)
        one.thread.join(DEADLINE)
        assert not one.thread.is_alive()


def test_a_load_that_fails_says_why_and_what_to_do(tmp_path: Path) -> None:
    with running(tmp_path / "nowhere") as one:
        with pytest.raises(RuntimeError, match=r"^there is no folder .*nowhere\nhint: give the path") as raised:
            one.submit([1], 1)
        assert "Traceback" not in str(raised.value)


# Readers that leave.


def test_a_reader_that_leaves_the_queue_is_never_heard_of(tmp_path: Path, steps: Steps) -> None:
    with running(tmp_path, max_batch=1) as one:
        first, second, third = (one.submit([at], 3) for at in (1, 2, 3))
        eventually(lambda: one.doors.load() == (2, 1), "one in the engine, two in the queue")
        second.leave()
        assert one.doors.load() == (1, 1)
        steps.free()
        assert answer(first) == ([1, 1, 1], "length")
        assert answer(third) == ([3, 3, 3], "length")
        assert second.read() is None
    assert steps.admitted == [first.id, third.id]
    assert steps.heard() == []


@pytest.mark.parametrize("made", [0, 2], ids=["in prefill", "in decode"])
def test_a_reader_that_leaves_the_engine_is_heard_of_once_and_frees_its_place(
    made: int, tmp_path: Path, steps: Steps
) -> None:
    with running(tmp_path, max_batch=1) as one:
        reader = one.submit([1] * (3 * CHUNK), 1000)
        after = one.submit([2], 2)
        # Three steps of prefill, the last of which makes the first id; the engine waits at the gate of the next.
        steps.go(1 if made == 0 else 2 + made)
        if made:
            ids: list[int] = []
            while len(ids) < made - 1:
                ids += reader.read()[0]
            assert set(ids) == {1}
        reader.leave()
        steps.go(1)
        eventually(lambda: steps.heard() == [reader.id], "the engine hears of it within a step")
        steps.free()
        assert answer(after) == ([2, 2], "length")
        eventually(lambda: one.doors.load() == (0, 0), "nothing is left")
    assert steps.heard() == [reader.id]


def test_a_reader_that_is_forgotten_has_left(tmp_path: Path, steps: Steps) -> None:
    with running(tmp_path) as one:
        reader = one.submit([1], 1000)
        steps.go(2)
        left = reader.id
        del reader
        gc.collect()
        steps.go(1)
        eventually(lambda: steps.heard() == [left], "the engine hears of it within a step")
        eventually(lambda: one.doors.load() == (0, 0), "nothing is left")


def test_a_reader_that_leaves_after_the_end_is_no_cancellation(tmp_path: Path, steps: Steps) -> None:
    with running(tmp_path) as one:
        steps.free()
        reader = one.submit([1], 3)
        assert answer(reader) == ([1, 1, 1], "length")
        reader.leave()
        assert answer(one.submit([2], 1)) == ([2], "length")
    assert steps.heard() == []


# Threads and processes.


def test_a_shutdown_ends_what_is_in_flight_and_the_loop(tmp_path: Path, steps: Steps) -> None:
    with running(tmp_path, max_batch=1) as one:
        inside, queued = one.submit([1], 1000), one.submit([2], 1000)
        steps.go(2)
        one.doors.close()
        for reader in (inside, queued):
            with pytest.raises(RuntimeError, match="shutting down"):
                answer(reader)
        with pytest.raises(RuntimeError, match="shutting down"):
            one.doors.submit([1], 1)
        steps.free()
        one.thread.join(DEADLINE)
        assert not one.thread.is_alive()


def test_two_loops_run_at_once_on_two_ports_and_one_outlives_the_other(tmp_path: Path) -> None:
    with running(tmp_path) as one:
        with running(tmp_path) as two:
            readers = [(at, (one, two)[at % 2].submit([at], 50)) for at in range(1, 41)]
            assert [answer(reader) for _, reader in readers] == [([at] * 50, "length") for at, _ in readers]
        assert not two.thread.is_alive()
        assert answer(one.submit([7], 2)) == ([7, 7], "length")


def test_a_failure_stays_on_its_own_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = echo.EchoEngine.step

    def picky(engine: Any) -> Any:
        if any(request.prompt == [13] for request in engine._requests.values()):
            raise RuntimeError("no thirteens")
        return step(engine)

    monkeypatch.setattr(echo.EchoEngine, "step", picky)
    with running(tmp_path) as one, running(tmp_path) as two:
        with pytest.raises(RuntimeError, match="no thirteens"):
            answer(one.submit([13], 1))
        assert answer(two.submit([7], 2)) == ([7, 7], "length")


WAITING = """
import sys, threading
from emberd import _core
# A thread keeps the interpreter until it lets go of it by itself: what main does below, it does while `wait` sleeps.
sys.setswitchinterval(1000)
doors, port = _core.port()
port.ready(_core.Capabilities(10, 1, 10, []))
begun, orders = threading.Event(), []
def engine():
    begun.set()
    orders.extend(port.wait())
thread = threading.Thread(target=engine)
thread.start()
begun.wait()
total = sum(range(100_000))
assert orders == []
reader = doors.submit([5], 1)
thread.join()
assert [order.prompt for order in orders] == [[5]]
print("both went on", total)
"""

READING = """
import sys, threading
from emberd import _core
sys.setswitchinterval(1000)
doors, port = _core.port()
port.ready(_core.Capabilities(10, 1, 10, []))
reader = doors.submit([5], 1)
[order] = port.wait()
begun, read = threading.Event(), []
def client():
    begun.set()
    read.append(reader.read())
thread = threading.Thread(target=client)
thread.start()
begun.wait()
total = sum(range(100_000))
assert read == []
port.push([(order.id, [7], "length")])
thread.join()
assert read == [([7], "length")]
print("both went on", total)
"""


@pytest.mark.parametrize("script", [WAITING, READING], ids=["wait", "read"])
def test_whoever_sleeps_lets_go_of_the_interpreter(script: str) -> None:
    # In a process of its own: one that kept the interpreter would stop this one, and its timers, as well.
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert (done.returncode, done.stdout) == (0, "both went on 4999950000\n"), done.stderr


def test_importing_the_extension_warns_of_nothing_and_keeps_the_interpreter_as_it_was() -> None:
    code = "import sys; import emberd._core; print(getattr(sys, '_is_gil_enabled', lambda: True)())"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(not free_threaded), "")
