"""Chat Completions, Messages and the counting of their tokens, held to what the server itself documents of them: what is asked, what is answered, every
chunk and event of the same answer as a stream, and errors.

What the packages of `openai` and `anthropic` make of them is in `clients`, what holds for the Responses API in `test_conformance.py`.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from support.documented import call, complain, payloads, raw, streamed, validator
from support.serve import Server, server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHAT, MESSAGES, COUNT = "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "what the weather is", "parameters": PARAMETERS, "strict": False}
FUNCTION = {"type": "function", "function": WEATHER}
DRAW = {"type": "custom", "custom": {"name": "draw", "format": {"type": "grammar", "grammar": {"definition": "x"}}}}
OWN = {"name": "weather", "description": "what the weather is", "input_schema": PARAMETERS}
HOSTED = {"type": "web_search_20250305", "name": "web_search"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
EVERYTHING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {"7": -1},
    "seed": 7,
    "cache_salt": "salt",
    "prompt_cache_key": "a key that is long",
    "generation_mode": "ar",
    "mtp_depth": 3,
}
"""What may be said of sampling."""


@dataclass(frozen=True)
class Asked:
    """What is asked for and what the mock's model says to it."""

    path: str
    answer: str
    body: dict[str, Any] = field(default_factory=dict)


ASKED = {
    "chat: text": Asked(CHAT, "A small model keeps warm."),
    "chat: nothing": Asked(CHAT, ""),
    "chat: thoughts": Asked(CHAT, "<think>\nHm, let me see.\n</think>\n\nSo it is."),
    "chat: thoughts, text and calls": Asked(
        CHAT,
        "<think>Hm.</think>I ask." + call("weather", city="Paris") + call("draw", input="a sun") + "There.",
        {"tools": [FUNCTION, DRAW, {"type": "web_search"}], "stream_options": {"include_usage": True}},
    ),
    "chat: a call cut short": Asked(CHAT, call("weather", city="Paris"), {"tools": [FUNCTION], "max_tokens": 60}),
    "chat: cut short": Asked(CHAT, "A small model.", {"max_completion_tokens": 3}),
    "chat: everything": Asked(
        CHAT,
        "Yes.",
        {
            **EVERYTHING,
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
                {"role": "user", "content": "Is it?", "name": "me"},
                {
                    "role": "assistant",
                    "content": [{"type": "refusal", "refusal": "No."}],
                    "reasoning_content": "Hm.",
                    "tool_calls": [
                        {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
                        {"id": "b", "type": "custom", "custom": {"name": "draw", "input": "a sun"}},
                    ],
                },
                {"role": "tool", "tool_call_id": "b", "content": "done"},
                {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "21 C"}]},
            ],
            "tools": [FUNCTION, DRAW],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "weather"}}]},
            },
            "parallel_tool_calls": False,
            "n": 1,
            "logprobs": True,
            "top_logprobs": 2,
            "stop": ["x", "y"],
            "response_format": {"type": "text"},
            "reasoning_effort": "low",
            "verbosity": "low",
            "modalities": ["text"],
            "metadata": {"a": "b", "retention_seconds": 60},
            "user": "me",
            "safety_identifier": "id",
            "store": False,
            "service_tier": "auto",
            "prediction": {"type": "content", "content": "Yes."},
            "web_search_options": {},
        },
    ),
    "messages: text": Asked(MESSAGES, "A small model keeps warm."),
    "messages: nothing": Asked(MESSAGES, ""),
    "messages: thoughts, text and uses": Asked(
        MESSAGES,
        "<think>Hm.</think>I ask." + call("weather", city="Paris") + call("weather", city="Rome") + "There.",
        {"tools": [OWN, HOSTED], "thinking": {"type": "enabled", "budget_tokens": 1024}},
    ),
    "messages: a use cut short": Asked(MESSAGES, call("weather", city="Paris"), {"tools": [OWN], "max_tokens": 60}),
    "messages: cut short": Asked(MESSAGES, "A small model.", {"max_tokens": 3}),
    "messages: a stop sequence": Asked(MESSAGES, "A small model.", {"stop_sequences": ["model"]}),
    "messages: everything": Asked(
        MESSAGES,
        "Yes.",
        {
            **EVERYTHING,
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "document", "title": "a", "source": {"type": "text", "data": "b"}},
                        {
                            "type": "document",
                            "source": {"type": "content", "content": [{"type": "text", "text": "c"}]},
                        },
                        {"type": "search_result", "title": "a", "source": "b", "content": []},
                    ],
                },
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                        {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Paris"}},
                    ],
                },
                {"role": "system", "content": "Go on."},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "a", "is_error": True},
                        {"type": "text", "text": "So?"},
                    ],
                },
            ],
            "tools": [{**OWN, "type": "custom", "strict": True}],
            "tool_choice": {"type": "none", "disable_parallel_tool_use": True},
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "low"},
            "metadata": {"user_id": "me"},
        },
    ),
    "messages: an answer that goes on": Asked(
        MESSAGES,
        "warm.",
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It keeps"}]},
    ),
}


