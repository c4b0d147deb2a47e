"""What loading the default model takes, in time and memory, and what an idle server costs: `python benches/memory.py`.

The peer is an `InferenceSession` that a process of its own creates, with the same threads, in turn with ours. With
`--write FILE` the table takes its place between `<!-- bench memory -->` and `<!-- end memory -->`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import streams
from engine_items import ours
from engine_peers import weights
from harness import ROOT, BenchError, find_emberd, machine, ready, run_json, serving
from items import Figures, Row, alternate, compare, find_folder, show
from run import cells, leave, rounds, table, write
from soak import resident
from streams import Json

IDLE = 5.0
"""Seconds over which an idle server's processor time is counted."""


def door(emberd: list[str], model: str, threads: int) -> Figures:
    """A server that loads the model with its first request: seconds for that, and its memory before and after."""
    serve = [*emberd, "serve", "--model", model, "--engine", "onnx", "--port", "0", "--lazy", "--threads", str(threads)]
    with serving(serve) as server:
        side = ours(ready(server), model)
        before = resident(server.pid)
        first = streams.run(partial(side.ask, question("Say hello.")))
        after = resident(server.pid)
        # The same again takes as long, but for the load. Another word, so that nothing of it is cached.
        second = streams.run(partial(side.ask, question("Say hallo.")))
        used = processor(server.pid)
        time.sleep(IDLE)
        idle = processor(server.pid) - used
    load = (first.done - first.sent) - (second.done - second.sent)
    return {"load": 1e3 * load, "before": before, "after": after, "idle": idle}


def question(text: str) -> Json:
    """A request for one token. The text stands first in its prompt, too."""
    turns = [{"role": role, "content": text} for role in ("system", "user")]
    return {"turns": turns, "tokens": 1}


def processor(pid: int) -> float:
    """Seconds of processor time that a process has used (Linux)."""
    numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


def token_bytes(folder: Path) -> int:
    """Bytes of keys and values for one token, in floats of 32 bits."""
    config = json.loads((folder / "config.json").read_bytes())
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * 4 * int(config["num_hidden_layers"] * config["num_key_value_heads"] * width)


def against_bare(options: argparse.Namespace, folder: Path, turns: int) -> Iterator[Row]:
    """Load and memory against a bare session."""
    python = [sys.executable, str(ROOT / "benches/engine_memory.py")]
    more = ["--folder", str(folder), "--threads", str(options.threads)]
    ours_ = partial(door, options.emberd, options.model, options.threads)
    pairs = alternate(turns, ours_, partial(run_json, [*python, "bare", *more]))
    whole: list[tuple[Figures, Figures]] = [
        ({"ms": mine["load"]}, {"ms": 1e3 * (bare["import_s"] + bare["create_s"])}) for mine, bare in pairs
    ]
    what = "load through the door; importing onnxruntime and creating a session"
    yield compare(what, whole, lambda each: each["ms"], "ms", most=1.2)
    inside = [run_json([*python, "engine", *more]) for _ in range(turns)]
    alone: list[tuple[Figures, Figures]] = [
        ({"ms": 1e3 * own["load_s"]}, {"ms": 1e3 * bare["create_s"]})
        for own, (_, bare) in zip(inside, pairs, strict=True)
    ]
    what = "the engine's load with all imported; creating a session"
    yield compare(what, alone, lambda each: each["ms"], "ms", most=1.2)
    size = weights(folder)
    yield Row("weights on disk", show(size / 1e6, "MB"), "")

    def against(what: str, own: float, kv: float, bare: float | None = None, most: float | None = None) -> Row:
        ratio = own / (size + kv)
        target, good = (f"≤ {most:g}", ratio <= most) if most is not None else ("", None)
        return Row(
            what, show(own / 1e6, "MB"), "" if bare is None else show(bare / 1e6, "MB"), f"{ratio:.3g}", target, good
        )

    loaded = median(own["loaded"] - own["imported"] for own in inside)
    bare_loaded = median(bare["loaded"] - bare["imported"] for _, bare in pairs)
    yield against("memory that loading adds to the libraries, of the weights", loaded, 0, bare_loaded, 1.3)
    kv = inside[0]["running"] * token_bytes(folder)
    used = median(own["used"] - own["imported"] for own in inside)
    what = f"while 16 run, of the weights and {kv / 1e6:.0f} MB of keys and values"
    yield against(what, used, kv, None, 1.3)
    closed = median(own["closed"] - own["imported"] for own in inside)
    yield against("what the libraries keep after the close, of the weights", closed, 0)
    before, after = (2**20 * median(mine[key] for mine, _ in pairs) for key in ("before", "after"))
    yield against("the whole server, no model loaded", before, 0)
    yield against("the whole server, after its first answer", after, 0)
    idle = max(mine["idle"] for mine, _ in pairs) / IDLE
    yield Row(f"processor time of an idle server over {IDLE:g} s", f"{idle:.1%}", "", "", "≤ 1%", idle <= 0.01)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=rounds, default=5, help="turns of ours and the peer, at least 3 (default 5)")
    parser.add_argument("--quick", action="store_true", help="one turn, to see that all works: no figures")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="compute threads (default: the cores)")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--folder", type=Path, help="that model's folder; found when not given")
    parser.add_argument("--emberd", type=shlex.split, default=list(find_emberd()), help="the command to measure")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into this page")
    return parser.parse_args()


def main() -> int:
    """0: measured."""
    options = parse()
    signal.signal(signal.SIGTERM, leave)
    turns = 1 if options.quick else options.rounds
    rows = []
    for row in against_bare(options, options.folder or find_folder(options.model), turns):
        rows.append(row)
        print(" ·", " | ".join(filter(None, cells(row))), file=sys.stderr, flush=True)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    command = shlex.join(["python", "benches/memory.py", *sys.argv[1:]])
    block = f"{today}, {machine()}; `{command}`, medians of {turns} rounds\n\n{table(rows)}"
    print(block)
    if options.write:
        write(options.write, {"memory": block})
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as failure:
        sys.exit(f"error: {failure}")
