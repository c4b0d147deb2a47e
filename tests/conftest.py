"""Fixtures for tests that start whole processes."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A place for models that has none."""
    return tmp_path / "home"


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A model folder that passes for one until an engine opens it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 64, "vocab_size": 8}))
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (folder / "model.onnx").write_bytes(b"")
    return folder


@pytest.fixture
def slow(tmp_path: Path) -> dict[str, str]:
    """An environment in which the echo engine computes for 20 ms a step: thousands of tokens outlast any test."""
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import time\n"
        "from emberd.echo import EchoEngine\n"
        "step = EchoEngine.step\n"
        "EchoEngine.step = lambda engine: (time.sleep(0.02), step(engine))[1]\n"
    )
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


@pytest.fixture
def place() -> Iterator[Path]:
    """Where a socket may be: a folder whose path is short enough for one."""
    with tempfile.TemporaryDirectory(prefix="emberd") as folder:
        yield Path(folder) / "s"