def whole(asked: Asked) -> dict[str, Any]:
    """The body of a request, with what every one must have."""
    least = {} if asked.path == CHAT else {"max_tokens": 1000}
    return {"messages": [{"role": "user", "content": "hi"}], **least, **asked.body}


@dataclass(frozen=True)
class Said:
    """What came of one request, as it was read off the wire: an object, and the data of the same request as a stream."""

    answer: bytes
    stream: list[bytes]


def ask(one: Server, path: str, body: dict[str, Any]) -> Said:
    answer = raw(one, "POST", path, body)
    return Said(answer, payloads(raw(one, "POST", path, {**body, "stream": True})))


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Said]:
    """All of it, asked for once."""
    # Each is asked twice.
    script = [f"--mock-answer={asked.answer}" for asked in ASKED.values() for _ in range(2)]
    with server(*script, home=tmp_path_factory.mktemp("home")) as one:
        return {name: ask(one, asked.path, whole(asked)) for name, asked in ASKED.items()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for what is no answer, and for one that breaks."""
    folder = tmp_path_factory.mktemp("plain")
    script = folder / "script.json"
    rules = [{"says": "break", "answer": "It goes well until", "fault": "fail", "after": 12}, {"answer": "Yes."}]
    script.write_text(json.dumps(rules))
    with server("--max-body", "4096", "--mock-script", str(script), home=folder) as one:
        yield one


@pytest.fixture(scope="module")
def own(plain: Server) -> Any:
    """The server's document."""
    return plain.get("/openapi.json")[1]


def content(own: Any, path: str, status: str = "200") -> Any:
    return own["paths"][path]["post"]["responses"][status]["content"]


def judge(own: Any, path: str, said: Said) -> None:
    """Fails where an answer, or anything of the stream, is not as documented."""
    of = content(own, path)
    complain(validator(own, of["application/json"]["schema"]), said.answer)
    events = said.stream
    if path == CHAT:
        assert events[-1] == b"[DONE]"
        events = events[:-1]
    assert len(events) > 1
    for event in events:
        complain(validator(own, streamed(of)), event)


@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked_is_documented(name: str, own: Any) -> None:
    asked = ASKED[name]
    for path in (MESSAGES, COUNT) if asked.path == MESSAGES else (CHAT,):
        schema = own["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        complain(validator(own, schema), json.dumps(whole(asked)).encode())


@pytest.mark.parametrize("name", ASKED)
def test_what_is_answered_is_documented(name: str, said: dict[str, Said], own: Any) -> None:
    judge(own, ASKED[name].path, said[name])


def test_the_answers_are_those_that_were_meant(said: dict[str, Said]) -> None:
    whole = json.loads(said["chat: thoughts, text and calls"].answer)["choices"][0]
    kinds = [one["type"] for one in whole["message"]["tool_calls"]]
    assert (whole["finish_reason"], kinds) == ("tool_calls", ["function", "custom"])
    chunks = [json.loads(chunk) for chunk in said["chat: thoughts, text and calls"].stream[:-1]]
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    whole = json.loads(said["messages: thoughts, text and uses"].answer)
    kinds = [block["type"] for block in whole["content"]]
    assert (whole["stop_reason"], kinds) == ("tool_use", ["thinking", "text", "tool_use", "tool_use", "text"])
    assert json.loads(said["messages: a stop sequence"].answer)["stop_reason"] == "stop_sequence"
    for name in ("chat: cut short", "chat: a call cut short"):
        assert json.loads(said[name].answer)["choices"][0]["finish_reason"] == "length"
    for name in ("messages: cut short", "messages: a use cut short"):
        assert json.loads(said[name].answer)["stop_reason"] == "max_tokens"


def test_a_count_is_documented(plain: Server, own: Any) -> None:
    counted = raw(plain, "POST", COUNT, {"messages": [{"role": "user", "content": "hi"}]})
    complain(validator(own, content(own, COUNT)["application/json"]["schema"]), counted)
    assert json.loads(counted)["input_tokens"] > 0


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_failure_is_documented_before_and_within_a_stream(path: str, plain: Server, own: Any) -> None:
    body = {"messages": [{"role": "user", "content": "break"}], "max_tokens": 100}
    error = validator(own, content(own, path, "500")["application/json"]["schema"])
    complain(error, raw(plain, "POST", path, body))
    events = payloads(raw(plain, "POST", path, {**body, "stream": True}))
    assert len(events) > 3
    assert "error" in json.loads(events[-1])
    complain(error, events[-1])
    for event in events:
        complain(validator(own, streamed(content(own, path))), event)


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", CHAT, {"messages": "x" * 5000}, 413),
        ("POST", CHAT, {"messages": []}, 400),
        ("POST", CHAT, {"messages": IMAGE}, 400),
        ("POST", CHAT, {"messages": USER, "n": 2}, 400),
        ("POST", CHAT, {"messages": USER, "model": "none"}, 404),
        ("GET", CHAT, None, 405),
        ("POST", MESSAGES, {"messages": USER}, 400),
        ("POST", MESSAGES, {"messages": IMAGE, "max_tokens": 5}, 400),
        ("POST", MESSAGES, {"messages": USER, "max_tokens": 5, "temperature": 1.5}, 400),
        ("POST", MESSAGES, {"messages": USER, "max_tokens": 5, "model": "none"}, 404),
        ("POST", MESSAGES, {"messages": "x" * 5000}, 413),
        ("GET", MESSAGES, None, 405),
        ("POST", COUNT, {}, 400),
        ("POST", COUNT, {"messages": USER, "model": "none"}, 404),
    ],
)
def test_errors_are_documented(plain: Server, own: Any, method: str, path: str, body: object, status: int) -> None:
    connection = plain.connection()
    connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    text = response.read()
    connection.close()
    assert (response.status, response.getheader("content-type")) == (status, "application/json")
    complain(validator(own, content(own, path, str(status))["application/json"]["schema"]), text)


