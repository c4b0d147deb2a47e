"""A step of the engine over MLX beside one of mlx-lm's own BatchGenerator: the same model, the same batch, in alternation.

`python benches/mlx_loop.py [FOLDER]` prints the ratios at 1, 4 and 8 sequences. Without a folder the model is a tiny one, of which
nearly all of a step is Python's: the hardest case for a loop. mlx-lm's generator is imported with a stand-in for transformers,
of which it uses the names of types alone.
"""

from __future__ import annotations

import resource
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "tests" / "engines"))

import tiny_mlx
from cases import prompt
from emberd.mlx import MlxEngine
from emberd.mlx_model import Model
from fakeport import Admit, Settings

STEPS = 60
ROUNDS = 15
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


def timed(step: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of a step: on the clock, and of processor time."""
    clock, processor = time.perf_counter(), time.process_time()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - clock) / STEPS * 1e3, (time.process_time() - processor) / STEPS * 1e3


def ours(model: Model, batch: int) -> tuple[float, float]:
    """Steps of the engine once all answers run."""
    engine = MlxEngine(model, lambda id, text: None, cache_bytes=0)
    for id in range(batch):
        engine.take(Admit(id, prompt(id, PROMPT), STEPS + SPARE))
    while sum(step[0] in range(batch) for step in engine.step()) < batch or engine._prompts:
        pass
    result = timed(engine.step)
    engine.drop(range(batch))
    return result


def theirs(model: Model, batch: int, made_by: Any) -> tuple[float, float]:
    """Steps of mlx-lm's generator once all answers run."""
    made = made_by(model._network, max_tokens=STEPS + SPARE, completion_batch_size=batch, prefill_batch_size=batch)
    made.insert([prompt(id, PROMPT) for id in range(batch)], [STEPS + SPARE] * batch)
    while len(made.next()[1]) < batch:
        pass
    return timed(made.next)


def main() -> None:
    """Prints a line for each batch."""
    made_by = generator()
    with tempfile.TemporaryDirectory() as folder:
        path = sys.argv[1] if len(sys.argv) > 1 else str(tiny_mlx.build(Path(folder), eos=[]))
        model = Model(path, Settings())
        for batch in (1, 4, 8):
            rounds = [(ours(model, batch), theirs(model, batch, made_by)) for _ in range(ROUNDS)]
            clock = statistics.median(one[0] / other[0] for one, other in rounds)
            processor = statistics.median(one[1] / other[1] for one, other in rounds)
            own = statistics.median(one[0] for one, _ in rounds)
            print(
                f"batch {batch}: a step takes {own:.2f} ms, {clock:.3f} of BatchGenerator's; of processor time {processor:.3f}"
            )


if __name__ == "__main__":
    main()
