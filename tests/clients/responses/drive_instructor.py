"""instructor, which asks for a form with a tool that has to be called and with `text.format` at once."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from telling import ASK, MOCK, MODEL, REAL, City, tell


def client(url: str) -> Any:
    plain = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=100)
    return instructor.from_openai(plain, mode=instructor.Mode.RESPONSES_TOOLS)


def ask(url: str, text: str, name: str = MODEL) -> dict[str, Any]:
    found = client(url).responses.create(model=name, input=text, response_model=City, max_retries=0)
    assert isinstance(found, City)
    return found.model_dump()


tell(
    form=lambda: ask(REAL, ASK["form"]),
    refused=lambda: ask(MOCK, "hi", "nobody"),
    overflow=lambda: ask(MOCK, ASK["long"]),
)
