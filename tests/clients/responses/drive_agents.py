"""The openai-agents package."""

from __future__ import annotations

import asyncio
from typing import Any

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from openai.types.shared import Reasoning
from telling import ASK, MOCK, MODEL, REAL, City, tell, weather

set_tracing_disabled(True)
CALLED: list[dict[str, str]] = []


def model(url: str, name: str = MODEL) -> OpenAIResponsesModel:
    return OpenAIResponsesModel(
        model=name, openai_client=AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=100)
    )


@function_tool
def get_weather(city: str) -> str:
    """What the weather is."""
    CALLED.append({"city": city})
    return weather(city)


def run(agent: Agent[Any], text: str) -> Any:
    return asyncio.run(Runner.run(agent, text))


def plain() -> str:
    return str(run(Agent(name="one", instructions="Answer.", model=model(REAL)), ASK["capital"]).final_output)


async def streamed(agent: Agent[Any], text: str) -> tuple[list[str], str]:
    result = Runner.run_streamed(agent, text)
    raw = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
    pieces = [data.delta for data in raw if data.type == "response.output_text.delta"]
    return pieces, str(result.final_output)


def stream() -> list[str]:
    pieces, whole = asyncio.run(streamed(Agent(name="one", model=model(REAL)), ASK["capital"]))
    assert "".join(pieces) == whole
    return pieces


def think() -> dict[str, Any]:
    settings = ModelSettings(reasoning=Reasoning(effort="low", summary="auto"))
    result = run(Agent(name="one", model=model(MOCK), model_settings=settings), ASK["think"])
    [thought] = [item.raw_item for item in result.new_items if item.type == "reasoning_item"]
    return {"thought": thought.summary[0].text, "text": result.final_output}


def tool() -> dict[str, Any]:
    CALLED.clear()
    text = run(Agent(name="one", model=model(MOCK), tools=[get_weather]), ASK["weather"]).final_output
    return {"called": CALLED, "text": text}


def tool_stream() -> dict[str, Any]:
    CALLED.clear()
    _, text = asyncio.run(streamed(Agent(name="one", model=model(MOCK), tools=[get_weather]), ASK["weather"]))
    return {"called": CALLED, "text": text}


def form() -> dict[str, Any]:
    found = run(Agent(name="one", model=model(REAL), output_type=City), ASK["form"]).final_output
    assert isinstance(found, City)
    return found.model_dump()


tell(
    plain=plain,
    stream=stream,
    think=think,
    tool=tool,
    tool_stream=tool_stream,
    form=form,
    refused=lambda: run(Agent(name="one", model=model(MOCK, "nobody")), "hi").final_output,
    overflow=lambda: run(Agent(name="one", model=model(MOCK)), ASK["long"]).final_output,
    failed=lambda: asyncio.run(streamed(Agent(name="one", model=model(MOCK)), ASK["fail"])),
)
