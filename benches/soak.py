"""The soak: `make soak`. Ten minutes of clients that join, leave and hang up at random, against a server with the real model.

Shown: that memory is flat after the first minute, that no slot is lost (afterwards as many answers run at once as there
are slots), and that every answer is well formed. Ends with 1 where one of these fails. What the clients do is in
`wild_clients`.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import shlex
import signal
import sys
import time
from functools import partial
from pathlib import Path
from statistics import linear_regression, median

import streams
from harness import BenchError, find_emberd, machine, ready, serving
from run import leave
from wild_clients import Tally, client, together

CACHE = 64 << 20
"""Bytes that the server may keep of prompts and answers: full within the first minute, so that more shows as a leak."""

SLOPE = 1.0
"""MiB a minute that resident memory may grow by after the first minute."""

LONGEST = 48
"""Tokens of an answer, at most."""


def resident(pid: int) -> float:
    """Resident memory of a process, MiB (Linux)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise BenchError(f"process {pid} has no resident memory")


async def watch(pid: int, begin: float, samples: list[tuple[float, float]]) -> None:
    """Notes once a second how much memory the process has: seconds since `begin`, MiB."""
    while True:
        samples.append((time.monotonic() - begin, resident(pid)))
        await asyncio.sleep(1)


async def soak(
    address: str, pid: int, clients: int, seconds: float, seed: int
) -> tuple[Tally, list[tuple[float, float]]]:
    """All clients for so long."""
    tally, samples = Tally(), list[tuple[float, float]]()
    begin = time.monotonic()
    watching = asyncio.ensure_future(watch(pid, begin, samples))
    try:
        await asyncio.gather(
            *(
                client(address, f"{seed} {each}", LONGEST, 2.0, lambda: time.monotonic() < begin + seconds, tally)
                for each in range(clients)
            )
        )
    finally:
        watching.cancel()
    return tally, samples


def idle(address: str) -> str | None:
    """What `/health` has against the server being idle; `None` when nothing. It may not tell how many requests there are."""
    host, port = address.rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    connection.request("GET", "/health")
    answer = connection.getresponse()
    health = json.loads(answer.read())
    connection.close()
    busy = {name: health[name] for name in ("running", "waiting") if health.get(name)}
    return None if answer.status == 200 and not busy else f"status {answer.status}, {health}"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default 10)")
    parser.add_argument("--clients", type=int, default=16, help="clients, and slots (default 16)")
    parser.add_argument("--seed", type=int, default=1, help="what the clients do follows from it")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--emberd", type=shlex.split, default=list(find_emberd()), help="the command to run")
    return parser.parse_args()


def main() -> int:
    """0: all is well; 1: something is not."""
    options = parse()
    signal.signal(signal.SIGTERM, leave)
    serve = [*options.emberd, "serve", "--model", options.model, "--engine", "onnx", "--port", "0"]
    serve += ["--max-batch", str(options.clients), "--cache-bytes", str(CACHE), "--log", "warn"]
    print(f"{machine()}; {options.minutes:g} minutes, {options.clients} clients, seed {options.seed}", flush=True)
    with serving(serve) as server:
        address = ready(server)
        tally, samples = streams.run(
            partial(soak, address, server.pid, options.clients, 60 * options.minutes, options.seed)
        )
        at_once = streams.run(partial(together, address, options.clients, 64))
        busy = idle(address)
    warm = min(60.0, 60 * options.minutes / 4)
    later = [(at / 60, memory) for at, memory in samples if at >= warm]
    if len(later) < 10:
        raise BenchError("too short to tell whether memory is flat\nhint: raise --minutes")
    slope = linear_regression(*zip(*later, strict=True)).slope
    third = len(later) // 3
    early, late = (median(memory for _, memory in part) for part in (later[:third], later[-third:]))
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(tally.kinds.items()))
    print(f"requests: {sum(tally.kinds.values()) // 2} ({kinds}); {tally.answered} answered, {tally.left} left early")
    print(f"tokens: {tally.tokens} made, {tally.cached} of prompts cached")
    print(
        f"memory after {warm:.0f} s: {early:.1f} MiB in the first third, {late:.1f} in the last, {slope:+.2f} a minute"
    )
    print(f"answers at once afterwards: {at_once} of {options.clients}")
    faults = [*tally.faults]
    if slope > SLOPE and late - early > SLOPE:
        faults.append(f"memory grows by {slope:.2f} MiB a minute, more than {SLOPE:g}")
    if at_once < options.clients:
        faults.append(f"only {at_once} answers run at once, where there are {options.clients} slots")
    if busy is not None:
        faults.append(f"the server is not idle afterwards: {busy}")
    for line in faults[:20]:
        print(f"fault: {line}")
    print(f"{len(faults)} faults" if faults else "ok")
    return 1 if faults else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as failure:
        sys.exit(f"error: {failure}")
