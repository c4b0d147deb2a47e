"""Chat Completions through the openai package, which is told to take nothing that is not as documented: the mock engine from a script, and the real model."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, TypeAdapter

from support.serve import Server, server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHUNK: TypeAdapter[Any] = TypeAdapter(ChatCompletionChunk)
MODEL = os.environ.get("EMBERD_TEST_MODEL", "smollm2-135m")


class Weather(BaseModel):
    """what the weather is"""

    city: str


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "what the weather is",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def call(name: str, **arguments: object) -> str:
    """A call as the mock's model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@contextmanager
def client_of(one: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{one.url}/v1", api_key="none", max_retries=0, timeout=120, _strict_response_validation=True
    ) as client:
        yield client


@contextmanager
def scripted(home: Path, *answers: str) -> Iterator[tuple[Server, openai.OpenAI]]:
    """A server that gives these answers in order, and a client of it."""
    with server(*(f"--mock-answer={answer}" for answer in answers), home=home) as one, client_of(one) as client:
        yield one, client


@contextmanager
def held(home: Path, answer: str) -> Iterator[openai.OpenAI]:
    """A client of a server that gives this answer, and holds it to the tools that are strict."""
    home.mkdir(exist_ok=True)
    script = home / "script.json"
    script.write_text(json.dumps([{"answer": answer}]))
    with server("--mock-script", str(script), home=home) as one, client_of(one) as client:
        yield client


def ask(client: openai.OpenAI, stream: bool, **body: Any) -> ChatCompletion:
    """The completion, whichever way it comes."""
    if not stream:
        return client.chat.completions.create(model="smollm2-135m", **body)
    with client.chat.completions.stream(model="smollm2-135m", **body) as events:
        for _ in events:
            pass
        return events.get_final_completion()


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_with_a_tool_goes_round(home: Path, stream: bool) -> None:
    answer = "<think>\nI need the weather.\n</think>\n\nLet me look.\n\n" + "\n".join(
        [call("weather", city="Paris"), call("weather", city="Rome")]
    )
    with scripted(home, answer, "It is sunny.") as (_, client):
        history: list[Any] = [{"role": "user", "content": "How is the weather in Paris and Rome?"}]
        first = ask(client, stream, messages=history, tools=TOOLS)
        [choice] = first.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
        # The package has no name for it, and keeps it.
        assert choice.message.model_extra == {"reasoning_content": "I need the weather."}
        assert choice.message.tool_calls is not None
        cities = []
        history.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
        for one in reversed(choice.message.tool_calls):
            assert one.type == "function"
            cities.append(json.loads(one.function.arguments)["city"])
            history.append({"role": "tool", "tool_call_id": one.id, "content": "21 degrees"})
        assert cities == ["Rome", "Paris"]
        second = ask(client, stream, messages=history, tools=TOOLS)
        assert second.choices[0].message.content == "It is sunny."
        assert second.choices[0].finish_reason == "stop"
        assert not second.choices[0].message.tool_calls


def test_the_streaming_helper_tells_the_arguments_as_they_come(home: Path) -> None:
    with (
        held(home, "I ask." + call("Weather", city="Paris")) as client,
        client.chat.completions.stream(
            model="smollm2-135m",
            messages=[{"role": "user", "content": "hi"}],
            tools=[openai.pydantic_function_tool(Weather)],
            stream_options={"include_usage": True},
        ) as events,
    ):
        told = list(events)
        final = events.get_final_completion()
    kinds = [event.type for event in told]
    assert kinds.count("tool_calls.function.arguments.delta") > 3
    assert kinds.count("tool_calls.function.arguments.done") == 1
    assert kinds.count("content.done") == 1
    assert "".join(event.delta for event in told if event.type == "content.delta") == "I ask."
    assert final.choices[0].message.tool_calls is not None
    assert final.choices[0].message.tool_calls[0].function.parsed_arguments == Weather(city="Paris")
    assert final.usage is not None
    assert final.usage.prompt_tokens + final.usage.completion_tokens == final.usage.total_tokens > 0


def test_parse_gives_the_arguments_of_a_call_as_what_they_are(home: Path) -> None:
    with held(home, call("Weather", city="Paris")) as client:
        completion = client.chat.completions.parse(
            model="smollm2-135m",
            messages=[{"role": "user", "content": "hi"}],
            tools=[openai.pydantic_function_tool(Weather)],
        )
        assert completion.choices[0].message.content is None
        assert completion.choices[0].message.tool_calls is not None
        assert completion.choices[0].message.tool_calls[0].function.parsed_arguments == Weather(city="Paris")


