"""Threads and spinning through the real server under load: `python benches/threads.py`.

Every setting of `--spin` with every number of threads, each with the cores to itself and beside one process that
computes for ever, for one client and for eight. The settings take turns, round by round. With `--write FILE` the table
takes its place between `<!-- bench threads -->` and `<!-- end threads -->`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from engine_items import Plan, Side, load, ours
from harness import BenchError, find_emberd, http_server, machine
from run import leave, rounds, write

SPINS = {"never": ["--spin", "false"], "a moment": [], "for ever": ["--spin", "true"]}
CLIENTS = (1, 8)
HEAD = ("threads", "spin", "1 client", "8 clients", "1 client, a core taken", "8 clients, a core taken")

Setting = tuple[int, str]
Figures = dict[tuple[Setting, bool, int], list[float]]


@contextlib.contextmanager
def busy(wanted: bool) -> Iterator[None]:
    """A process that takes a core, for the length of a block."""
    if not wanted:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(side: Side, setting: Setting, plan: Plan, turn: int, figures: Figures) -> None:
    """Tokens a second of one server."""
    load(side, 1, Plan(1, 4, 1, (1,), plan.threads, plan.quick), iter([0]))
    for taken in (False, True):
        with busy(taken):
            for clients in CLIENTS:
                found = load(side, clients, plan, iter([turn]))
                rate = found["decode"] if clients == 1 else found["rate"]
                figures.setdefault((setting, taken, clients), []).append(rate)


def table(figures: Figures, settings: list[Setting]) -> str:
    """Medians as a Markdown table."""
    lines: list[tuple[str, ...]] = [HEAD]
    for setting in settings:
        cells = (median(figures[setting, taken, clients]) for taken in (False, True) for clients in CLIENTS)
        lines.append((str(setting[0]), setting[1], *(f"{cell:.3g} tok/s" for cell in cells)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = [
        "| " + " | ".join(each.ljust(width) for each, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    return "\n".join([shown[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *shown[1:]])


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=rounds, default=3, help="turns of each setting, at least 3 (default 3)")
    parser.add_argument("--quick", action="store_true", help="one short turn, to see that all works: no figures")
    parser.add_argument(
        "--threads", default=f"1,{os.cpu_count()}", help="numbers of threads (default: 1 and the cores)"
    )
    parser.add_argument("--tokens", type=int, default=48, help="the longest answer (default 48)")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--emberd", type=shlex.split, default=list(find_emberd()), help="the command to measure")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into this page")
    return parser.parse_args()


def main() -> int:
    """0: measured."""
    options = parse()
    signal.signal(signal.SIGTERM, leave)
    turns = 1 if options.quick else options.rounds
    numbers = sorted({int(number) for number in options.threads.split(",")})
    settings = [(number, spin) for number in numbers for spin in SPINS]
    figures: Figures = {}
    for turn in range(turns):
        for number, spin in settings if turn % 2 == 0 else settings[::-1]:
            serve = [*options.emberd, "serve", "--model", options.model, "--engine", "onnx", "--port", "0"]
            plan = Plan(1, 12 if options.quick else options.tokens, 1, CLIENTS, number, options.quick)
            with http_server([*serve, "--threads", str(number), *SPINS[spin]]) as address:
                measure(ours(address, options.model), (number, spin), plan, turn, figures)
            print(f" · round {turn + 1}: {number} threads, {spin}", file=sys.stderr, flush=True)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    command = shlex.join(["python", "benches/threads.py", *sys.argv[1:]])
    block = f"{today}, {machine()}; `{command}`, medians of {turns} rounds\n\n{table(figures, settings)}"
    print(block)
    if options.write:
        write(options.write, {"threads": block})
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as failure:
        sys.exit(f"error: {failure}")
