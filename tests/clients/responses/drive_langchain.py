"""ChatOpenAI of langchain-openai, over the Responses API."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool as as_tool
from langchain_openai import ChatOpenAI
from telling import ASK, MOCK, MODEL, REAL, City, tell, weather


def chat(url: str, name: str = MODEL, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=name,
        base_url=url,
        api_key="none",
        use_responses_api=True,
        output_version="responses/v1",
        max_retries=0,
        timeout=100,
        **more,
    )


@as_tool
def get_weather(city: str) -> str:
    """What the weather is."""
    return weather(city)


def think() -> dict[str, Any]:
    message = chat(MOCK, reasoning={"effort": "low", "summary": "auto"}).invoke(ASK["think"])
    [thought] = [block for block in message.content_blocks if block["type"] == "reasoning"]
    return {"thought": thought["reasoning"], "text": message.text}


def tool(streamed: bool) -> dict[str, Any]:
    bound = chat(MOCK).bind_tools([get_weather])
    history: list[Any] = [HumanMessage(ASK["weather"])]
    called = []
    while True:
        if streamed:
            chunks = list(bound.stream(history))
            whole = chunks[0]
            for chunk in chunks[1:]:
                whole += chunk
            message = AIMessage(content=whole.content, tool_calls=whole.tool_calls)
        else:
            message = bound.invoke(history)
        if not message.tool_calls:
            return {"called": called, "text": message.text}
        history.append(message)
        for call in message.tool_calls:
            called.append(call["args"])
            history.append(ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]))


def form() -> dict[str, Any]:
    found = chat(REAL).with_structured_output(City, strict=True).invoke(ASK["form"])
    assert isinstance(found, City)
    return found.model_dump()


tell(
    plain=lambda: chat(REAL).invoke(ASK["capital"]).text,
    stream=lambda: [chunk.text for chunk in chat(REAL).stream(ASK["capital"]) if chunk.text],
    think=think,
    tool=lambda: tool(streamed=False),
    tool_stream=lambda: tool(streamed=True),
    form=form,
    refused=lambda: chat(MOCK, "nobody").invoke("hi").text,
    overflow=lambda: chat(MOCK).invoke(ASK["long"]).text,
    failed=lambda: [chunk.text for chunk in chat(MOCK).stream(ASK["fail"])],
)
