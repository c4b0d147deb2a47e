"""Everything that the HTTP door says, held to what others say it should be.

Answers and events of varied requests are gathered once and validated by the models of the `openai` and `openresponses-types` packages, strictly; by the
Open Responses document where that is present (`EMBERD_OPEN_RESPONSES`, else `../shared/spec`); and by the server's own.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openresponses_types as spec
import pytest
from openai.types import Model
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from pydantic import BaseModel, TypeAdapter

from support.documented import call, complain, payloads, raw, streamed, validator
from support.serve import Server, server

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
DOCUMENT = Path(os.environ.get("EMBERD_OPEN_RESPONSES", HERE.parent.parent / "shared/spec/open-responses-openapi.json"))
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "what the weather is",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
DRAW = {"type": "custom", "name": "draw", "description": "draws what it is told"}
AGENTS = {"type": "namespace", "name": "agents", "description": "others", "tools": [{**WEATHER, "name": "close"}]}


@dataclass(frozen=True)
class Asked:
    """What is asked for and what the mock's model says to it."""

    answer: str
    body: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    common: bool = True
    """Whether all of it is in the Open Responses document too, which knows no custom tools, no namespaces and no extensions of events."""


ASKED = {
    "text": Asked("A small model keeps warm."),
    "nothing": Asked(""),
    "blank": Asked("\n \n"),
    "thoughts": Asked("<think>\nHm, let me see.\n</think>\n\nSo it is."),
    "thoughts only": Asked("<think>\nHm, let me see.", {"max_output_tokens": 12}),
    "thoughts as text": Asked("<think>Hm.</think>So.", options=("--reasoning-events", "text"), common=False),
    "call": Asked(call("weather", city="Paris"), {"tools": [WEATHER]}),
    "call without arguments": Asked(call("weather"), {"tools": [WEATHER]}),
    "thoughts, text, calls, text": Asked(
        "<think>Hm.</think>I ask.\n" + call("weather", city="Paris") + call("weather", city="Rome") + "There.",
        {"tools": [WEATHER], "parallel_tool_calls": True},
    ),
    "one call of two": Asked(
        call("weather", city="Paris") + call("weather", city="Rome"),
        {"tools": [WEATHER], "parallel_tool_calls": False},
    ),
    "malformed call": Asked('<tool_call>\n{"name": "weather", "arguments": {"city": ', {"tools": [WEATHER]}),
    "call cut short": Asked(call("weather", city="Paris"), {"tools": [WEATHER], "max_output_tokens": 60}),
    "custom and namespace": Asked(
        call("draw", input="a sun") + call("agents__close", city="x"),
        {"tools": [DRAW, AGENTS, {"type": "web_search"}]},
        common=False,
    ),
    "custom cut short": Asked(
        call("draw", input="a sun and a cloud"), {"tools": [DRAW], "max_output_tokens": 60}, common=False
    ),
    "cut short": Asked("A small model keeps warm.", {"max_output_tokens": 3}),
    "one token": Asked("A small model keeps warm.", {"max_output_tokens": 1}),
    "stop string": Asked("A small model keeps warm.", {"stop": ["keeps"]}),
    "everything told again": Asked(
        "Yes.",
        {
            "instructions": "Be brief.",
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "Is it?"}]}],
            "tools": [WEATHER],
            "tool_choice": "none",
            "metadata": {"a": "b", "retention_seconds": 60},
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "logit_bias": {"7": -1},
            "seed": 7,
            "user": "me",
            "safety_identifier": "id",
            "prompt_cache_key": "a key that is long",
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"verbosity": "low", "format": {"type": "text"}},
            "truncation": "auto",
            "max_tool_calls": 3,
            "service_tier": "auto",
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "stream_options": {"include_obfuscation": False},
        },
    ),
    "allowed tools": Asked(
        "No.",
        {
            "tools": [WEATHER],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "weather"}],
            },
        },
    ),
}


@dataclass(frozen=True)
class Said:
    """What came of one request, as it was read off the wire: an object, and the events of the same request as a stream."""

    asked: Asked
    response: bytes
    events: list[bytes]