HELD: dict[str, tuple[str, dict[str, Any]]] = {
    "chat: schema": (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
    ),
    "chat: forced call": (
        CHAT,
        {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    ),
    "chat: probabilities": (CHAT, {"logprobs": True, "top_logprobs": 2}),
    "messages: schema": (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    "messages: forced use": (MESSAGES, {"tools": [OWN], "tool_choice": {"type": "tool", "name": "weather"}}),
}
"""What only a real model's engine does: it holds answers to a form, and knows how likely they are."""


@pytest.fixture(scope="module")
def warm(model_home: Path) -> Iterator[Server]:
    """A server of the real model."""
    with server("--model", os.environ.get("EMBERD_TEST_MODEL", "smollm2-135m"), engine="auto", home=model_home) as one:
        yield one


@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", HELD)
def test_what_a_real_model_is_held_to_is_documented(name: str, warm: Server, own: Any) -> None:
    path, body = HELD[name]
    body = {"messages": [{"role": "user", "content": "Name a city."}], "max_tokens": 60, **body}
    schema = own["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    complain(validator(own, schema), json.dumps(body).encode())
    told = ask(warm, path, body)
    judge(own, path, told)
    if name == "chat: probabilities":
        assert json.loads(told.answer)["choices"][0]["logprobs"]["content"]
