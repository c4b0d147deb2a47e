"""Clients of the Responses API, unchanged, against emberd: with the real model, and with a mock that thinks, calls tools and fails as it is told.

Each is driven by a program of its own under `responses`, which tells what the client made of every scenario; what it should have made of it is said here.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.fetched import CLIENTS as FOLDER
from support.fetched import ROOT, alone, ended, npm, python
from support.serve import server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.serve import Server

pytestmark = [pytest.mark.clients, pytest.mark.model, pytest.mark.timeout(900)]

MODEL = os.environ.get("EMBERD_TEST_MODEL", "smollm2-135m")
ANSWER = 240.0
"""Seconds that a client may take for all its scenarios, beside whatever else the machine does."""
THOUGHT = "First I count."
ASK = {
    "capital": "What is the capital of France?",
    "think": "What do you think?",
    "weather": "How is the weather in Paris?",
    "form": "Describe a city as JSON.",
    "fail": "Fail on the way.",
    "stall": "Stall on the way.",
    "endless": "Go on and on.",
    "long": "long " * 2000,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
RULES: list[dict[str, Any]] = [
    {"says": "21 degrees in Paris", "answer": "It is warm in Paris."},
    {
        "says": ASK["weather"],
        "prompt": '"get_weather"',
        "answer": f"<think>\nI look.\n</think>\n\nLet me see.\n\n{CALL}",
    },
    {"says": ASK["think"], "answer": f"<think>\n{THOUGHT}\n</think>\n\nTwo."},
    {"says": ASK["fail"], "answer": "It goes well until", "fault": "fail", "after": 12},
    {"says": ASK["stall"], "answer": "It goes well until", "fault": "stall", "after": 12},
    {"says": ASK["endless"], "answer": "on and ", "endless": True},
]
EVERY = {"plain", "stream", "tool", "form", "refused", "overflow", "failed"}
OFFERS: dict[str, set[str]] = {
    "openai.py": EVERY | {"tool_stream", "think", "helper", "cut", "left", "together", "models", "counted"},
    "agents.py": EVERY | {"tool_stream", "think"},
    "langchain.py": EVERY | {"tool_stream", "think"},
    "litellm.py": EVERY | {"think", "bridge", "bridge_stream", "bridge_tool"},
    "pydantic_ai.py": EVERY | {"tool_stream", "think", "form_tool"},
    "instructor.py": {"form", "refused", "overflow"},
    "llm.py": EVERY | {"tool_stream"},
    "openai.mjs": EVERY | {"tool_stream", "think"},
    "agents.mjs": EVERY | {"tool_stream", "think", "broken"},
    "ai_sdk.mjs": EVERY | {"tool_stream", "think", "think_stream", "cut"},
}
"""Which scenarios a client has; it is asked for no other, and for none less."""

Told = dict[str, Any]


@pytest.fixture(scope="module")
def mock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose answers are scripted. It has one place: whoever does not give it back is in everybody's way."""
    folder = tmp_path_factory.mktemp("mock")
    script = folder / "script.json"
    script.write_text(json.dumps(RULES))
    with server("--mock-script", script, "--model", MODEL, "--max-batch", "1", home=folder) as one:
        yield one


@pytest.fixture(scope="module")
def real(model_home: Path) -> Iterator[Server]:
    """A server with the real model."""
    with server("--model", MODEL, engine="auto", home=model_home) as one:
        yield one


