"""Everything that a stream and an object must be, over the real model and a mock that thinks and calls: no field but as documented, no event out of turn.

What needs stored responses is not asked for here.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from support.lifecycle import checked, strictly
from support.serve import server, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.serve import Server

pytestmark = [pytest.mark.clients, pytest.mark.model, pytest.mark.timeout(900)]

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"location": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["location", "days"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "rivers": {"type": "integer", "maximum": 99}},
    "required": ["name", "rivers"],
    "additionalProperties": False,
}
FORM: dict[str, Any] = {"format": {"type": "json_schema", "name": "city", "strict": True, "schema": CITY}}
CALL = "<tool_call>\n{}\n</tool_call>"


@pytest.fixture(scope="module")
def real(model_home: Path) -> Iterator[Server]:
    """A server with the real model."""
    with server("--model", os.environ.get("EMBERD_TEST_MODEL", "smollm2-135m"), engine="auto", home=model_home) as one:
        yield one


def test_an_object_is_as_documented(real: Server) -> None:
    status, response = real.post({"input": "Say hi"})
    assert (status, strictly(response)["status"]) == (200, "completed")


def test_a_stream_of_text_keeps_every_rule(real: Server) -> None:
    with real.stream({"input": "Count from 1 to 5"}) as stream:
        assert checked(stream)["status"] == "completed"
    with real.stream({"input": "Count from 1 to 5", "max_output_tokens": 3}) as stream:
        assert checked(stream)["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_call_that_is_asked_for_keeps_every_rule_and_is_answered(real: Server, choice: Any) -> None:
    user = {"role": "user", "content": "Weather in Paris? Use the tool."}
    body = {"input": [user], "tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    with real.stream(body) as stream:
        first = checked(stream)
    [call] = first["output"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "get_weather", "completed")
    jsonschema.validate(json.loads(call["arguments"]), PARAMETERS)
    outputs: list[Any] = ["21 C", [{"type": "input_text", "text": "21 C"}]]
    for output in outputs:
        replayed = [user, call, {"type": "function_call_output", "call_id": call["call_id"], "output": output}]
        again = {"store": False, "tools": [WEATHER], "input": replayed, "max_output_tokens": 40}
        with real.stream(again) as stream:
            assert checked(stream)["output"]


def test_a_form_keeps_every_rule(real: Server) -> None:
    with real.stream({"input": "Describe a city as JSON.", "text": FORM, "max_output_tokens": 200}) as stream:
        response = checked(stream)
    jsonschema.validate(json.loads(text_of(response)), CITY)


def test_log_probabilities_keep_every_rule(real: Server) -> None:
    body = {"input": "Say hi", "max_output_tokens": 4, "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    with real.stream(body) as stream:
        response = checked(stream)
    [part] = response["output"][0]["content"]
    assert "".join(each["token"] for each in part["logprobs"]) == part["text"]


@pytest.mark.parametrize("form", ["summary", "text"])
def test_thoughts_words_and_calls_of_every_kind_keep_every_rule(form: str, tmp_path: Path, home: Path) -> None:
    calls = [
        {"name": "get_weather", "arguments": {"location": "Paris", "days": 1}},
        {"name": "agents__close", "arguments": {}},
        {"name": "draw", "arguments": {"input": "a sun\nand a cloud"}},
    ]
    spoken = "\n".join(CALL.format(json.dumps(call)) for call in calls)
    answers = {
        "thinks": f"<think>\nHm.\n</think>\n\nI ask.\n\n{spoken}",
        "calls": spoken,
        "only thinks": "<think>\nHm.",
        "says nothing": "",
        "breaks off": spoken,
        "is cut": spoken,
    }
    rules = [{"says": f"It {what}.", "answer": answer} for what, answer in answers.items()]
    rules[4] |= {"fault": "fail", "after": 60}
    script = tmp_path / "script.json"
    script.write_text(json.dumps(rules))
    tools = [
        {**WEATHER, "strict": False},
        {"type": "custom", "name": "draw"},
        {"type": "namespace", "name": "agents", "description": "", "tools": [{"type": "function", "name": "close"}]},
        {"type": "web_search", "external_web_access": False},
    ]
    kinds: dict[str, tuple[str, list[str]]] = {
        "thinks": ("completed", ["reasoning", "message", "function_call", "function_call", "custom_tool_call"]),
        "calls": ("completed", ["function_call", "function_call", "custom_tool_call"]),
        "only thinks": ("completed", ["reasoning"]),
        "says nothing": ("completed", ["message"]),
        "breaks off": ("failed", ["function_call"]),
        "is cut": ("incomplete", ["function_call"]),
    }
    with server("--mock-script", script, "--reasoning-events", form, home=home) as one:
        for what, (status, expected) in kinds.items():
            body: dict[str, Any] = {"input": f"It {what}.", "tools": tools}
            if what == "is cut":
                body["max_output_tokens"] = 70
            with one.stream(body) as stream:
                response = checked(stream)
            assert response["status"] == status, what
            found = [item["type"] for item in response["output"]]
            assert found == expected or (what == "says nothing" and found == []), what


def test_every_refusal_is_in_the_envelope_and_leaves_the_connection_usable(real: Server) -> None:
    wibble = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "wibble"}}}
    bodies: list[tuple[bytes, str]] = [
        (b'{"model":', "invalid_json"),
        (json.dumps({"input": 5}).encode(), "invalid_type"),
        (json.dumps({"input": "x", "text": wibble}).encode(), "invalid_value"),
        (json.dumps({"input": "x", "temperature": 3}).encode(), "invalid_value"),
        (json.dumps({"input": [{"type": "nothing"}]}).encode(), "invalid_value"),
    ]
    connection = real.connection()
    for body, code in bodies:
        connection.request("POST", "/v1/responses", body, {"content-type": "application/json"})
        response = connection.getresponse()
        error = json.loads(response.read())["error"]
        assert response.status == 400
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["code"], error["type"]) == (code, "invalid_request_error")
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()
