"""The benchmarks themselves, (a) to (e): which server runs against which peer, and what is asked of it.

In every one of them ours and the peer take turns, round by round, because the machines are noisy: the ratio in the
table is the median of the rounds' ratios, and its range stands beside it. A bare peer does the least that could be
called the same service.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from harness import ROOT, BenchError, Tools, capture, connectable, http_server, on_core, run_json, serving

Figures = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """How long and how often is measured."""

    rounds: int
    seconds: float
    model: str
    folder: Path | None
    threads: int


@dataclass(frozen=True)
class Row:
    """A line of the table. `good` is `None` where nothing is asked."""

    what: str
    ours: str
    peer: str
    ratio: str = ""
    target: str = ""
    good: bool | None = None


def alternate(rounds: int, ours: Callable[[], Figures], peer: Callable[[], Figures]) -> list[tuple[Figures, Figures]]:
    """Measures both in turn; who goes first changes with the round."""
    pairs = []
    for turn in range(rounds):
        if turn % 2:
            second = peer()
            pairs.append((ours(), second))
        else:
            first = ours()
            pairs.append((first, peer()))
    return pairs


def compare(
    what: str,
    pairs: list[tuple[Figures, Figures]],
    figure: Callable[[Figures], float],
    unit: str,
    least: float | None = None,
    most: float | None = None,
) -> Row:
    """A row from one figure of the pairs. The ratio must be at `least` or at `most` what is given, where it is."""
    ours, peers = [figure(pair[0]) for pair in pairs], [figure(pair[1]) for pair in pairs]
    ratios = [one / other for one, other in zip(ours, peers, strict=True)]
    ratio, target, good = median(ratios), "", None
    if least is not None:
        target, good = f"≥ {least:g}", ratio >= least
    elif most is not None:
        target, good = f"≤ {most:g}", ratio <= most
    spread = f"{ratio:.3g} ({min(ratios):.3g}–{max(ratios):.3g})"
    return Row(what, show(median(ours), unit), show(median(peers), unit), spread, target, good)


def show(value: float, unit: str) -> str:
    """A figure with three digits that mean something, and its unit."""
    digits = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return f"{digits} {unit}"


def mock_body(tokens: int) -> str:
    """A request to the mock engine for so many tokens."""
    return json.dumps({"model": "mock", "input": "hi", "stream": True, "max_output_tokens": tokens})


def delta_bytes(stream: bytes) -> float:
    """The mean size of a delta event in a captured stream."""
    deltas = [event for event in re.split(rb"\r?\n\r?\n", stream) if b'"type":"response.output_text.delta"' in event]
    if not deltas:
        raise BenchError("a captured stream has no delta events")
    return fmean(len(event) + 2 for event in deltas)


def streaming(tools: Tools, options: Options) -> Iterator[Row]:
    """(a) Token events a second over many streams: the HTTP door with the mock engine, against Starlette on uvicorn."""
    body = mock_body(128)
    peer = str(ROOT / "benches/peers/starlette_sse.py")
    serve = [*tools.emberd, "serve", "--engine", "mock", "--model", "mock", "--port", "0"]
    with (
        tempfile.TemporaryDirectory() as folder,
        http_server(serve) as ours,
        http_server([tools.python, peer]) as theirs,
        http_server([tools.python, peer, "--engine", "queue"]) as queued,
    ):
        stream = Path(folder, "answer")
        stream.write_bytes(capture(ours, body))
        sizes = delta_bytes(stream.read_bytes()), delta_bytes(capture(theirs, body))
        yield Row("bytes of a delta event", show(sizes[0], "B"), show(sizes[1], "B"), f"{sizes[0] / sizes[1]:.3g}")
        with http_server([tools.load, "serve-bare", "--body", str(stream)]) as bare:
            for streams in (1, 64, 512):

                def measure(address: str, streams: int = streams) -> Callable[[], Figures]:
                    command = [tools.load, "sse", "--url", f"http://{address}/v1/responses", "--body", body]
                    return partial(run_json, [*command, "--streams", str(streams), "--seconds", f"{options.seconds:g}"])

                pairs = alternate(options.rounds, measure(ours), measure(theirs))
                name = f"{streams} stream{'s' if streams > 1 else ''}"
                least = 10.0 if streams == 64 else None
                yield compare(f"{name}: token events", pairs, lambda each: each["deltas_per_s"], "/s", least)
                yield compare(f"{name}: tokens", pairs, lambda each: each["tokens_per_s"], "/s")
                yield compare(f"{name}: first event p50", pairs, lambda each: each["first_event_us"]["p50"], "µs")
                if streams == 64:
                    # An engine that hands each token over by a queue, as a real one must: the peer's usual shape.
                    more = alternate(options.rounds, measure(ours), measure(queued))
                    what = f"{name}: token events, peer with a queue"
                    yield compare(what, more, lambda each: each["deltas_per_s"], "/s")
                ceiling = median(measure(bare)()["events_per_s"] for _ in range(options.rounds))
                rate = median(pair[0]["events_per_s"] for pair in pairs)
                load = median(pair[0].get("generator_load") or 0.0 for pair in pairs)
                what = f"{name}: all events; the generator's limit (busy {load:.0%})"
                good = ceiling > rate and load < 0.95
                yield Row(what, show(rate, "/s"), show(ceiling, "/s"), f"{rate / ceiling:.3g}", "< 1", good)


def first_event(tools: Tools, options: Options) -> Iterator[Row]:
    """(b) From a request to its first event: the HTTP door against bare hyper that answers the same bytes."""
    body = mock_body(16)
    serve = [*tools.emberd, "serve", "--engine", "mock", "--model", "mock", "--port", "0"]
    with tempfile.TemporaryDirectory() as folder:
        stream = Path(folder, "answer")
        with http_server(serve) as ours:
            stream.write_bytes(capture(ours, body))
        peer = [tools.load, "serve-bare", "--body", str(stream)]

        def measure(address: str, load: list[str]) -> Callable[[], Figures]:
            command = [*load, "first-event", "--url", f"http://{address}/v1/responses", "--body", body]
            return partial(run_json, [*command, "--n", "3000"])

        # Servers on one core, with all their threads, and the generator on the other.
        with http_server(on_core(0, serve)) as ours, http_server(on_core(0, peer)) as bare:
            load = on_core(1, [tools.load])
            pairs = alternate(options.rounds, measure(ours, load), measure(bare, load))
            yield compare("first event p50", pairs, lambda each: each["first_event_us"]["p50"], "µs", most=1.5)
            yield compare("first event p99", pairs, lambda each: each["first_event_us"]["p99"], "µs")
            yield compare("whole answer p50", pairs, lambda each: each["request_us"]["p50"], "µs")
        with http_server(serve) as ours, http_server(peer) as bare:
            pairs = alternate(options.rounds, measure(ours, [tools.load]), measure(bare, [tools.load]))
            what = "first event p50, threads left to move"
            yield compare(what, pairs, lambda each: each["first_event_us"]["p50"], "µs", most=1.5)


def ping(tools: Tools, options: Options) -> Iterator[Row]:
    """(c) Pings on the worker door against a bare line echo."""
    with tempfile.TemporaryDirectory() as folder:
        ours, echo, batched = (str(Path(folder, name)) for name in ("worker", "echo", "batched"))
        worker = [
            *tools.emberd,
            "worker",
            "--socket",
            ours,
            "--model-key",
            "bench",
            "--tag",
            "bench",
            "--engine",
            "mock",
        ]
        with (
            serving(worker) as server,
            serving([tools.load, "echo-line", "--socket", echo]) as bare,
            serving([tools.load, "echo-line", "--socket", batched, "--coalesce"]) as coalescing,
        ):
            server.await_true(lambda: connectable(ours))
            bare.await_line('("socket")')
            coalescing.await_line('("socket")')

            def measure(socket: str, *more: str) -> Callable[[], Figures]:
                expect = '"type":"pong"' if socket == ours else '"type":"ping"'
                return partial(run_json, [tools.load, "ping", "--socket", socket, "--expect", expect, *more])

            pairs = alternate(options.rounds, measure(ours), measure(echo))
            yield compare("round trip p50", pairs, lambda each: each["round_trip_us"]["p50"], "µs", most=1.3)
            yield compare("round trip p99", pairs, lambda each: each["round_trip_us"]["p99"], "µs")
            pipelined = ("--n", "300000", "--pipeline", "256")
            pairs = alternate(options.rounds, measure(ours, *pipelined), measure(echo, *pipelined))
            yield compare("pipelined pings", pairs, lambda each: each["lines_per_s"], "/s", least=0.5)
            pairs = alternate(options.rounds, measure(ours, *pipelined), measure(batched, *pipelined))
            what = "pipelined pings, against an echo that writes once a read"
            yield compare(what, pairs, lambda each: each["lines_per_s"], "/s")


def decode(tools: Tools, options: Options) -> Iterator[Row]:
    """(d) ONNX decode through the HTTP door against the bare onnxruntime loop at the same batch, on the same folder."""
    folder = options.folder or find_folder(options.model)
    threads = str(options.threads)
    asked = {"model": options.model, "input": "Write a long story about a lighthouse keeper.", "stream": True}
    body = json.dumps({**asked, "max_output_tokens": 96, "temperature": 0})
    serve = [*tools.emberd, "serve", "--model", options.model, "--engine", "onnx", "--threads", threads, "--port", "0"]
    with http_server(serve) as address:
        for clients in (1, 8, 16):
            command = [tools.load, "sse", "--url", f"http://{address}/v1/responses", "--body", body]
            ours = [*command, "--streams", str(clients), "--rounds", "1", "--warmup", "0"]
            # What the door really made, so that the bare loop makes the same: prompt and answer lengths, per client.
            sample = run_json(ours)
            tokens, prompt = sample["tokens"] // clients, sample["prompt_tokens"] // clients
            bare = [tools.python, str(ROOT / "benches/bare_loop.py"), "--folder", str(folder), "--batch", str(clients)]
            bare += ["--tokens", str(tokens), "--prompt-tokens", str(prompt), "--threads", threads]
            pairs = alternate(options.rounds, partial(run_json, ours), partial(run_json, bare))
            if any(pair[0]["steady"] is None for pair in pairs):
                raise BenchError(f"{clients} clients never decoded together: the answers are too short")
            name = f"{clients} client{'s' if clients > 1 else ''}, {prompt} + {tokens} tokens: decode"
            yield compare(name, pairs, decoding, "tok/s", least=0.95)
            # The same graph in both: what is left is the door and the engine around it.
            pairs = alternate(options.rounds, partial(run_json, ours), partial(run_json, [*bare, "--own"]))
            yield compare(f"{name}, against a loop over emberd's operators", pairs, decoding, "tok/s")
            if clients > 1:
                pairs = alternate(options.rounds, partial(run_json, ours), partial(run_json, [*bare, "--ragged"]))
                yield compare(f"{name}, against rows that differ in length", pairs, decoding, "tok/s")


def decoding(figures: Figures) -> float:
    """Tokens a second while all sequences decode; the bare loop reports nothing else."""
    rate: float = (figures.get("steady") or figures)["tokens_per_s"]
    return rate


def find_folder(model: str) -> Path:
    """The folder of a pulled model."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Path(os.environ.get("EMBERD_HOME") or cache / "emberd")
    folders = sorted({path.parent for path in home.rglob("*.onnx") if model in path.relative_to(home).as_posix()})
    if len(folders) != 1:
        found = ", ".join(map(str, folders)) or "none"
        raise BenchError(f"expected one folder of '{model}' in {home}, found {found}\nhint: name it with --folder")
    return folders[0]


