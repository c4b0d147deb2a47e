"""A step of the engine over MLX beside one of mlx-lm's own BatchGenerator: the same model, the same batch, in alternation.

Of a tiny model nearly all of a step is Python's: the hardest case for a loop. mlx-lm's generator is imported with a stand-in for transformers,
of which it uses the names of types alone.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "tests" / "engines"))

from cases import prompt
from emberd.batching import PREFILL_CHUNK
from emberd.mlx import MlxEngine
from emberd.mlx_model import Model
from emberd.schedule import Pace
from fakeport import Admit, Settings

BATCHES = (1, 4, 8)
PROMPT = 10
SPARE = 50
"""Steps that a generator could make after those that are timed."""


def generator() -> Any:
    """mlx-lm's class."""
    any_type: Any = type("AnyType", (), {"register": staticmethod(lambda *_, **__: None)})
    names = ("AutoTokenizer", "PreTrainedTokenizer", "PreTrainedTokenizerFast", "PreTrainedTokenizerBase")
    for module in ("transformers", "transformers.tokenization_utils_base"):
        sys.modules[module] = types.ModuleType(module)
        for name in names:
            setattr(sys.modules[module], name, any_type)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    from mlx_lm.generate import BatchGenerator

    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[0], resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
    return BatchGenerator


def timed(step: Callable[[], object], steps: int) -> dict[str, float]:
    """Milliseconds of a step: on the clock, and of processor time."""
    clock, processor = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    return {
        "ms": (time.perf_counter() - clock) / steps * 1e3,
        "cpu_ms": (time.process_time() - processor) / steps * 1e3,
    }


def ours(model: Model, batch: int, steps: int) -> dict[str, float]:
    """Steps of the engine once all answers run, none of which is guessed."""
    engine = MlxEngine(model, lambda id, text: None, cache_bytes=0, pace=Pace(PREFILL_CHUNK))
    for id in range(batch):
        engine.take(Admit(id, prompt(id, PROMPT), steps + SPARE, speculation=0))
    started: set[int] = set()
    while len(started) < batch:
        started |= {step[0] for step in engine.step()}
    engine.step()
    result = timed(engine.step, steps)
    engine.drop(range(batch))
    return result


def theirs(model: Model, batch: int, steps: int, made_by: Any) -> dict[str, float]:
    """Steps of mlx-lm's generator once all answers run."""
    made = made_by(model._network, max_tokens=steps + SPARE, completion_batch_size=batch, prefill_batch_size=batch)
    made.insert([prompt(id, PROMPT) for id in range(batch)], [steps + SPARE] * batch)
    while len(made.next()[1]) < batch:
        pass
    return timed(made.next, steps)


def main() -> None:
    """Prints, as JSON, the rounds of each batch: ours and theirs, who goes first changing from round to round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="an mlx-lm folder")
    parser.add_argument("--steps", type=int, default=60, help="steps that are timed in a round (default 60)")
    parser.add_argument("--rounds", type=int, default=15, help="(default 15)")
    options = parser.parse_args()
    made_by = generator()
    model = Model(options.folder, Settings())
    model.eos_ids = []  # an answer that ends would make the steps after it shorter
    rounds: dict[int, list[tuple[dict[str, float], dict[str, float]]]] = {batch: [] for batch in BATCHES}
    for batch, pairs in rounds.items():
        for turn in range(options.rounds):
            second = theirs(model, batch, options.steps, made_by) if turn % 2 else None
            first = ours(model, batch, options.steps)
            pairs.append((first, second or theirs(model, batch, options.steps, made_by)))
    print(json.dumps(rounds))


if __name__ == "__main__":
    main()
