"""Measures the engine behind its door against llama.cpp's server and onnxruntime-genai: `make bench-engine`.

The same weights, threads, slots and requests for both, in turn, round by round. With `--write FILE` the table takes its
place in that page between `<!-- bench engine -->` and `<!-- end engine -->`, and the plot lies beside it. What is asked
and compared is in `engine_items`, how peers are made in `engine_peers`.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import signal
import sys
from pathlib import Path

from engine_items import CLIENTS, Plan, Series, against_genai, against_llama, ours, peers
from engine_peers import bandwidth, genai, gguf_file, llama, llama_server, weights
from harness import BenchError, find_emberd, http_server, machine
from items import Row, find_folder
from run import cells, leave, rounds, table, write

PEERS = ("llama", "genai")
CONTEXT = 2048
"""Tokens of each slot of `llama-server`; ours has them for all slots at once."""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=rounds, default=3, help="turns of ours and the peer, at least 3 (default 3)")
    parser.add_argument(
        "--quick", action="store_true", help="one short turn of each, to see that all works: no figures"
    )
    parser.add_argument("--only", choices=PEERS, help="this peer only")
    parser.add_argument("--tokens", type=int, default=64, help="the longest answer (default 64)")
    parser.add_argument("--slots", type=int, default=16, help="answers that run together, on both sides (default 16)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="compute threads (default: the cores)")
    parser.add_argument("--model", default="smollm2-135m", help="our model (default smollm2-135m)")
    parser.add_argument("--folder", type=Path, help="that model's folder; found when not given")
    parser.add_argument("--gguf", type=Path, help="the file it was imported from; fetched when not given")
    parser.add_argument("--emberd", type=shlex.split, default=list(find_emberd()), help="the command to measure")
    parser.add_argument("--llama-server", help="the peer; on the PATH, or built, when not given")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="put the table into this page, and the plot beside it"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 2 when a target was missed")
    return parser.parse_args()


def measure(options: argparse.Namespace, plan: Plan, series: Series, rows: list[Row]) -> None:
    """Makes the peers, starts the servers and collects the rows."""
    folder = options.folder or find_folder(options.model)
    only = options.only
    program = (options.llama_server or llama_server()) if only != "genai" else ""
    gguf = (options.gguf or gguf_file(folder)) if only != "genai" else Path()
    python = genai() if only != "llama" else ""

    def add(row: Row) -> None:
        rows.append(row)
        print(" ·", " | ".join(filter(None, cells(row))), file=sys.stderr, flush=True)

    serve = [*options.emberd, "serve", "--model", options.model, "--engine", "onnx", "--port", "0"]
    serve += ["--threads", str(options.threads), "--max-batch", str(options.slots)]
    with http_server(serve) as address:
        side = ours(address, options.model)
        if program:
            read = bandwidth(options.threads)
            with llama(program, gguf, options.slots, CONTEXT, options.threads) as peer:
                sizes = (weights(folder), gguf.stat().st_size)
                for row in against_llama(plan, (side, peers(peer)), series, sizes, read):
                    add(row)
        if python:
            for row in against_genai(plan, side, folder, python):
                add(row)


def main() -> int:
    """0: measured; 1: it could not be; 2: a target was missed and `--strict` given."""
    options = parse()
    signal.signal(signal.SIGTERM, leave)
    few = options.quick
    counts = (1, 8, 32) if few else CLIENTS
    tokens = min(options.tokens, 24) if few else options.tokens
    plan = Plan(1 if few else options.rounds, tokens, 1 if few else 2, counts, options.threads, few)
    command = shlex.join(["python", "benches/engine.py", *sys.argv[1:]])
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    head = f"{today}, {machine()}; `{command}`, {options.slots} slots, {options.threads} threads, medians of {plan.rounds} rounds"
    print(head, flush=True)
    series, rows = Series(), list[Row]()
    failed = False
    try:
        measure(options, plan, series, rows)
    except BenchError as error:
        failed = True
        print(f"error: {error}", file=sys.stderr, flush=True)
    print(f"\n{table(rows)}", flush=True)
    if options.write and not failed:
        write(options.write, {"engine": f"{head}\n\n{table(rows)}"})
        if series.throughput:
            from plot import draw

            draw(series, options.write.parent / "engine.png")
    return 1 if failed else 2 if options.strict and any(row.good is False for row in rows) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as failure:
        sys.exit(f"error: {failure}")
