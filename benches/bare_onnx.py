"""The ONNX engine against a bare onnxruntime loop over the same folder: what the engine adds to the runs themselves.

The bare loop binds everything once, feeds each argmax back and does nothing else: no port, no requests, no ends, no
sampling. The two take single steps in turn, with the same rows and the same context, so that a machine whose speed
drifts slows both alike. The bare loop's rows differ by one token each, like rows that joined in turn: with rows of one length
GroupQueryAttention of onnxruntime 1.32 is faster (55 against 63 ms a step at 16 rows), with one that differs it is not. Rates are by the clock, from the 20th percentile of the steps, since what other processes take
only adds; the last column compares medians of processor time, which hold on a busy machine too. Then come the time to
the first token of a long prompt, which includes the pushes between its chunks, and the resident memory.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import onnxruntime as ort

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "py"), str(ROOT / "tests" / "engines")]
import fakeport  # noqa: E402

if importlib.util.find_spec("emberd._core") is None:
    sys.modules["emberd._core"] = fakeport

from emberd import _core, imported, loop  # noqa: E402
from emberd.session import SPIN_BACKOFF, SPIN_US  # noqa: E402

if TYPE_CHECKING:
    from emberd._core import Port

VOCAB = 320
"""Prompts use ids below this, so that they suit every model, the tests' own too."""

Cost = tuple[float, float]
"""Seconds by the clock, and seconds of processor time in all threads."""


def clocks() -> Cost:
    """Now, on both clocks."""
    return time.perf_counter(), time.process_time()


def since(before: Cost) -> Cost:
    """What has passed on both clocks."""
    return time.perf_counter() - before[0], time.process_time() - before[1]


class TimingPort:
    """A port that measures the engine's steps and runs one of the bare loop's between any two of them."""

    def __init__(self, orders: list[fakeport.Admit], bare: Iterator[Cost] | None = None) -> None:
        self._orders, self._bare = orders, bare
        self._rows = self._open = len(orders)
        self._asked = (0.0, 0.0)
        self._decoding = False
        self.steps: list[Cost] = []
        self.bare_steps: list[Cost] = []
        self.started = self.first = 0.0
        self.memory = 0

    def ready(self, capabilities: object) -> None:
        self.started = time.perf_counter()

    def wait(self) -> list[fakeport.Admit] | None:
        return self.poll()

    def poll(self) -> list[fakeport.Admit] | None:
        if self._open == 0:
            self.memory = resident()
            return None
        if self._decoding and self._bare is not None:
            self.bare_steps.append(next(self._bare))
        orders, self._orders = self._orders, []
        self._asked = clocks()
        return orders

    def push(self, steps: list[tuple[int, list[int], str | None]]) -> list[int]:
        if self._decoding and len(steps) == self._rows:
            self.steps.append(since(self._asked))
        if steps and not self.first:
            self.first = time.perf_counter()
        self._decoding = len(steps) == self._rows
        self._open -= sum(1 for step in steps if step[2] is not None)
        return []

    def fail(self, id: int | None, message: str) -> None:
        raise RuntimeError(f"{id}: {message}")


def resident() -> int:
    """MiB of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4 // 1024


def prompt(length: int, row: int) -> list[int]:
    """Ordinary token ids, different for each row."""
    return [100 + (i * i * 31 + i * 17 + row * 977) % (VOCAB - 100) for i in range(length)]


def drive(options: argparse.Namespace, port: TimingPort, batch: int) -> TimingPort:
    """Runs the engine's own loop on a port, until all answers have ended."""
    settings = fakeport.Settings(threads=options.threads, spin=options.spin, max_batch=batch)
    engine = loop.load(fakeport.Launch("onnx", options.folder, settings, port))
    vars(engine)["_eos"] = frozenset()  # an answer that ends early would leave fewer steps to compare
    loop.serve(engine, cast("Port", port))
    engine.close()
    return port


