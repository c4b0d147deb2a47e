"""Lets the engines run where the extension module is not built: plain Python classes stand in for its own."""

from __future__ import annotations

import functools
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import fakeport

if importlib.util.find_spec("emberd._core") is None:
    sys.modules["emberd._core"] = fakeport

from cases import CASES, Case

collect_ignore_glob = [] if importlib.util.find_spec("mlx") else ["test_mlx*.py"]


@pytest.fixture(autouse=True)
def still_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes take no time, so that how fast this machine is does not decide what runs in which step."""
    from emberd.schedule import Pace
    from emberd.verify import Costs

    monkeypatch.setattr("emberd.verify.Costs", functools.partial(Costs, clock=lambda: 0.0))
    for engine in ("onnx", "mlx"):
        if importlib.util.find_spec({"onnx": "onnxruntime"}.get(engine, engine)):
            monkeypatch.setattr(f"emberd.{engine}.Pace", functools.partial(Pace, clock=lambda: 0.0))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model folder without eos ids for each engine, built once."""
    root = tmp_path_factory.mktemp("models")
    return {case.name: case.build(root / case.name, []) for case in CASES}


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Case:
    """Each engine in turn."""
    return replace(request.param, folder=folders[request.param.name])


@pytest.fixture(
    params=[case for case in CASES if case.name == "onnx" or case.engine == "mlx"], ids=lambda case: case.name
)
def batching_case(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Case:
    """Each engine that batches, with each kind of cache of its own."""
    return replace(request.param, folder=folders[request.param.name])


@pytest.fixture
def onnx_case(folders: dict[str, Path]) -> Case:
    """The ONNX engine on the tiny model."""
    return replace(CASES[1], folder=folders["onnx"])