def test_every_chunk_is_as_documented(home: Path) -> None:
    answer = f"<think>Hm.</think>I ask.{call('weather', city='Paris')}And more."
    with scripted(home, answer) as (one, _):
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": TOOLS,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = one.connection()
        try:
            connection.request(
                "POST", "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            response = connection.getresponse()
            assert (response.status, response.getheader("content-type")) == (200, "text/event-stream")
            blocks = response.read().decode().split("\n\n")
        finally:
            connection.close()
        assert blocks[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
        for chunk in chunks:
            CHUNK.validate_python(chunk, strict=True)
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
        assert [chunk["usage"] is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
        ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        assert ends == [None] * (len(ends) - 1) + ["tool_calls"]


def test_what_is_wrong_is_an_error_of_the_package(home: Path) -> None:
    with scripted(home, "hi") as (_, client):
        create: Any = client.chat.completions.create
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
        for body, code, param in [
            ({"messages": []}, "invalid_value", "messages"),
            (
                {"messages": [{"role": "user", "content": [image]}]},
                "unsupported_parameter",
                "messages[0].content[0].type",
            ),
            (
                {"messages": [{"role": "tool", "tool_call_id": "x", "content": ""}]},
                "invalid_value",
                "messages[0].tool_call_id",
            ),
            ({"n": 2}, "unsupported_parameter", "n"),
            ({"tools": TOOLS, "tool_choice": "required"}, "unsupported_parameter", "tool_choice"),
            ({"functions": [{"name": "f"}]}, "unsupported_parameter", "functions"),
        ]:
            for stream in [False, True]:
                with pytest.raises(openai.BadRequestError) as refused:
                    create(
                        **{
                            "model": "smollm2-135m",
                            "messages": [{"role": "user", "content": "hi"}],
                            "stream": stream,
                            **body,
                        }
                    )
                assert (refused.value.code, refused.value.param) == (code, param)
        with pytest.raises(openai.NotFoundError):
            create(model="other", messages=[{"role": "user", "content": "hi"}])


def test_an_asynchronous_client_that_leaves_lets_others_in(home: Path) -> None:
    async def run(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": "hi"}]
            stream = await client.chat.completions.create(model="smollm2-135m", messages=messages, stream=True)
            async for _ in stream:
                break
            await stream.close()
            answers = [
                client.chat.completions.create(model="smollm2-135m", messages=messages, max_tokens=2) for _ in range(4)
            ]
            return [each.choices[0].message.content or "" for each in await asyncio.gather(*answers)]

    with server(home=home) as one:
        assert asyncio.run(run(one.url)) == [" a small"] * 4


class Film(BaseModel):
    title: str
    year: int


@pytest.fixture(scope="module")
def real_one(model_home: Path) -> Iterator[Server]:
    """A server of the real model for all tests here."""
    with server("--model", MODEL, engine="auto", home=model_home) as ready:
        yield ready


@pytest.mark.model
@pytest.mark.timeout(600)
class TestRealModel:
    """The real model, asked in both forms."""

    def test_both_forms_say_what_the_responses_api_says(self, real_one: Server) -> None:
        question = "What is the capital of France?"
        with client_of(real_one) as client:
            body: dict[str, Any] = {
                "model": "smollm2-135m",
                "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}],
                "temperature": 0,
                "max_completion_tokens": 24,
                "logprobs": True,
                "top_logprobs": 2,
            }
            whole = client.chat.completions.create(**body)
            [choice] = whole.choices
            assert choice.message.content is not None
            assert "Paris" in choice.message.content
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            assert "".join(each.token for each in choice.logprobs.content) == choice.message.content
            assert all(len(each.top_logprobs) == 2 for each in choice.logprobs.content)
            with client.chat.completions.stream(**body, stream_options={"include_usage": True}) as events:
                final = events.until_done().get_final_completion()
            assert final.choices[0].message.content == choice.message.content
            assert final.choices[0].finish_reason == choice.finish_reason
            assert final.choices[0].logprobs is not None
            assert final.choices[0].logprobs.content is not None
            assert [each.token for each in final.choices[0].logprobs.content] == [
                each.token for each in choice.logprobs.content
            ]
            assert final.usage is not None
            assert whole.usage is not None
            assert final.usage.prompt_tokens == whole.usage.prompt_tokens
            assert final.usage.completion_tokens == whole.usage.completion_tokens
            # The prompt has been read before, all but its last token.
            assert final.usage.prompt_tokens_details is not None
            assert (final.usage.prompt_tokens_details.cached_tokens or 0) > 0
            response = client.responses.create(
                model="smollm2-135m", instructions="Be brief.", input=question, temperature=0, max_output_tokens=24
            )
            assert response.output_text == choice.message.content
            assert response.usage is not None
            assert response.usage.input_tokens == whole.usage.prompt_tokens

    def test_a_form_is_kept_to_and_parsed(self, real_one: Server) -> None:
        with client_of(real_one) as client:
            body: dict[str, Any] = {
                "model": "smollm2-135m",
                "messages": [{"role": "user", "content": "Name a film as JSON, with its title and year."}],
                "response_format": Film,
                "temperature": 0,
                "max_tokens": 200,
            }
            whole = client.chat.completions.parse(**body)
            assert isinstance(whole.choices[0].message.parsed, Film)
            with client.chat.completions.stream(**body) as events:
                final = events.until_done().get_final_completion()
            assert final.choices[0].message.parsed == whole.choices[0].message.parsed
            with pytest.raises(openai.LengthFinishReasonError):
                client.chat.completions.parse(**{**body, "max_tokens": 3})
            with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
                bad = {"name": "bad", "strict": True, "schema": {"type": "array", "uniqueItems": True}}
                client.chat.completions.create(
                    model="smollm2-135m",
                    messages=[{"role": "user", "content": "hi"}],
                    response_format={"type": "json_schema", "json_schema": bad},  # type: ignore[typeddict-item]
                )
            assert refused.value.param == "response_format.json_schema.schema"

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_call_that_has_to_be_made_is_made(self, real_one: Server, stream: bool) -> None:
        with client_of(real_one) as client:
            for choice in ["required", {"type": "function", "function": {"name": "Weather"}}]:
                completion = ask(
                    client,
                    stream,
                    messages=[{"role": "user", "content": "How is the weather in Paris?"}],
                    tools=[openai.pydantic_function_tool(Weather)],
                    tool_choice=choice,
                    parallel_tool_calls=False,
                    temperature=0,
                    max_tokens=100,
                )
                assert completion.choices[0].finish_reason == "tool_calls"
                assert completion.choices[0].message.tool_calls is not None
                [made] = completion.choices[0].message.tool_calls
                assert made.type == "function"
                Weather.model_validate_json(made.function.arguments)
