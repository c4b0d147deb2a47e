"""The llm package, with models that a file in its folder says are spoken to over the Responses API."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from telling import ASK, MOCK, MODEL, REAL, City, tell, weather

FOLDER = Path(os.environ["LLM_USER_PATH"])
FOLDER.mkdir(parents=True, exist_ok=True)
ENTRY = """
- model_id: {id}
  model_name: {name}
  api_base: "{url}"
  responses: true
  supports_tools: true
  supports_schema: true
"""
MODELS = [("mock", MODEL, MOCK), ("real", MODEL, REAL), ("nobody", "nobody", MOCK)]
(FOLDER / "extra-openai-models.yaml").write_text(
    "".join(ENTRY.format(id=name, name=model, url=url) for name, model, url in MODELS)
)

import llm  # noqa: E402  (it looks into the folder when it is imported)


def ask(name: str, text: str, **more: Any) -> Any:
    return llm.get_model(name).prompt(text, key="none", **more)


def tool(streamed: bool) -> dict[str, Any]:
    called: list[dict[str, str]] = []

    def get_weather(city: str) -> str:
        """What the weather is."""
        called.append({"city": city})
        return weather(city)

    chain = llm.get_model("mock").chain(ASK["weather"], tools=[get_weather], key="none", stream=streamed)
    *_, last = chain.responses()
    return {"text": last.text(), "called": called}


tell(
    plain=lambda: ask("real", ASK["capital"], stream=False).text(),
    stream=lambda: list(ask("real", ASK["capital"], stream=True)),
    tool=lambda: tool(streamed=False),
    tool_stream=lambda: tool(streamed=True),
    form=lambda: City.model_validate_json(ask("real", ASK["form"], schema=City).text()).model_dump(),
    refused=lambda: ask("nobody", "hi").text(),
    overflow=lambda: ask("mock", ASK["long"]).text(),
    # Of a stream it takes the text alone, whatever its end is.
    failed=lambda: ask("mock", ASK["fail"], stream=False).text(),
)
