"""The openai package, told to take nothing that is not as documented."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
from telling import ASK, MOCK, MODEL, REAL, City, tell, weather

OPTIONS: dict[str, Any] = {
    "api_key": "none",
    "max_retries": 0,
    "timeout": 100,
    "_strict_response_validation": True,
}
mock = openai.OpenAI(base_url=MOCK, **OPTIONS)
real = openai.OpenAI(base_url=REAL, **OPTIONS)
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "what the weather is",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


def plain() -> str:
    return real.responses.create(model=MODEL, input=ASK["capital"]).output_text


def stream() -> list[str]:
    events = real.responses.create(model=MODEL, input=ASK["capital"], stream=True)
    return [event.delta for event in events if event.type == "response.output_text.delta"]


def helper() -> dict[str, Any]:
    with real.responses.stream(model=MODEL, input=ASK["capital"]) as events:
        kinds = [event.type for event in events]
        return {"first": kinds[0], "last": kinds[-1], "text": events.get_final_response().output_text}


def think() -> dict[str, Any]:
    response = mock.responses.create(model=MODEL, input=ASK["think"])
    [thought] = [item for item in response.output if item.type == "reasoning"]
    return {"thought": thought.summary[0].text, "text": response.output_text}


def tool(streamed: bool) -> dict[str, Any]:
    history: list[Any] = [{"role": "user", "content": ASK["weather"]}]
    called = []
    while True:
        if streamed:
            with mock.responses.stream(model=MODEL, input=history, tools=[TOOL]) as events:
                for _ in events:
                    pass
                response = events.get_final_response()
        else:
            response = mock.responses.create(model=MODEL, input=history, tools=[TOOL])
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return {"called": called, "text": response.output_text}
        # The helper adds what it has parsed; what is sent is what the server said.
        history += [item.model_dump(exclude={"parsed_arguments"}) for item in response.output]
        for call in calls:
            called.append(json.loads(call.arguments))
            output = weather(**called[-1])
            history.append({"type": "function_call_output", "call_id": call.call_id, "output": output})


def form() -> dict[str, Any]:
    parsed = real.responses.parse(model=MODEL, input=ASK["form"], text_format=City).output_parsed
    assert parsed is not None
    return parsed.model_dump()


def refused() -> None:
    mock.responses.create(model="nobody", input="hi")


def overflow() -> None:
    mock.responses.create(model=MODEL, input=ASK["long"], stream=True)


def failed() -> dict[str, Any]:
    events = list(mock.responses.create(model=MODEL, input=ASK["fail"], stream=True))
    last = events[-1]
    assert last.type == "response.failed", last
    assert last.response.error is not None
    return {"code": last.response.error.code, "says": last.response.error.message, "text": last.response.output_text}


def cut() -> dict[str, Any]:
    response = mock.responses.create(model=MODEL, input=ASK["endless"], max_output_tokens=9)
    assert response.incomplete_details is not None
    return {"status": response.status, "reason": response.incomplete_details.reason, "text": response.output_text}


def left() -> str:
    # A stream that is stuck is left; the next request is answered.
    with mock.responses.create(model=MODEL, input=ASK["stall"], stream=True) as events:
        for event in events:
            if event.type == "response.output_text.delta":
                break
    return mock.responses.create(model=MODEL, input=ASK["think"]).output_text


def together() -> list[str]:
    async def both() -> list[str]:
        async with openai.AsyncOpenAI(base_url=REAL, **OPTIONS) as client:
            asked = [client.responses.create(model=MODEL, input=ASK["capital"]) for _ in range(3)]
            return [response.output_text for response in await asyncio.gather(*asked)]

    return asyncio.run(both())


tell(
    plain=plain,
    stream=stream,
    helper=helper,
    think=think,
    tool=lambda: tool(streamed=False),
    tool_stream=lambda: tool(streamed=True),
    form=form,
    refused=refused,
    overflow=overflow,
    failed=failed,
    cut=cut,
    left=left,
    together=together,
    models=lambda: [model.id for model in mock.models.list()],
    counted=lambda: mock.responses.input_tokens.count(model=MODEL, input="hi").input_tokens,
)