def bare(options: argparse.Namespace, batch: int) -> Iterator[Cost]:
    """Reads `batch` prompts and decodes; yields the cost of each step."""
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = options.threads
    settings.inter_op_num_threads = 1
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0" if options.spin is False else "1")
    if options.spin is None:  # as the engine does it
        settings.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
        settings.add_session_config_entry("session.intra_op.spin_backoff_max", str(SPIN_BACKOFF))
    path = Path(options.folder)
    # Activations in bytes are the fastest that the runtime's own products do; the engine's have 15 bits.
    plain = (path / "model.onnx").read_bytes()
    if options.own:
        settings.register_custom_ops_library(_core.__file__)
        graph = _core.rewritten(plain, own=True, activations="int16") or plain
    else:
        graph = _core.rewritten(plain, own=False, activations="int8") or plain
    settings.add_session_config_entry(imported.EXTERNAL, str(path.resolve()))
    session = ort.InferenceSession(graph, settings, providers=["CPUExecutionProvider"])
    context = json.loads((path / "config.json").read_text())["max_position_embeddings"]
    caches = [each for each in session.get_inputs() if each.name.startswith("past_key_values.")]
    lengths = options.context + np.arange(batch)[::-1] * (1 if options.ragged else 0)
    capacity = -(-(int(lengths.max()) + options.tokens) // 64) * 64
    width = min(context, capacity)
    arrays = [np.zeros((batch, each.shape[1], capacity, each.shape[3]), np.float32) for each in caches]
    mask, argmax = np.zeros((batch, width), np.int64), np.zeros(batch, np.int64)
    ids = np.zeros((batch, 1), np.int64)
    kept = []

    def bind(first: int, end: int, tokens: np.ndarray) -> ort.IOBinding:
        binding = session.io_binding()

        def value(array: np.ndarray) -> ort.OrtValue:
            kept.append(ort.OrtValue.ortvalue_from_numpy(array))
            return kept[-1]

        binding.bind_ortvalue_input("input_ids", value(tokens))
        binding.bind_ortvalue_input("attention_mask", value(mask[first:end]))
        for each, array in zip(caches, arrays, strict=True):
            shared = value(array[first:end])
            binding.bind_ortvalue_input(each.name, shared)
            binding.bind_ortvalue_output(each.name.replace("past_key_values.", "present."), shared)
        binding.bind_ortvalue_output("argmax", value(argmax[first:end]))
        return binding

    for row, length in enumerate(lengths):
        mask[row, :length] = 1
        session.run_with_iobinding(bind(row, row + 1, np.array([prompt(int(length), row)], np.int64)))
    binding = bind(0, batch, ids)
    rows = np.arange(batch)
    for step in range(options.tokens - 1):
        before = clocks()
        ids[:, 0] = argmax
        mask[rows, lengths + step] = 1
        session.run_with_iobinding(binding)
        yield since(before)


def main() -> None:
    """Prints one line a batch size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="a model folder with model.onnx")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--context", type=int, default=128, help="prompt tokens of each row")
    parser.add_argument("--tokens", type=int, default=65, help="tokens of each answer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--long", type=int, default=512, help="prompt tokens of the first-token measurement")
    parser.add_argument("--spin", action=argparse.BooleanOptionalAction, help="for ever or never, not for a moment")
    parser.add_argument("--own", action="store_true", help="give the bare loop emberd's operators")
    parser.add_argument("--equal", dest="ragged", action="store_false", help="give the bare loop rows of one length")
    options = parser.parse_args()
    ways = {"greedy": None, "sampled": fakeport.Sampling(temperature=0.8, top_p=0.95, seed=1)}
    print(f"{'batch':>5} {'way':>8} {'bare tok/s':>11} {'engine tok/s':>13} {'ratio':>6} {'cpu ratio':>10}")
    for batch in options.batch:
        for way, sampling in ways.items():
            orders = [fakeport.Admit(i, prompt(options.context, i), options.tokens, sampling) for i in range(batch)]
            port = drive(options, TimingPort(orders, bare(options, batch)), batch)
            bare_steps, steps = np.array(port.bare_steps[2:]), np.array(port.steps[2:])
            loose, engine = (batch / np.percentile(each[:, 0], 20) for each in (bare_steps, steps))
            work = np.median(bare_steps[:, 1]) / np.median(steps[:, 1])
            row = f"{batch:>5} {way:>8} {loose:>11.1f} {engine:>13.1f} {engine / loose:>6.3f} {work:>10.3f}"
            print(row, flush=True)
            gc.collect()
    firsts = []
    for _ in range(3):
        port = drive(options, TimingPort([fakeport.Admit(1, prompt(options.long, 1), 1, None)]), 1)
        firsts.append(port.first - port.started)
        gc.collect()
    first = statistics.median(firsts)
    print(f"first token of a {options.long}-token prompt: {first * 1e3:.0f} ms, {options.long / first:.0f} tok/s")
    print(f"resident memory at its end: {port.memory} MiB")


if __name__ == "__main__":
    main()
