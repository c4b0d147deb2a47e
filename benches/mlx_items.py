"""The benchmarks of the engine over MLX, (m): against mlx-lm's own loop, server and command, on the same models.

On the CPU build of MLX they say what ours adds to a pass, and nothing of Apple silicon. What is measured against is made ready
in `mlx_peers`; a step of either loop is timed in `mlx_loop`.
"""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import engine_items
import mlx_peers
import streams
from engine_items import Plan, Side, both
from harness import ROOT, BenchError, Tools, http_server, run_json
from items import Figures, Options, Row, alternate, compare
from worker_items import connected

CLIENTS = (1, 4, 8)
TOKENS = 64
"""The longest answer of a client."""

IMPORT = """
import json, time
from pathlib import Path
import numpy, mlx.core, mlx.nn

def resident():
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * 4096 if statm.exists() else 0

memory, start = resident(), time.perf_counter()
{what}
print(json.dumps({{"ms": (time.perf_counter() - start) * 1e3, "mb": (resident() - memory) / 1e6}}))
"""
"""Of a program that has MLX and numpy: what more it costs to have a llama's class."""

OURS = 'import emberd.mlx; emberd.mlx_model.classes({"model_type": "llama"})'
THEIRS = "import mlx_lm, mlx_lm.models.llama"


def mlx(tools: Tools, options: Options) -> Iterator[Row]:
    """(m) MLX: a step against mlx-lm's BatchGenerator, our server against mlx_lm.server, a start against mlx_lm.generate."""
    python, tiny, small = mlx_peers.mlx_lm(), mlx_peers.model("tiny"), mlx_peers.model("small")
    yield from imports(tools, options, python)
    yield from starts(tools, options, python, tiny)
    yield from steps(tools, "tiny model", tiny, ["--steps", "60", "--rounds", str(max(options.rounds, 15))])
    yield from steps(tools, "small model", small, ["--steps", "20", "--rounds", str(options.rounds)])
    yield from servers(tools, options, python, small)


def imports(tools: Tools, options: Options, python: str) -> Iterator[Row]:
    """What the engine imports beside MLX and numpy, and what mlx-lm does."""
    run = partial(run_json, [tools.python, "-c", IMPORT.format(what=OURS)])
    pairs = alternate(options.rounds, run, partial(run_json, [python, "-c", IMPORT.format(what=THEIRS)]))
    for what, key, unit, most in (("time", "ms", "ms", 300), ("memory", "mb", "MB", 60)):

        def figure(each: Figures, key: str = key) -> float:
            return max(float(each[key]), 0.01)

        row = compare(f"import, beside MLX and numpy: {what}", pairs, figure, unit)
        middle = median(figure(pair[0]) for pair in pairs)
        yield Row(row.what, row.ours, row.peer, row.ratio, f"≤ {most} {unit}", middle <= most)


def starts(tools: Tools, options: Options, python: str, tiny: Path) -> Iterator[Row]:
    """From the start of a process to the first token of a tiny model that is on the disk."""
    with tempfile.TemporaryDirectory() as place:
        path = f"{place}/s"
        command = [*tools.emberd, "worker", "--socket", path, "--model-key", "bench", "--tag", "bench"]
        command += ["--model", str(tiny), "--engine", "mlx"]

        def ours() -> Figures:
            start = time.perf_counter()
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            try:
                connection = connected(process, path)
                message = {"role": "user", "content": "w40 w41 w42"}
                connection.send({"type": "chat", "id": "1", "messages": [message], "maxNewTokens": 1})
                answer = connection.answer()
                took = (time.perf_counter() - start) * 1e3
                connection.close()
            finally:
                process.kill()
                process.wait()
                Path(path).unlink(missing_ok=True)
            if not answer["text"]:
                raise BenchError(f"a worker answered {answer}")
            return {"ms": took}

        def theirs() -> Figures:
            return {"ms": mlx_peers.first_text(python, tiny)}

        pairs = alternate(options.rounds, ours, theirs)
    what = "start to first token, tiny model, against mlx_lm.generate"
    yield compare(what, pairs, lambda each: each["ms"], "ms", most=1 / 3)


def steps(tools: Tools, name: str, folder: Path, more: list[str]) -> Iterator[Row]:
    """A step over so many sequences, against mlx-lm's BatchGenerator."""
    told = run_json([tools.python, str(ROOT / "benches/mlx_loop.py"), "--folder", str(folder), *more])
    for batch in CLIENTS:
        pairs = [(ours, theirs) for ours, theirs in told[str(batch)]]
        what = f"{name}, {batch} sequence{'s' if batch > 1 else ''}: a step"
        yield compare(what, pairs, lambda each: each["ms"], "ms", most=1.03)
        yield compare(f"{what}, processor time", pairs, lambda each: each["cpu_ms"], "ms")


def servers(tools: Tools, options: Options, python: str, folder: Path) -> Iterator[Row]:
    """Our server against mlx_lm.server, with what each of them does by default."""
    plan = Plan(options.rounds, TOKENS, 1, CLIENTS, options.threads, quick=False)
    serve = [*tools.emberd, "serve", "--model", str(folder), "--engine", "mlx", "--port", "0"]
    with http_server(serve) as address, mlx_peers.server(python, folder) as peer:
        sides: tuple[Side, Side] = (engine_items.ours(address, model_of(address)), engine_items.peers(peer))
        for side in sides:  # a server may load its model when it is asked first
            streams.run(partial(side.ask, engine_items.story(random.Random(0), 2)))
        for clients in CLIENTS:
            pairs = both(plan, engine_items.load, sides, clients, plan)
            name = f"{clients} client{'s' if clients > 1 else ''}"
            if clients == 1:
                name = f"small model, {name}, {pairs[0][0]['prompt']} + {pairs[0][0]['tokens']:g} tokens"
            yield compare(f"{name}: throughput, against mlx_lm.server", pairs, lambda each: each["rate"], "tok/s")
            yield compare(f"{name}: gap between texts, median", pairs, lambda each: each["gap"], "ms")
            yield compare(f"{name}: gap between texts, p99", pairs, lambda each: each["worst"], "ms")


def model_of(address: str) -> str:
    """The name of the only model of a server."""
    with urllib.request.urlopen(f"http://{address}/v1/models", timeout=60) as answer:
        [model] = json.load(answer)["data"]
    return str(model["id"])
