"""The benchmark of answers under a grammar, (i): eight at a time, against the same server without one.

The grammars allow nearly any text, so that both sides make the same number of tokens and what differs is the cost of
knowing what may come next and of drawing among it. The last row is what is gained where much is certain.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from harness import BenchError, Tools, http_server
from items import Figures, Options, Row, alternate, compare

CLIENTS = 8
TOKENS = 96
"""Of each answer; a story has more, so every answer ends there."""

STORY = "Write a very long story about the sea."
FREE = {"type": "grammar", "syntax": "regex", "definition": "(.|\\n){4000,}"}
FIELD = {
    "type": "json_schema",
    "name": "story",
    "schema": {
        "type": "object",
        "properties": {"story": {"type": "string", "minLength": 4000}},
        "required": ["story"],
        "additionalProperties": False,
    },
}
FORM = {
    "type": "json_schema",
    "name": "form",
    "schema": {
        "type": "object",
        "properties": {
            key: {"enum": ["yes", "no"]}
            for key in ("is_a_question", "mentions_a_person", "mentions_a_place", "is_polite")
        },
        "required": ["is_a_question", "mentions_a_person", "mentions_a_place", "is_polite"],
        "additionalProperties": False,
    },
}

STRICT = {
    "tools": [
        {
            "type": "function",
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
                "additionalProperties": False,
            },
            "strict": True,
        }
    ]
}
"""A tool that is held to its schema if the model calls it; a story calls none, so that what is measured is the watch for it."""


def ask(address: str, body: dict[str, Any]) -> Figures:
    """The usage of one response."""
    host, port = address.rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=600)
    connection.request("POST", "/v1/responses", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    response: Figures = json.loads(answer.read())
    connection.close()
    if answer.status != 200:
        raise BenchError(f"{address} answered {answer.status}: {response}")
    usage: Figures = response["usage"]
    return usage


def together(
    address: str,
    model: str,
    form: dict[str, Any] | None,
    temperature: float,
    clients: int,
    tokens: int | None,
    more: dict[str, Any] | None = None,
) -> float:
    """Tokens a second of each of some answers that run together, from the first token to the last. `more`: of the request."""
    body = {"model": model, "input": STORY, "temperature": temperature, "max_output_tokens": tokens, **(more or {})}
    body |= {"text": {"format": form}} if form else {}
    with ThreadPoolExecutor(clients) as pool:
        usages = list(pool.map(partial(ask, address), [{**body, "seed": seed} for seed in range(clients)]))
    if tokens and not more and any(usage["output_tokens"] != tokens for usage in usages):
        raise BenchError(f"an answer of {tokens} tokens has another number: {usages}")
    return sum(float(usage["decode_tokens_per_second"]) for usage in usages) / clients


def grammars(tools: Tools, options: Options) -> Iterator[Row]:
    """(i) Answers under a grammar, eight at a time, against the same without one."""
    serve = [*tools.emberd, "serve", "--model", options.model, "--engine", "onnx", "--cache-bytes", "0"]
    serve += ["--threads", str(options.threads), "--port", "0"]
    with http_server(serve) as address:
        for what, form in (("any text", FREE), ("a JSON schema with one long string", FIELD)):
            for temperature in (0.0, 1.0):
                run = partial(together, address, options.model)
                pairs = alternate(
                    options.rounds,
                    lambda run=run, form=form, temperature=temperature: {  # type: ignore[misc]
                        "rate": run(form, temperature, CLIENTS, TOKENS)
                    },
                    lambda run=run, temperature=temperature: {  # type: ignore[misc]
                        "rate": run(None, temperature, CLIENTS, TOKENS)
                    },
                )
                name = f"{what}, temperature {temperature:g}: each of {CLIENTS} answers"
                yield compare(name, pairs, lambda each: float(each["rate"]), "tok/s", least=0.95)
        free: dict[str, Any] = {"tools": [{**STRICT["tools"][0], "strict": False}]}
        pairs = alternate(
            options.rounds,
            lambda: {"rate": together(address, options.model, None, 1.0, CLIENTS, TOKENS, STRICT)},
            lambda: {"rate": together(address, options.model, None, 1.0, CLIENTS, TOKENS, free)},
        )
        name = f"a strict tool that is not called, against one that is not strict: each of {CLIENTS} answers"
        yield compare(name, pairs, lambda each: float(each["rate"]), "tok/s")
        pairs = alternate(
            options.rounds,
            lambda: {"rate": together(address, options.model, FORM, 0.0, 1, None)},
            lambda: {"rate": together(address, options.model, None, 0.0, 1, TOKENS)},
        )
        yield compare("a form of which most is certain: one answer", pairs, lambda each: float(each["rate"]), "tok/s")
