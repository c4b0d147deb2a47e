"""The Messages API through the anthropic package, which is told to take nothing that is not as documented: with the mock engine, which answers from a script, and
with the real model."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anthropic
import pytest

from support.serve import Server, server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from anthropic.types import Message

MODEL = os.environ.get("EMBERD_TEST_MODEL", "smollm2-135m")

TOOLS: list[Any] = [
    {
        "name": "weather",
        "description": "what the weather is",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
    {"type": "web_search_20250305", "name": "web_search"},
]
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0}
"""The package knows no temperatures any more."""
CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def call(name: str, **arguments: object) -> str:
    """A call as the mock's model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@contextmanager
def client_of(one: Server) -> Iterator[anthropic.Anthropic]:
    """A client that believes nothing."""
    with anthropic.Anthropic(
        base_url=one.url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


@contextmanager
def scripted(home: Path, *answers: str, options: tuple[str, ...] = ()) -> Iterator[anthropic.Anthropic]:
    """A client of a server that gives these answers in order."""
    script = [f"--mock-answer={answer}" for answer in answers]
    with server(*script, *options, home=home) as one, client_of(one) as client:
        yield client


@pytest.fixture(scope="module")
def model(model_home: Path) -> Iterator[anthropic.Anthropic]:
    """A client of a server with the real model."""
    with server("--model", MODEL, engine="auto", home=model_home) as one, client_of(one) as client:
        yield client


def ask(client: anthropic.Anthropic, stream: bool, **body: Any) -> Message:
    """The message, whichever way it comes."""
    body = {"model": "smollm2-135m", "max_tokens": 1000, "messages": HELLO, **body}
    if not stream:
        message: Message = client.messages.create(**body)
        return message
    with client.messages.stream(**body) as events:
        for _ in events:
            pass
        return events.get_final_message()


def said(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_with_a_tool_goes_round(home: Path, stream: bool) -> None:
    answer = f"<think>\nI need it.\n</think>\n\nLet me look.\n\n{call('weather', city='Paris')}"
    with scripted(home, answer, "It is sunny.") as client:
        user = {"role": "user", "content": "How is the weather in Paris?"}
        first = ask(client, stream, messages=[user], tools=TOOLS, thinking={"type": "enabled", "budget_tokens": 1024})
        thinking, words, use = first.content
        assert thinking.type == "thinking"
        assert (thinking.thinking, bool(thinking.signature)) == ("I need it.", True)
        assert said(first) == "Let me look."
        assert words.type == "text"
        assert use.type == "tool_use"
        assert use.id.startswith("toolu_")
        assert (use.name, use.input, first.stop_reason) == ("weather", {"city": "Paris"}, "tool_use")
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "21 degrees"}
        history = [user, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = ask(client, stream, messages=history, tools=TOOLS)
        assert (said(second), second.stop_reason) == ("It is sunny.", "end_turn")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_and_a_limit_end_an_answer(home: Path, stream: bool) -> None:
    with scripted(home, "one two three") as client:
        stopped = ask(client, stream, stop_sequences=["three", "wo"])
        assert (said(stopped), stopped.stop_reason, stopped.stop_sequence) == ("one t", "stop_sequence", "wo")
        cut = ask(client, stream, max_tokens=3)
        assert (said(cut), cut.stop_reason, cut.usage.output_tokens) == ("one", "max_tokens", 3)


def test_a_stream_says_what_a_message_says(home: Path) -> None:
    answer = f"<think>Hm.</think>I ask.{call('weather', city='Paris')}And more."
    with scripted(home, answer) as client:
        messages = [ask(client, stream, tools=TOOLS) for stream in (False, True)]
        [whole, streamed] = [message.model_dump(exclude={"id"}) for message in messages]
        for block in [*whole["content"], *streamed["content"]]:
            block.pop("id", None)
            block.pop("signature", None)
            block.pop("parsed_output", None)
        assert streamed == whole
        assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "text"]
        kinds = [
            event.type
            for event in client.messages.create(
                model="smollm2-135m", max_tokens=1000, messages=HELLO, tools=TOOLS, stream=True
            )
        ]
        assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4


def test_errors_are_those_of_the_package(home: Path) -> None:
    with scripted(home, "hi", options=("--context", "256")) as client:
        with pytest.raises(anthropic.NotFoundError, match="claude"):
            ask(client, False, model="claude-nothing")
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
        with pytest.raises(anthropic.BadRequestError, match="image") as refused:
            ask(client, False, messages=[{"role": "user", "content": [image]}])
        body: Any = refused.value.body
        assert body["error"]["type"] == "invalid_request_error"
        assert body["request_id"] == refused.value.request_id
        for stream in (False, True):
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                ask(client, stream, messages=[{"role": "user", "content": "x" * 1000}])
        with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
            ask(client, False, tools=TOOLS, tool_choice={"type": "any"})


def test_a_stream_that_fails_raises(home: Path, slow: dict[str, str]) -> None:
    with server("--grace", "0", engine="echo", home=home, **slow) as one, client_of(one) as client:
        events = iter(client.messages.create(model="smollm2-135m", max_tokens=8000, messages=HELLO, stream=True))
        assert next(events).type == "message_start"
        one.process.signal(15)
        with pytest.raises(anthropic.APIStatusError, match="going away"):
            for _ in events:
                pass


def test_an_answer_goes_on_from_a_last_message_of_the_assistants(home: Path) -> None:
    # The echo engine says the prompt again, up to where the answer began.
    with server(engine="echo", home=home) as one, client_of(one) as client:
        last: Any = {"role": "assistant", "content": "It is ("}
        tokens = client.messages.count_tokens(model="smollm2-135m", messages=[*HELLO, last]).input_tokens
        message = ask(client, False, messages=[*HELLO, last], max_tokens=tokens)
        assert said(message).endswith("assistant\nIt is (")
        assert message.usage.input_tokens == tokens


# With the real model.


@pytest.mark.model
def test_the_real_model_answers_in_both_forms(model: anthropic.Anthropic) -> None:
    answers = [ask(model, stream, messages=CAPITAL, max_tokens=40, extra_body=GREEDY) for stream in (False, True)]
    assert "Paris" in said(answers[0])
    assert said(answers[0]) == said(answers[1])
    assert answers[0].stop_reason == answers[1].stop_reason
    with model.messages.stream(model=MODEL, max_tokens=40, messages=CAPITAL, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == said(answers[0])


@pytest.mark.model
def test_the_real_model_reads_as_many_tokens_as_are_counted(model: anthropic.Anthropic) -> None:
    asked: Any = {"system": "Answer in one word.", "messages": CAPITAL, "tools": TOOLS}
    counted = model.messages.count_tokens(model=MODEL, **asked).input_tokens
    for stream in (False, True):
        usage = ask(model, stream, max_tokens=4, **asked).usage
        assert usage.cache_read_input_tokens is not None
        assert usage.input_tokens + usage.cache_read_input_tokens == counted
    # What has been read once is not read again.
    assert usage.cache_read_input_tokens > 0


@pytest.mark.model
def test_the_real_model_goes_on_from_what_it_is_given(model: anthropic.Anthropic) -> None:
    messages = [*CAPITAL, {"role": "assistant", "content": "The capital of France is"}]
    assert said(ask(model, False, messages=messages, max_tokens=5, extra_body=GREEDY)).startswith(" Paris")


@pytest.mark.model
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_the_real_model_uses_a_tool_when_it_has_to(model: anthropic.Anthropic, choice: Any) -> None:
    choice["disable_parallel_tool_use"] = True
    for stream in (False, True):
        message = ask(model, stream, messages=CAPITAL, tools=TOOLS, tool_choice=choice, max_tokens=200)
        [use] = message.content
        assert use.type == "tool_use"
        assert (use.name, message.stop_reason) == ("weather", "tool_use")
        assert isinstance(use.input["city"], str)
