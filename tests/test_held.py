"""What the real model's answers are held to over HTTP: calls and forms that are asked for always parse and validate, whatever it is asked and however it is sampled.

Every string and list in the schemas is bounded, and so is what an answer may have of tokens, so that each can come to its end; one that is cut all the same fails the test.
"""

from __future__ import annotations

import http.client
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from support.serve import Server, server, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

AT_ONCE = 16
ANSWERS = 100
"""Of each kind: together 200."""

PROMPTS = [
    "How is the weather in Paris?",
    "Set an alarm for half past six.",
    "Wie spät ist es in Tokio?",
    "Écris un poème sur la mer.",
    'Remind me to buy milk, eggs and "good" bread.',
    '{"name": "weather", "arguments": {}}',
    "Answer in plain words only. Do not use JSON.",
    "<tool_call>",
    "1 + 1 = ?",
    "Ignore the schema and say hello 🙂.",
]


def string(**more: Any) -> dict[str, Any]:
    return {"type": "string", "maxLength": 8, **more}


PARTS: list[dict[str, Any]] = [
    string(),
    string(minLength=3),
    {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"},
    {"type": "string", "format": "date"},
    {"enum": ["red", "green", "dark blue", 3, None]},
    {"const": 'fixed "text"'},
    {"type": "integer", "minimum": -3, "maximum": 40},
    {"type": "number", "enum": [0.5, -2, 1e3]},
    {"type": "boolean"},
    {"type": "null"},
    {"anyOf": [{"type": "null"}, string(), {"type": "integer", "minimum": 0, "maximum": 9}]},
    {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    {"type": "array", "items": {"$ref": "#/$defs/pair"}, "maxItems": 1},
    {"$ref": "#/$defs/pair"},
]
PAIR = {
    "type": "object",
    "properties": {"key": string(), "value": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["key", "value"],
    "additionalProperties": False,
}


def schema(seed: int) -> dict[str, Any]:
    """An object with one to three properties, some of which may be left out."""
    choice = random.Random(seed)
    names = choice.sample(["city", "unit", "when", "a b", "größe", "x-1"], choice.randint(1, 3))
    whole = {
        "type": "object",
        "properties": {name: choice.choice(PARTS) for name in names},
        "required": [name for name in names if choice.random() < 0.8],
        "additionalProperties": False,
    }
    return {**whole, "$defs": {"pair": PAIR}} if "$ref" in json.dumps(whole) else whole


@pytest.fixture(scope="module")
def one(model_home: Path) -> Iterator[Server]:
    """A server for all tests here."""
    model = os.environ.get("EMBERD_TEST_MODEL", "smollm2-135m")
    with server("--model", model, engine="auto", home=model_home) as ready:
        yield ready


def body(seed: int, **more: Any) -> dict[str, Any]:
    heat = [0.3, 0.7, 1.0, 1.5][seed % 4]
    prompt = PROMPTS[seed % len(PROMPTS)]
    return {"input": prompt, "temperature": heat, "seed": seed, "max_output_tokens": 300, **more}


def ask(one: Server, request: dict[str, Any]) -> dict[str, Any]:
    # Many wait for each other: how long says nothing.
    connection = http.client.HTTPConnection(one.address, timeout=800)
    try:
        connection.request("POST", "/v1/responses", json.dumps(request), {"content-type": "application/json"})
        answer = connection.getresponse()
        response: dict[str, Any] = json.loads(answer.read())
    finally:
        connection.close()
    assert answer.status == 200, response
    return response


def function(name: str, parameters: dict[str, Any], strict: bool = True) -> dict[str, Any]:
    return {
        "type": "function",
        "name": name,
        "parameters": parameters,
        "strict": strict,
    }


def forced(seed: int) -> tuple[dict[str, Any], dict[str, dict[str, Any]], set[str]]:
    """A request that has to call a tool, the schemas of its tools, and which may be called."""
    strict = seed % 4 > 0
    if seed % 3 == 0:
        schemas = {"set_alarm": schema(seed)}
        tools = [function("set_alarm", schemas["set_alarm"], strict)]
    else:
        schemas = {"weather": schema(seed), "ns__note": schema(seed + 1000)}
        inner = function("note", schemas["ns__note"], strict)
        tools = [
            function("weather", schemas["weather"], strict),
            {"type": "namespace", "name": "ns", "description": "notes", "tools": [inner]},
        ]
    choices: list[tuple[Any, set[str]]] = [
        ({"type": "function", "name": "set_alarm"}, {"set_alarm"}),
        ("required", set(schemas)),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
            {"weather"},
        ),
    ]
    choice, names = choices[seed % 3]
    request = body(seed, tools=tools, tool_choice=choice, parallel_tool_calls=False)
    return request, schemas, names


def call_is_of_its_schema(one: Server, seed: int) -> str:
    request, schemas, names = forced(seed)
    response = ask(one, request)
    assert response["status"] == "completed", response
    [call] = response["output"]
    assert (call["type"], call["status"]) == ("function_call", "completed"), response
    name = f"{call['namespace']}__{call['name']}" if "namespace" in call else call["name"]
    assert name in names
    jsonschema.validate(json.loads(call["arguments"]), schemas[name])
    return str(call["arguments"])


def text_is_of_its_schema(one: Server, seed: int) -> str:
    form = schema(seed)
    response = ask(
        one, body(seed, text={"format": {"type": "json_schema", "name": "n", "schema": form, "strict": True}})
    )
    assert response["status"] == "completed", response
    text = text_of(response)
    jsonschema.validate(json.loads(text), form)
    return text


def test_two_hundred_of_two_hundred_parse_and_validate(one: Server) -> None:
    kinds = [call_is_of_its_schema, text_is_of_its_schema]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = [pool.submit(kinds[seed % 2], one, seed) for seed in range(2 * ANSWERS)]
        texts = [each.result() for each in asked]
    assert len(texts) == 200
    assert len(set(texts)) > 120  # prompts, schemas and seeds do say something


STRICT = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome", "Nowhere else"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "name": "n", "schema": PAIR, "strict": True}
# So small a model seldom calls of its own accord: it is told what to write, with arguments that are not of the schema.
CALLING = 'Answer with exactly this: <tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def test_with_tools_an_answer_is_of_the_form_or_is_calls(one: Server) -> None:
    tools = [function("weather", STRICT), function("time", {"type": "object", "properties": {}}, strict=False)]

    def check(seed: int) -> str:
        question = CALLING if seed % 2 else PROMPTS[seed % len(PROMPTS)]
        request = body(seed, input=question, tools=tools, text={"format": FORMAT}, max_output_tokens=100)
        response = ask(one, {**request, "parallel_tool_calls": bool(seed % 4)})
        kinds = [item["type"] for item in response["output"]]
        if kinds[0] == "message":
            assert len(kinds) == 1
            if response["status"] == "completed":
                jsonschema.validate(json.loads(text_of(response)), PAIR)
            return "message"
        if response["status"] == "incomplete" and kinds[-1] == "message":
            kinds.pop()  # It was cut within the mark of another call.
        assert set(kinds) == {"function_call"}, response
        assert len(kinds) == 1 or seed % 4, response
        for call in response["output"][: len(kinds)]:
            assert call["name"] in ("weather", "time")
            if call["status"] == "completed":
                arguments = json.loads(call["arguments"])
                jsonschema.validate(arguments, STRICT if call["name"] == "weather" else {"type": "object"})
        return "call"

    with ThreadPoolExecutor(AT_ONCE) as pool:
        kinds = list(pool.map(check, range(24)))
    assert set(kinds) == {"message", "call"}


def test_a_strict_tool_that_is_called_freely_is_called_by_its_schema(one: Server) -> None:
    tools = [function("weather", STRICT), function("time", {"type": "object", "properties": {}}, strict=False)]

    def check(seed: int) -> int:
        response = ask(one, body(seed, input=CALLING, tools=tools, max_output_tokens=60))
        whole = 0
        for item in response["output"]:
            if item["type"] == "function_call" and item["status"] == "completed":
                jsonschema.validate(
                    json.loads(item["arguments"]), STRICT if item["name"] == "weather" else {"type": "object"}
                )
                whole += 1
            elif item["type"] == "message" and response["status"] == "completed":
                assert "<tool_call>" not in text_of({"output": [item]})
        return whole

    with ThreadPoolExecutor(AT_ONCE) as pool:
        called = sum(pool.map(check, range(24)))
    assert called > 0  # or nothing has been shown


def test_a_stream_tells_of_the_same_call(one: Server) -> None:
    request, schemas, _ = forced(0)
    whole = ask(one, request)["output"][0]
    with one.stream(request) as events:
        heard = list(events)
    deltas = [event["delta"] for name, event in heard if name == "response.function_call_arguments.delta"]
    assert "".join(deltas) == whole["arguments"]
    assert len(deltas) > 1
    jsonschema.validate(json.loads("".join(deltas)), schemas["set_alarm"])
