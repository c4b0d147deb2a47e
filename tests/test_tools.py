"""Tools and thoughts through the openai package, which is told to take nothing that is not as documented; the mock engine answers from a script."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from support.serve import Server, server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "weather",
        "description": "what the weather is",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": False,
    },
    {"type": "custom", "name": "draw", "description": "draws what it is told"},
    {"type": "web_search", "external_web_access": False},
    {
        "type": "namespace",
        "name": "agents",
        "description": "other agents",
        "tools": [{"type": "function", "name": "close", "parameters": {"type": "object", "properties": {}}}],
    },
]


def call(name: str, **arguments: object) -> str:
    """A call as the mock's model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@contextmanager
def scripted(home: Path, *answers: str, options: tuple[str, ...] = ()) -> Iterator[tuple[Server, openai.OpenAI]]:
    """A server that gives these answers in order, and a client of it."""
    script = [f"--mock-answer={answer}" for answer in answers]
    with (
        server(*script, *options, home=home) as one,
        openai.OpenAI(
            base_url=f"{one.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
        ) as client,
    ):
        yield one, client


def ask(client: openai.OpenAI, stream: bool, **body: Any) -> Response:
    """The response, whichever way it comes."""
    if not stream:
        return client.responses.create(model="smollm2-135m", **body)
    with client.responses.stream(model="smollm2-135m", **body) as events:
        for _ in events:
            pass
        return events.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_with_a_tool_goes_round(home: Path, stream: bool) -> None:
    thought = "<think>\nI need the weather.\n</think>\n\nLet me look.\n\n"
    calls = "\n".join(
        [call("weather", city="Paris"), call("draw", input="a sun\nand a cloud"), call("agents__close", agent="one")]
    )
    with scripted(home, thought + calls, "It is sunny.") as (_, client):
        user = {"role": "user", "content": "How is the weather in Paris?"}
        first = ask(client, stream, input=[user], tools=TOOLS)
        kinds = [item.type for item in first.output]
        assert kinds == ["reasoning", "message", "function_call", "custom_tool_call", "function_call"]
        assert first.output_text == "Let me look."
        outputs: list[Any] = []
        for item in first.output:
            if item.type == "reasoning":
                assert [part.text for part in item.summary] == ["I need the weather."]
            if item.type == "function_call":
                known = {
                    ("weather", None): {"city": "Paris"},
                    ("close", "agents"): {"agent": "one"},
                }
                assert json.loads(item.arguments) == known[item.name, item.namespace]
                outputs.append({"type": "function_call_output", "call_id": item.call_id, "output": "21 degrees"})
            if item.type == "custom_tool_call":
                assert (item.name, item.input) == ("draw", "a sun\nand a cloud")
                outputs.insert(
                    0,
                    {
                        "type": "custom_tool_call_output",
                        "call_id": item.call_id,
                        "output": [{"type": "input_text", "text": "drawn"}],
                    },
                )
        assert first.usage is not None
        assert first.usage.output_tokens_details.reasoning_tokens > 0
        history = [user, *(item.model_dump() for item in first.output), *outputs]
        second = ask(client, stream, input=history, tools=TOOLS)
        assert [item.type for item in second.output] == ["message"]
        assert second.output_text == "It is sunny."


@pytest.mark.parametrize("form", ["summary", "text"])
def test_every_event_is_as_documented_and_in_order(home: Path, form: str) -> None:
    answer = f"<think>Hm.</think>I ask.{call('weather', city='Paris')}{call('draw', input='x')}And more."
    with scripted(home, answer, options=("--reasoning-events", form)) as (one, _):
        with one.stream({"input": "hi", "tools": TOOLS}) as stream:
            events = [event for _, event in stream]
            assert stream.done
        for number, event in enumerate(events):
            EVENT.validate_python(event)
            assert event["sequence_number"] == number
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        added = [event for event in events if event["type"] == "response.output_item.added"]
        assert [event["output_index"] for event in added] == list(range(len(done)))
        assert [event["item"]["id"] for event in added] == [item["id"] for item in done]
        last = events[-1]["response"]
        assert last["output"] == done
        Response.model_validate(last)
        kinds = ["reasoning", "message", "function_call", "custom_tool_call", "message"]
        assert [item["type"] for item in done] == kinds


def test_outputs_that_do_not_match_their_calls_are_refused_by_name(home: Path) -> None:
    with scripted(home, "hi") as (_, client):
        for item in [
            {"type": "function_call_output", "call_id": "call_none", "output": "x"},
            {"type": "function_call", "call_id": "call_none", "name": "weather", "arguments": "{}"},
        ]:
            with pytest.raises(openai.BadRequestError, match="call_none") as refused:
                ask(client, False, input=[{"role": "user", "content": "hi"}, item])
            assert refused.value.code == "invalid_value"
        with pytest.raises(openai.BadRequestError) as forced:
            ask(client, False, input="hi", tools=TOOLS, tool_choice="required")
        assert (forced.value.code, forced.value.param) == ("unsupported_parameter", "tool_choice")


def test_sealed_thoughts_outlive_the_server_and_open_nowhere_else(home: Path, tmp_path: Path) -> None:
    def turn(where: Path, *before: Any) -> Response:
        with scripted(where, "<think>Hm.</think>Four.") as (_, client):
            user: Any = {"role": "user", "content": "2 + 2?"}
            return client.responses.create(
                model="smollm2-135m", input=[user, *before], include=["reasoning.encrypted_content"], store=False
            )

    first = turn(home)
    [thought, _] = first.output
    assert thought.type == "reasoning"
    assert thought.encrypted_content
    assert (home / "seal.key").stat().st_mode & 0o777 == 0o600
    history = [
        *(item.model_dump(exclude_none=True) for item in first.output),
        {"role": "user", "content": "And 3 + 3?"},
    ]
    assert turn(home, *history).status == "completed"
    with pytest.raises(openai.BadRequestError) as refused:
        turn(tmp_path / "other", *history)
    assert (refused.value.code, refused.value.param) == ("invalid_encrypted_content", "input[1].encrypted_content")
