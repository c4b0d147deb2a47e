"""Codex CLI, unchanged, in whole turns: its own prompts, its own tools and agents, with emberd as its provider; a mock says what the model would."""

from __future__ import annotations

import base64
import json
import platform
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.fetched import alone, npm, run
from support.serve import server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.serve import Server

pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm to fetch the client with"),
    pytest.mark.skipif(
        sys.platform != "linux" or platform.machine() != "x86_64", reason="it is fetched for Linux on x86-64 alone"
    ),
]

TURN = 120.0
"""Seconds that a run may take, beside whatever else the machine does."""
WINDOW = 200_000
"""Its first prompt is some 40 kB, of which each byte is a token of the mock's."""
CONFIG = """
check_for_update_on_startup = false
model = "smollm2-135m"
model_provider = "local"
[model_providers.local]
name = "Local"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 1
stream_max_retries = 1
[analytics]
enabled = false
"""
DOT = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
"""A picture of one pixel."""


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


RULES: list[dict[str, Any]] = [
    {"says": "made it 42", "answer": "The shell says 42."},
    # Not the last turn: what the other agent says may have come in after it.
    {"prompt": '<tool_response>\n{"agent_id":', "answer": "I have help."},
    {
        "says": "Multiply.",
        "answer": f"<think>\nA shell can.\n</think>\n\n{call('exec_command', cmd='echo made it $((6 * 7))')}",
    },
    {"says": "Get help.", "answer": call("multi_agent_v1__spawn_agent", message="Count the stars.")},
    {"says": "Count the stars.", "answer": "There are many."},
    {"says": "Look at it.", "answer": call("view_image", path="dot.png")},
    {"prompt": "Fail on the way.", "answer": "It goes well until", "fault": "fail", "after": 12},
    {"says": "Greet.", "answer": "<think>\nShortly.\n</think>\n\nGood day."},
    {"answer": "I do not know."},
]


@pytest.fixture(scope="module")
def codex() -> Path:
    """The program."""
    return npm("codex") / "node_modules" / ".bin" / "codex"


@pytest.fixture(scope="module")
def mock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with scripted(tmp_path_factory.mktemp("mock"), WINDOW) as one:
        yield one


@contextmanager
def scripted(folder: Path, window: int) -> Iterator[Server]:
    """A server that says what the rules say."""
    script = folder / "script.json"
    script.write_text(json.dumps(RULES))
    with server("--mock-script", script, "--context", str(window), "--log", "info,emberd=debug", home=folder) as one:
        yield one


class Turn:
    """What a run of the client came to."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.said = f"--- stdout\n{out}--- stderr\n{err}"
        self.events: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines() if line.startswith("{")]

    def items(self, kind: str) -> list[dict[str, Any]]:
        """What it has done and got of this kind."""
        done = [event["item"] for event in self.events if event["type"] == "item.completed"]
        return [item for item in done if item["type"] == kind]

    @property
    def text(self) -> str:
        """Its last message."""
        messages = self.items("agent_message")
        assert messages, self.said
        return str(messages[-1]["text"])

    @property
    def kinds(self) -> list[str]:
        return [event["type"] for event in self.events]

    def failure(self) -> str:
        """What it tells its user of the end that its turn came to."""
        [failed] = [event for event in self.events if event["type"] == "turn.failed"]
        assert self.code != 0, self.said
        return str(failed["error"]["message"])


def ask(codex: Path, one: Server, prompt: str, *options: str, **env: str) -> Turn:
    """A turn in a fresh home and an empty folder."""
    # Its sockets want a short path.
    with tempfile.TemporaryDirectory(prefix="codex") as name:
        home = Path(name)
        work = home / "work"
        work.mkdir()
        (work / "dot.png").write_bytes(DOT)
        (home / "config.toml").write_text(CONFIG.format(url=one.url))
        words = ["exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        command = [str(codex), *words, *options, prompt]
        return Turn(*run(command, work, alone(home, CODEX_HOME=str(home), **env), TURN))


def test_a_turn_is_completed(codex: Path, mock: Server) -> None:
    turn = ask(codex, mock, "Greet.")
    assert turn.code == 0, turn.said
    assert turn.text == "Good day."
    assert [item["text"] for item in turn.items("reasoning")] == ["Shortly."]
    assert turn.kinds[-1] == "turn.completed"
    usage = turn.events[-1]["usage"]
    assert usage["input_tokens"] > 10_000
    assert usage["output_tokens"] > 10


def test_a_turn_with_a_function_is_completed(codex: Path, mock: Server) -> None:
    turn = ask(codex, mock, "Multiply.")
    assert turn.code == 0, turn.said
    [command] = turn.items("command_execution")
    assert (command["exit_code"], command["aggregated_output"].strip()) == (0, "made it 42")
    assert turn.text == "The shell says 42."


def test_a_turn_with_a_tool_of_a_namespace_is_completed(codex: Path, mock: Server) -> None:
    turn = ask(codex, mock, "Get help.")
    assert turn.code == 0, turn.said
    [spawned] = turn.items("collab_tool_call")
    assert (spawned["tool"], spawned["prompt"], spawned["status"]) == ("spawn_agent", "Count the stars.", "completed")
    assert len(spawned["receiver_thread_ids"]) == 1
    assert turn.text == "I have help."


def test_a_tools_picture_is_refused_by_name(codex: Path, mock: Server) -> None:
    refused = json.loads(ask(codex, mock, "Look at it.").failure())["error"]
    assert refused["code"] == "unsupported_parameter"
    assert "input_image" in refused["message"]


def test_a_conversation_that_is_too_long_ends_terminally(codex: Path, tmp_path: Path) -> None:
    with scripted(tmp_path, 8192) as small:
        turn = ask(codex, small, "Greet.")
        assert "ran out of room" in turn.failure()
        assert small.process.err.text.count("context_length_exceeded") == 1, "it was asked again"


def test_a_turn_that_breaks_off_is_tried_again_and_told(codex: Path, mock: Server) -> None:
    turn = ask(codex, mock, "Fail on the way.")
    assert "the engine failed while it worked on the request" in turn.failure()


def test_it_takes_emberd_for_a_local_provider_of_its_own(codex: Path, mock: Server) -> None:
    local = ("--oss", "--local-provider", "lmstudio", "-m", "smollm2-135m")
    turn = ask(codex, mock, "Greet.", *local, CODEX_OSS_BASE_URL=f"{mock.url}/v1")
    assert turn.code == 0, turn.said
    assert turn.text == "Good day."
