"""The gaps between the tokens of running answers while long prompts arrive, in the ONNX engine alone: no doors, no text.

Answers run, and one prompt after the other comes, each some passes after the end of the last one; only gaps from the
first of them on count. Printed are the median and the 99th percentile, and how long the prompts took; then the same
with whole chunks between passes, as they are read where nobody waits.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "py"), str(ROOT / "tests" / "engines")]
import fakeport  # noqa: E402
from bare_onnx import prompt  # noqa: E402
from emberd import loop  # noqa: E402
from emberd.batching import PREFILL_CHUNK  # noqa: E402
from emberd.onnx import OnnxEngine  # noqa: E402
from emberd.schedule import BOUND, Pace  # noqa: E402
from emberd.session import Model  # noqa: E402

if TYPE_CHECKING:
    from emberd._core import Port, Settings
    from emberd.engine import Fail


class ArrivalPort:
    """Answers that run to their end, and prompts that come one by one meanwhile."""

    def __init__(self, options: argparse.Namespace, running: int) -> None:
        self._options = options
        self._orders = [fakeport.Admit(i, prompt(32, i), options.tokens) for i in range(running)]
        self._running, self._pause, self._next, self._sent = running, 20, running, 0.0
        self._last: dict[int, float] = {}
        self.gaps: list[float] = []
        self.firsts: list[float] = []

    def ready(self, capabilities: object) -> None:
        """Nothing to prepare."""

    def wait(self) -> list[fakeport.Admit] | None:
        return self.poll()

    def poll(self) -> list[fakeport.Admit] | None:
        if self._running == 0:
            return None
        orders, self._orders = self._orders, []
        if self._pause == 0:
            orders.append(fakeport.Admit(self._next, prompt(self._options.long, self._next), 1))
            self._next, self._sent, self._pause = self._next + 1, time.perf_counter(), -1
        return orders

    def push(self, steps: list[tuple[int, list[int], str | None]]) -> list[int]:
        now = time.perf_counter()
        if self._pause > 0 and len(steps) >= self._running:
            self._pause -= 1
        for id, _, finish, *_ in steps:
            if self._sent and id in self._last:
                self.gaps.append(now - self._last[id])
            self._last[id] = now
            if finish is not None and id < self._options.most:
                self._running -= 1
            elif finish is not None:
                self.firsts.append(now - self._sent)
                self._pause = self._options.pause
        return []

    def fail(self, id: int | None, message: str) -> None:
        raise RuntimeError(f"{id}: {message}")


def main() -> None:
    """Prints two lines for each number of running answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="a model folder with model.onnx")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each running answer")
    parser.add_argument("--long", type=int, default=512, help="tokens of each prompt that arrives")
    parser.add_argument("--pause", type=int, default=40, help="passes over the answers between two prompts")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    print(
        f"{'running':>7} {'bound':>6} {'median ms':>10} {'p99 ms':>7} {'ratio':>6} {'prompts':>8} {'first token s':>14}"
    )
    for running in options.running:
        options.most = running
        for bound in (BOUND, math.inf):
            port = ArrivalPort(options, running)
            model = Model(options.folder, cast("Settings", fakeport.Settings(threads=options.threads)))
            pace = Pace(PREFILL_CHUNK, bound)
            engine = OnnxEngine(model, cast("Fail", port.fail), PREFILL_CHUNK, cache_bytes=0, pace=pace)
            vars(engine)["_eos"] = frozenset()  # an answer that ends early would leave fewer gaps
            loop.serve(engine, cast("Port", port))
            engine.close()
            middle, worst = np.median(port.gaps), np.percentile(port.gaps, 99)
            first = np.median(port.firsts) if port.firsts else math.nan
            row = f"{running:>7} {bound:>6} {1e3 * middle:>10.1f} {1e3 * worst:>7.1f} {worst / middle:>6.2f}"
            print(f"{row} {len(port.firsts):>8} {first:>14.2f}", flush=True)


if __name__ == "__main__":
    main()