def events(text: bytes) -> list[bytes]:
    """The data of each event of a whole stream."""
    lines = payloads(text)
    assert lines.pop() == b"[DONE]"
    return lines


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Said]:
    """All of it, asked for once."""
    home = tmp_path_factory.mktemp("home")
    found = {}
    for options in {asked.options for asked in ASKED.values()}:
        these = {name: asked for name, asked in ASKED.items() if asked.options == options}
        # Each is asked twice.
        script = [f"--mock-answer={asked.answer}" for asked in these.values() for _ in range(2)]
        with server(*script, *options, home=home) as one:
            for name, asked in these.items():
                body = {"input": "hi", **asked.body}
                whole = raw(one, "POST", "/v1/responses", body)
                found[name] = Said(asked, whole, events(raw(one, "POST", "/v1/responses", {**body, "stream": True})))
    return found


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The events of an answer that the server's end cuts off."""
    folder = tmp_path_factory.mktemp("slow")
    (folder / "sitecustomize.py").write_text(
        "import time\n"
        "from emberd.echo import EchoEngine\n"
        "step = EchoEngine.step\n"
        "EchoEngine.step = lambda engine: (time.sleep(0.02), step(engine))[1]\n"
    )
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    with (
        server("--grace", "0", engine="echo", home=folder, PYTHONPATH=path) as one,
        one.stream({"input": "word " * 200}) as stream,
    ):
        found = [next(iter(stream))[1]]
        one.process.signal(signal.SIGTERM)
        found += [event for _, event in stream]
    return [json.dumps(event).encode() for event in found]


@cache
def document() -> Any:
    return json.loads(DOCUMENT.read_text())


@pytest.mark.parametrize("name", ASKED)
def test_answers_and_events_are_what_openai_documents(name: str, said: dict[str, Said]) -> None:
    Response.model_validate_json(said[name].response, strict=True)
    for event in said[name].events:
        EVENT.validate_json(event, strict=True)


@cache
def models() -> dict[str, type[BaseModel]]:
    """The models of events in `openresponses-types`, by the type of the event."""
    found = {}
    for name, model in vars(spec).items():
        if name.endswith("StreamingEvent"):
            [kind] = model.model_fields["type"].annotation
            found[kind.value] = model
    return found


@pytest.mark.parametrize("name", [name for name, asked in ASKED.items() if asked.common])
def test_answers_and_events_are_what_open_responses_documents(name: str, said: dict[str, Said]) -> None:
    spec.ResponseResource.model_validate_json(said[name].response, strict=True)
    for event in said[name].events:
        models()[json.loads(event)["type"]].model_validate_json(event, strict=True)


@pytest.mark.skipif(not DOCUMENT.exists(), reason="the Open Responses document is not here")
@pytest.mark.parametrize("name", [name for name, asked in ASKED.items() if asked.common])
def test_answers_and_events_are_what_the_open_responses_document_has(name: str, said: dict[str, Said]) -> None:
    content = document()["paths"]["/responses"]["post"]["responses"]["200"]["content"]
    complain(validator(document(), content["application/json"]["schema"]), said[name].response)
    for event in said[name].events:
        complain(validator(document(), content["text/event-stream"]["schema"]), event)


@pytest.mark.parametrize("name", ASKED)
def test_answers_and_events_are_what_the_server_itself_documents(name: str, said: dict[str, Said], own: Any) -> None:
    content = own["paths"]["/v1/responses"]["post"]["responses"]["200"]["content"]
    complain(validator(own, content["application/json"]["schema"]), said[name].response)
    for event in said[name].events:
        complain(validator(own, streamed(content)), event)


@pytest.mark.parametrize("name", ASKED)
def test_a_stream_ends_in_the_object_that_is_answered_without_one(name: str, said: dict[str, Said]) -> None:
    def settled(response: dict[str, Any]) -> dict[str, Any]:
        """Without what is different each time: ids and times."""

        def bare(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: bare(each) for key, each in value.items() if key not in ("id", "call_id")}
            return [bare(each) for each in value] if isinstance(value, list) else value

        usage = {key: count for key, count in response["usage"].items() if "tokens" in key and "per_second" not in key}
        return {
            **bare(response),
            "usage": usage,
            "created_at": 0,
            "completed_at": bool(response["completed_at"]),
            "seed": 0,
        }

    last = json.loads(said[name].events[-1])["response"]
    whole = json.loads(said[name].response)
    assert settled(last) == settled(whole)
    kinds = {"incomplete": "response.incomplete", "completed": "response.completed"}
    assert json.loads(said[name].events[-1])["type"] == kinds[whole["status"]]


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "year": {"type": "integer"}},
    "required": ["city", "year"],
    "additionalProperties": False,
}
HELD: dict[str, dict[str, Any]] = {
    "schema": {"text": {"format": {"type": "json_schema", "name": "film", "schema": SCHEMA, "strict": True}}},
    "object": {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 20},
    "forced call": {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}},
    "some call": {"tools": [WEATHER, {**WEATHER, "name": "news"}], "tool_choice": "required"},
    "probabilities": {"top_logprobs": 2, "include": ["message.output_text.logprobs"], "max_output_tokens": 8},
}
"""What only a real model's engine does: it holds answers to a form, and knows how likely they are."""


@pytest.fixture(scope="module")
def warm(model_home: Path) -> Iterator[Server]:
    """A server of the real model."""
    with server("--model", os.environ.get("EMBERD_TEST_MODEL", "smollm2-135m"), engine="auto", home=model_home) as one:
        yield one


