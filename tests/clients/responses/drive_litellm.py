"""litellm: its `responses`, and its `completion` that speaks the Responses API to the server."""

from __future__ import annotations

import json
from typing import Any

import litellm
from telling import ASK, MOCK, MODEL, REAL, City, tell, weather

litellm.telemetry = False
litellm.suppress_debug_info = True
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"name": "get_weather", "description": "what the weather is", "parameters": PARAMETERS}


def responses(url: str, said: Any, name: str = MODEL, **more: Any) -> Any:
    return litellm.responses(
        model=f"openai/{name}", input=said, api_base=url, api_key="none", timeout=100, num_retries=0, **more
    )


def completion(url: str, messages: Any, name: str = MODEL, **more: Any) -> Any:
    said = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return litellm.completion(
        model=f"openai/responses/{name}",
        messages=said,
        api_base=url,
        api_key="none",
        timeout=100,
        num_retries=0,
        **more,
    )


def text_of(response: Any) -> str:
    return "".join(part.text for item in response.output if item.type == "message" for part in item.content)


def stream() -> list[str]:
    events = responses(REAL, ASK["capital"], stream=True)
    return [event.delta for event in events if event.type == "response.output_text.delta"]


def bridge() -> str:
    return str(completion(REAL, ASK["capital"]).choices[0].message.content)


def bridge_stream() -> list[str]:
    chunks = completion(REAL, ASK["capital"], stream=True)
    return [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]


def think() -> dict[str, Any]:
    response = responses(MOCK, ASK["think"])
    [thought] = [item for item in response.output if item.type == "reasoning"]
    summary = thought.summary[0]
    return {"thought": summary["text"] if isinstance(summary, dict) else summary.text, "text": text_of(response)}


def tool() -> dict[str, Any]:
    history: list[Any] = [{"role": "user", "content": ASK["weather"]}]
    called = []
    while True:
        response = responses(MOCK, history, tools=[{"type": "function", "strict": True, **TOOL}])
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return {"called": called, "text": text_of(response)}
        history += [item.model_dump() for item in response.output]
        for call in calls:
            called.append(json.loads(call.arguments))
            output = weather(**called[-1])
            history.append({"type": "function_call_output", "call_id": call.call_id, "output": output})


def bridge_tool() -> dict[str, Any]:
    history: list[Any] = [{"role": "user", "content": ASK["weather"]}]
    called = []
    while True:
        message = completion(MOCK, history, tools=[{"type": "function", "function": TOOL}]).choices[0].message
        if not message.tool_calls:
            return {"called": called, "text": message.content}
        history.append(message.model_dump())
        for call in message.tool_calls:
            called.append(json.loads(call.function.arguments))
            history.append({"role": "tool", "tool_call_id": call.id, "content": weather(**called[-1])})


def form() -> dict[str, Any]:
    schema = City.model_json_schema()
    text = {"format": {"type": "json_schema", "name": "city", "schema": schema, "strict": True}}
    return City.model_validate_json(text_of(responses(REAL, ASK["form"], text=text))).model_dump()


tell(
    plain=lambda: text_of(responses(REAL, ASK["capital"])),
    stream=stream,
    bridge=bridge,
    bridge_stream=bridge_stream,
    think=think,
    tool=tool,
    bridge_tool=bridge_tool,
    form=form,
    refused=lambda: text_of(responses(MOCK, "hi", name="nobody")),
    overflow=lambda: text_of(responses(MOCK, ASK["long"])),
    failed=lambda: text_of(responses(MOCK, ASK["fail"])),
)