def start(tools: Tools, options: Options) -> Iterator[Row]:
    """(e) From the start of a worker to its first pong, and its memory before a model is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        socket = str(Path(folder, "worker"))
        worker = [*tools.emberd, "worker", "--socket", socket, "--model-key", "bench", "--tag", "bench"]
        rounds = ("--rounds", str(max(options.rounds, 11)))
        figures = run_json(
            [tools.load, "first-pong", "--socket", socket, "--python", tools.python, *rounds, "--", *worker]
        )
    pong, bare = figures["first_pong_us"]["p50"] / 1000, figures["interpreter_us"]["p50"] / 1000
    ratio, over = f"{pong / bare:.3g}", pong - bare
    yield Row("start to first pong p50, and `python -c pass`", show(pong, "ms"), show(bare, "ms"), ratio)
    yield Row("the difference", show(over, "ms"), "", "", "≤ 60 ms", over <= 60)
    memory = figures["resident_kib"] * 1024 / 1e6
    yield Row("resident memory at the first pong", show(memory, "MB"), "", "", "≤ 40 MB", memory <= 40)


ITEMS: dict[str, Callable[[Tools, Options], Iterator[Row]]] = {
    "a": streaming,
    "b": first_event,
    "c": ping,
    "d": decode,
    "e": start,
}