def without_schema(data: bytes) -> bytes:
    """A response, or an event with one, whose form has lost its schema. Open Responses has room for nothing but null there, where `openai` must have
    an object: what they say of it cannot both be done."""
    value = json.loads(data)
    text = value.get("response", value).get("text")
    form = text["format"] if isinstance(text, dict) else {}  # Of some events `text` is a text.
    if "schema" in form:
        assert form["schema"] == SCHEMA
        form["schema"] = None
    return json.dumps(value).encode()


@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", HELD)
def test_what_a_real_model_is_held_to_is_documented_by_all(name: str, warm: Server, own: Any) -> None:
    body = {"input": "Name a city and a year.", "max_output_tokens": 80, **HELD[name]}
    whole = raw(warm, "POST", "/v1/responses", body)
    content = own["paths"]["/v1/responses"]["post"]["responses"]["200"]["content"]
    Response.model_validate_json(whole, strict=True)
    spec.ResponseResource.model_validate_json(without_schema(whole), strict=True)
    complain(validator(own, content["application/json"]["schema"]), whole)
    for event in events(raw(warm, "POST", "/v1/responses", {**body, "stream": True})):
        EVENT.validate_json(event, strict=True)
        models()[json.loads(event)["type"]].model_validate_json(without_schema(event), strict=True)
        complain(validator(own, streamed(content)), event)
        if DOCUMENT.exists():
            theirs = document()["paths"]["/responses"]["post"]["responses"]["200"]["content"]["text/event-stream"]
            complain(validator(document(), theirs["schema"]), without_schema(event))
    output = json.loads(whole)["output"]
    if "tools" in body:
        assert {item["type"] for item in output} == {"function_call"}
    elif name == "probabilities":
        assert output[0]["content"][0]["logprobs"]


def test_a_failure_in_a_stream_is_documented_by_all(failed: list[bytes], own: Any) -> None:
    last = json.loads(failed[-1])
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    content = own["paths"]["/v1/responses"]["post"]["responses"]["200"]["content"]
    for event in failed:
        EVENT.validate_json(event, strict=True)
        models()[json.loads(event)["type"]].model_validate_json(event, strict=True)
        complain(validator(own, streamed(content)), event)
        if DOCUMENT.exists():
            schema = document()["paths"]["/responses"]["post"]["responses"]["200"]["content"]["text/event-stream"]
            complain(validator(document(), schema["schema"]), event)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for what is no answer."""
    with server("--max-body", "4096", home=tmp_path_factory.mktemp("plain")) as one:
        yield one


@pytest.fixture(scope="module")
def own(plain: Server) -> Any:
    """The server's document."""
    return plain.get("/openapi.json")[1]


def test_the_other_objects_are_what_openai_and_the_server_document(plain: Server, own: Any) -> None:
    of = {path: item["get"]["responses"]["200"]["content"] for path, item in own["paths"].items() if "get" in item}
    for path, template, model in [
        ("/v1/models/smollm2-135m", "/v1/models/{id}", Model),
        ("/v1/models", "/v1/models", None),
        ("/health", "/health", None),
        ("/health?live", "/health", None),
    ]:
        data = raw(plain, "GET", path)
        complain(validator(own, of[template]["application/json"]["schema"]), data)
        if model is not None:
            model.model_validate_json(data, strict=True)
    for each in plain.get("/v1/models")[1]["data"]:
        Model.model_validate(each, strict=True)
    counted = raw(plain, "POST", "/v1/responses/input_tokens", {"input": "hi"})
    InputTokenCountResponse.model_validate_json(counted, strict=True)
    content = own["paths"]["/v1/responses/input_tokens"]["post"]["responses"]["200"]["content"]
    complain(validator(own, content["application/json"]["schema"]), counted)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/nowhere", None, 404),
        ("GET", "/v1/models/none", None, 404),
        ("DELETE", "/v1/models", None, 405),
        ("POST", "/v1/responses", {"input": "x" * 5000}, 413),
        ("POST", "/v1/responses", {"input": 5}, 400),
        ("POST", "/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400),
        ("POST", "/v1/responses", {"input": "hi", "model": "none"}, 404),
        ("POST", "/v1/responses", {"input": "hi", "stream": True, "previous_response_id": "resp_x"}, 400),
        ("POST", "/v1/responses/input_tokens", {}, 400),
    ],
)
def test_errors_are_what_the_server_documents(
    plain: Server, own: Any, method: str, path: str, body: object, status: int
) -> None:
    connection = plain.connection()
    connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    data = response.read()
    connection.close()
    assert (response.status, response.getheader("content-type")) == (status, "application/json")
    complain(validator(own, {"$ref": "#/components/schemas/Error"}), data)
