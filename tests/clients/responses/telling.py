"""What every driver of a Python client shares: what it is given, the questions, and how it tells what came of them.

A driver is run by the client's own interpreter: nothing of the tests is imported here.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field

if TYPE_CHECKING:
    from collections.abc import Callable

GIVEN = json.loads(sys.argv[1])
MOCK: str = GIVEN["mock"]
"""The address of a server whose answers are scripted."""
REAL: str = GIVEN["real"]
"""The address of a server with the real model."""
MODEL: str = GIVEN["model"]
"""What the model is called at both."""
ASK: dict[str, str] = GIVEN["ask"]
"""What is said to them, by what for."""


class City(BaseModel, extra="forbid"):
    """What an answer of a form is made of; bounded, since a small model may go on and on."""

    name: Literal["Paris", "Rome", "Oslo"]
    rivers: int = Field(ge=0, le=9)


def weather(city: str) -> str:
    """What the tool finds out."""
    return f"21 degrees in {city}"


def tell(**scenarios: Callable[[], Any]) -> None:
    """Runs the scenarios and tells what came of each, on a line of its own. A failure is told as well, for the test to judge."""
    for name, scenario in scenarios.items():
        try:
            told = {"told": scenario()}
        except Exception as error:
            traceback.print_exc()
            told = {"error": type(error).__name__, "says": f"{error} {getattr(error, 'body', '')}"}
        print(json.dumps({"name": name, **told}), flush=True)
