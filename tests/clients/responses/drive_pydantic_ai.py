"""pydantic-ai with its model for the Responses API."""

from __future__ import annotations

import asyncio
from typing import Any

from openai import AsyncOpenAI
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from telling import ASK, MOCK, MODEL, REAL, City, tell, weather


def model(url: str, name: str = MODEL) -> OpenAIResponsesModel:
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=100)
    return OpenAIResponsesModel(name, provider=OpenAIProvider(openai_client=client))


def run(agent: Agent[None, Any], text: str) -> Any:
    return asyncio.run(agent.run(text))


async def streamed(agent: Agent[None, Any], text: str) -> list[str]:
    async with agent.run_stream(text) as result:
        return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]


def think() -> dict[str, Any]:
    result = run(Agent(model(MOCK)), ASK["think"])
    parts = [part for message in result.all_messages() for part in message.parts]
    [thought] = [part.content for part in parts if part.part_kind == "thinking"]
    return {"thought": thought, "text": result.output}


def with_tool() -> tuple[Agent[None, str], list[dict[str, str]]]:
    agent = Agent(model(MOCK))
    called: list[dict[str, str]] = []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """What the weather is."""
        called.append({"city": city})
        return weather(city)

    return agent, called


def tool() -> dict[str, Any]:
    agent, called = with_tool()
    return {"text": run(agent, ASK["weather"]).output, "called": called}


def tool_stream() -> dict[str, Any]:
    agent, called = with_tool()

    async def events() -> str:
        async with agent.iter(ASK["weather"]) as steps:
            async for node in steps:
                if Agent.is_model_request_node(node):
                    async with node.stream(steps.ctx) as stream:
                        async for _ in stream:
                            pass
            assert steps.result is not None
            return steps.result.output

    return {"text": asyncio.run(events()), "called": called}


tell(
    plain=lambda: run(Agent(model(REAL)), ASK["capital"]).output,
    stream=lambda: asyncio.run(streamed(Agent(model(REAL)), ASK["capital"])),
    think=think,
    tool=tool,
    tool_stream=tool_stream,
    form=lambda: run(Agent(model(REAL), output_type=NativeOutput(City)), ASK["form"]).output.model_dump(),
    form_tool=lambda: run(Agent(model(REAL), output_type=ToolOutput(City)), ASK["form"]).output.model_dump(),
    refused=lambda: run(Agent(model(MOCK, "nobody")), "hi").output,
    overflow=lambda: run(Agent(model(MOCK)), ASK["long"]).output,
    failed=lambda: run(Agent(model(MOCK)), ASK["fail"]).output,
)
