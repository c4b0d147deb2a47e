"""Runs the benchmarks and prints their table: `make bench`, or `python benches/run.py --only a,c`.

With `--write FILE` the tables take their places in that page, between `<!-- bench a -->` and `<!-- end a -->`; items
that were not run keep theirs. What is measured is in `items.py`, how servers are started and ended in `harness.py`.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import signal
import sys
from pathlib import Path
from types import FrameType

import items as doors
from call_items import calls
from grammar_items import grammars
from harness import BenchError, Tools, build_load, find_emberd, machine
from items import Options, Row
from mlx_items import mlx
from prefix_items import prefixes
from schema_items import schemas
from speculation_items import speculation
from worker_items import titles

ITEMS = {
    **doors.ITEMS,
    "f": titles,
    "g": prefixes,
    "h": speculation,
    "i": grammars,
    "j": calls,
    "k": schemas,
    "m": mlx,
}

HEAD = ("", "emberd", "peer", "ratio", "target", "")


def cells(row: Row) -> tuple[str, ...]:
    """A row's cells as text."""
    verdict = "" if row.good is None else "ok" if row.good else "**miss**"
    return (row.what, row.ours, row.peer, row.ratio, row.target, verdict)


def table(rows: list[Row]) -> str:
    """A Markdown table whose columns line up in a terminal too."""
    lines = [HEAD, *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([shown[0], rule, *shown[1:]])


def write(page: Path, blocks: dict[str, str]) -> None:
    """Puts each block in its place in the page."""
    text = page.read_text(encoding="utf-8")
    for item, block in blocks.items():
        begin, end = f"<!-- bench {item} -->\n", f"<!-- end {item} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise BenchError(f"{page} has no place for item {item}\nhint: add the lines '{begin.strip()}' and '{end}'")
        text = f"{before}{begin}\n{block}\n\n{end}{after}"
    page.write_text(text, encoding="utf-8")


def items(text: str) -> list[str]:
    """The letters of `--only`."""
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in ITEMS]:
        raise argparse.ArgumentTypeError(f"no item {unknown[0]!r}; there are {', '.join(ITEMS)}")
    return names


def rounds(text: str) -> int:
    """A number of rounds that has a median worth the name."""
    if (count := int(text)) < 3:
        raise argparse.ArgumentTypeError("at least 3, or there is no median")
    return count


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=items, default=list(ITEMS), metavar="a,b", help="these items only")
    parser.add_argument("--rounds", type=rounds, default=5, help="turns of ours and the peer, at least 3 (default 5)")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of one streaming turn (default 1)")
    parser.add_argument("--emberd", type=shlex.split, default=list(find_emberd()), help="the command to measure")
    parser.add_argument("--load", help="the load generator; built when not given")
    parser.add_argument(
        "--model", default="smollm2-135m", help="the model of items d, f to i and k (default smollm2-135m)"
    )
    parser.add_argument("--folder", type=Path, help="that model's folder; found when not given")
    parser.add_argument(
        "--threads",
        type=int,
        default=os.cpu_count(),
        help="compute threads of items d, f to i and k (default: the cores)",
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables into this page")
    parser.add_argument("--strict", action="store_true", help="exit with 2 when a target was missed")
    return parser.parse_args()


def leave(number: int, _: FrameType | None) -> None:
    """Turns a signal into an exit, so that the servers are ended on the way out."""
    sys.exit(128 + number)


def main() -> int:
    """Runs what was asked for. 0: measured; 1: an item could not be; 2: a target was missed and `--strict` given."""
    options = parse()
    signal.signal(signal.SIGTERM, leave)
    tools = Tools(tuple(options.emberd), options.load or build_load(), sys.executable)
    settings = Options(options.rounds, options.seconds, options.model, options.folder, options.threads)
    command = shlex.join(["python", "benches/run.py", *sys.argv[1:]])
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    head = f"{today}, {machine()}; `{command}`, medians of {options.rounds} rounds"
    print(head, flush=True)
    blocks: dict[str, str] = {}
    failed = missed = False
    for item in options.only:
        measure = ITEMS[item]
        print(f"\n{measure.__doc__}\n", flush=True)
        rows = []
        try:
            for row in measure(tools, settings):
                rows.append(row)
                print(" ·", " | ".join(filter(None, cells(row))), file=sys.stderr, flush=True)
        except BenchError as error:
            failed = True
            print(f"error: item {item}: {error}", file=sys.stderr, flush=True)
            continue
        missed |= any(row.good is False for row in rows)
        print(table(rows), flush=True)
        blocks[item] = f"{head}\n\n{table(rows)}"
    if options.write:
        write(options.write, blocks)
    return 1 if failed else 2 if missed and options.strict else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as failure:
        sys.exit(f"error: {failure}")
