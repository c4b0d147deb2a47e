"""The benchmark of streams under a JSON schema, (k): the HTTP door sends the same stream with `text.format` and without, in turn.

With the mock engine both say the same bytes, one to a token, and nothing is computed: what differs is what it costs to read the
schema and to follow the answer through it. With the real model each step also asks what may come next; the schemas have no end
before the limit, so that both sides make the same number of tokens.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from harness import BenchError, Tools, http_server, run_json
from items import Figures, Options, Row, alternate, compare, decoding

RECORDS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "scenes": {
            "type": "array",
            "minItems": 20,
            "items": {
                "type": "object",
                "properties": {
                    "title": {"type": "string"},
                    "mood": {"enum": ["calm", "tense", "merry"]},
                    "minutes": {"type": "integer", "minimum": 1, "maximum": 90},
                    "indoors": {"type": "boolean"},
                },
                "required": ["title", "mood", "minutes", "indoors"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["scenes"],
    "additionalProperties": False,
}
TEXT: dict[str, Any] = {
    "type": "object",
    "properties": {"story": {"type": "string", "minLength": 4000}},
    "required": ["story"],
    "additionalProperties": False,
}
SCENE = {"title": "The keeper lights the lamp", "mood": "calm", "minutes": 12, "indoors": True}
CLIENTS, TOKENS = 8, 96
"""Answers at a time of the real model, and the length of each."""


def body(schema: dict[str, Any] | None, **more: Any) -> str:
    """A request for a stream, held to the schema or to none."""
    form = {"type": "json_schema", "name": "story", "schema": schema, "strict": True}
    return json.dumps({"input": "hi", "stream": True, **more, **({"text": {"format": form}} if schema else {})})


def measure(tools: Tools, address: str, content: str, *more: str) -> Callable[[], Figures]:
    """A round of the load generator with this request."""
    return partial(run_json, [tools.load, "sse", "--url", f"http://{address}/v1/responses", "--body", content, *more])


def schemas(tools: Tools, options: Options) -> Iterator[Row]:
    """(k) Streams under a JSON schema, against the same without one: the HTTP door with the mock engine, and with the model."""
    answer = json.dumps({"scenes": [SCENE] * 20})
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.json")
        script.write_text(json.dumps([{"answer": answer}]))
        serve = [
            *tools.emberd,
            "serve",
            "--engine",
            "mock",
            "--model",
            "mock",
            "--port",
            "0",
            "--mock-script",
            str(script),
        ]
        with http_server(serve) as address:
            for streams in (1, 64):
                load = ("--streams", str(streams), "--seconds", f"{options.seconds:g}")
                pairs = alternate(
                    options.rounds,
                    measure(tools, address, body(RECORDS), *load),
                    measure(tools, address, body(None), *load),
                )
                many = f"mock, {streams} stream{'s' if streams > 1 else ''}"
                yield compare(f"{many}: tokens", pairs, lambda each: each["tokens_per_s"], "/s")
                if streams == 1:
                    yield compare(f"{many}: first event p50", pairs, lambda each: each["first_event_us"]["p50"], "µs")
    serve = [*tools.emberd, "serve", "--model", options.model, "--engine", "onnx", "--cache-bytes", "0"]
    serve += ["--threads", str(options.threads), "--port", "0"]
    asked = {"input": "Write a very long story about the sea.", "max_output_tokens": TOKENS, "temperature": 0}
    together = ("--streams", str(CLIENTS), "--rounds", "1", "--warmup", "0")
    with http_server(serve) as address:
        plain = measure(tools, address, body(None, **asked), *together)
        for what, schema in (("one long string", TEXT), ("a list of records", RECORDS)):
            held = measure(tools, address, body(schema, **asked), *together)
            held()  # The schema is read once, and known from then on.
            pairs = alternate(options.rounds, held, plain)
            for pair in pairs:
                if any(each["tokens"] != CLIENTS * TOKENS or each["steady"] is None for each in pair):
                    raise BenchError(f"not all of {CLIENTS} answers have {TOKENS} tokens and run together: {pair}")
            name = f"{what}, {CLIENTS} clients"
            yield compare(f"{name}: decode", pairs, decoding, "tok/s")
            yield compare(f"{name}: first event p50", pairs, lambda each: each["first_event_us"]["p50"], "µs")