@pytest.fixture(scope="module")
def drive(mock: Server, real: Server, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a client told, by scenario. It is run once, by the first test that asks for it."""
    [model] = [entry["id"] for entry in real.get("/v1/models")[1]["data"]]
    given = {"mock": f"{mock.url}/v1", "real": f"{real.url}/v1", "model": model, "ask": ASK}

    @cache
    def told(client: str) -> dict[str, Told]:
        home = tmp_path_factory.mktemp("client")
        program, script = interpreter(client)
        env = alone(
            home,
            LITELLM_LOCAL_MODEL_COST_MAP="True",
            LLM_USER_PATH=str(home / "llm"),
            OPENAI_AGENTS_DISABLE_TRACING="1",
        )
        out = ended([*program, str(script), json.dumps(given)], home, env, ANSWER)
        lines = [json.loads(line) for line in out.splitlines() if line.startswith('{"name":')]
        assert {line["name"] for line in lines} == OFFERS[client]
        return {line["name"]: line for line in lines}

    return told


def interpreter(client: str) -> tuple[list[str], Path]:
    """What runs a client's driver, with the client fetched, and where the driver is."""
    script = FOLDER / "responses" / f"drive_{client}"
    if script.suffix == ".py":
        # The openai package is in this environment too. instructor takes no version of it that the others do.
        pins = "instructor.txt" if client == "instructor.py" else "clients.txt"
        return [sys.executable if client == "openai.py" else str(python(ROOT / "requirements" / pins))], script
    if shutil.which("npm") is None:
        pytest.skip("there is no npm to fetch the client with")
    folder = npm("responses")
    # Node looks for packages beside the script.
    for file in FOLDER.glob("responses/*.mjs"):
        shutil.copy(file, folder / file.name)
    return ["node"], folder / script.name


def clients(scenario: str) -> pytest.MarkDecorator:
    """All that have this scenario."""
    return pytest.mark.parametrize("client", [name for name, offers in OFFERS.items() if scenario in offers])


def came(told: Told) -> Any:
    """What came of a scenario in which nothing should go wrong."""
    assert "error" not in told, told
    return told["told"]


def went_wrong(told: Told) -> str:
    """What the client's user reads of a failure."""
    assert "error" in told, told
    return str(told["says"])


@clients("plain")
def test_a_turn_is_answered(drive: Any, client: str) -> None:
    assert "capital of France is Paris" in came(drive(client)["plain"])


@clients("stream")
def test_a_stream_comes_in_pieces_that_add_up(drive: Any, client: str) -> None:
    pieces = came(drive(client)["stream"])
    assert "".join(pieces) == "The capital of France is Paris."
    # litellm asks for no stream of a model that it does not know, and makes one of the whole.
    assert client == "litellm.py" or len(pieces) > 1


@clients("think")
def test_a_thought_is_shown_apart_from_the_answer(drive: Any, client: str) -> None:
    assert came(drive(client)["think"]) == {"thought": THOUGHT, "text": "Two."}


@clients("tool")
def test_a_tool_goes_round(drive: Any, client: str) -> None:
    assert came(drive(client)["tool"]) == {"called": [{"city": "Paris"}], "text": "It is warm in Paris."}


@clients("tool_stream")
def test_a_tool_goes_round_in_a_stream(drive: Any, client: str) -> None:
    told = came(drive(client)["tool_stream"])
    assert told["called"] == [{"city": "Paris"}]
    # The AI SDK gives the text of all steps.
    assert told["text"].removeprefix("Let me see.") == "It is warm in Paris."
    assert told.get("errors", []) == []


@clients("form")
def test_an_answer_of_a_form_is_parsed(drive: Any, client: str) -> None:
    for scenario in {"form", "form_tool"} & OFFERS[client]:
        city = came(drive(client)[scenario])
        assert city["name"] in ("Paris", "Rome", "Oslo")
        assert 0 <= city["rivers"] <= 9
        assert len(city) == 2


@clients("refused")
def test_a_model_that_is_not_there_is_named(drive: Any, client: str) -> None:
    assert '"nobody"' in went_wrong(drive(client)["refused"]).replace("\\", "")


@clients("overflow")
def test_a_prompt_that_is_too_long_is_told_with_the_window(drive: Any, client: str) -> None:
    says = went_wrong(drive(client)["overflow"])
    assert "tokens" in says
    assert "8192" in says


@clients("failed")
def test_an_answer_that_breaks_off_is_told_in_words(drive: Any, client: str) -> None:
    told = drive(client)["failed"]
    says = json.dumps(told["told"]) if "told" in told else told["says"]
    assert "the engine failed while it worked on the request" in says


def test_openai_is_told_every_end_of_a_stream(drive: Any) -> None:
    told = drive("openai.py")
    text = "The capital of France is Paris."
    assert came(told["helper"]) == {"first": "response.created", "last": "response.completed", "text": text}
    assert came(told["failed"])["code"] == "server_error"
    assert came(told["failed"])["text"] == "It goes well"
    assert came(told["cut"]) == {"status": "incomplete", "reason": "max_output_tokens", "text": "on and on"}
    assert came(told["left"]) == "Two."
    assert came(told["together"]) == [text] * 3
    assert came(told["models"]) == [MODEL]
    assert came(told["counted"]) > 2


def test_litellm_reaches_the_responses_through_its_completions(drive: Any) -> None:
    told = drive("litellm.py")
    assert came(told["bridge"]) == "The capital of France is Paris."
    assert "".join(came(told["bridge_stream"])) == "The capital of France is Paris."
    assert came(told["bridge_tool"]) == {"called": [{"city": "Paris"}], "text": "It is warm in Paris."}


def test_the_agents_of_node_are_told_that_a_stream_failed(drive: Any) -> None:
    assert "response.failed" in went_wrong(drive("agents.mjs")["broken"])


def test_the_ai_sdk_shows_thoughts_as_they_come_and_how_an_answer_was_cut(drive: Any) -> None:
    told = drive("ai_sdk.mjs")
    assert came(told["think_stream"]) == {"thought": THOUGHT, "text": "Two."}
    assert "".join(came(told["cut"])["pieces"]) == "on and on and on"
    assert came(told["cut"])["finish"] == "length"
    assert came(told["cut"])["errors"] == []
