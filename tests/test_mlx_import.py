"""GGUF files imported for MLX: each member of the family and each type of tensor computes what its file says.

The reference is the independent forward pass in numpy over what the `gguf` package reads.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

sys.path += [str(Path(__file__).parent / part) for part in ("reference", "engines")]

from llama import Llama

from fakeport import Settings
from support.family import FAMILY, VOCABULARY, write
from support.process import run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mlx") is None, reason="the engine over MLX is an extra")

Q = gguf.GGMLQuantizationType
IDS = np.random.default_rng(5).integers(0, VOCABULARY, 40).tolist()
AS_IT_IS = [Q.F32, Q.F16, Q.Q8_0, Q.Q4_0, Q.Q4_1]
FLOAT = 2e-2
"""Of the logits' spread: what rounding the weights to 16 bits may do. A row in the wrong place does a hundred times that."""
ANEW = [Q.BF16, Q.Q5_0, Q.Q5_1, Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.IQ4_NL]


def pulled(path: Path) -> tuple[int, str]:
    """What `emberd models pull` does with a file where MLX is the best engine: its code, and the folder or what it says."""
    folder = path.parent / "apple"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("from emberd import cli\ncli.mlx_is_best = lambda: True\n")
    env = {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}
    done = run("models", "pull", path, home=path.parent / "home", **env)
    said = done.stderr if done.returncode else done.stdout.strip().removeprefix(f"{path} is ready in ")
    return done.returncode, said


def logits(path: Path) -> tuple[str, float]:
    """The file that holds the imported weights, and the largest difference of a logit in parts of the logits' spread."""
    import mlx.core as mx

    from emberd.mlx_model import Model

    code, folder = pulled(path)
    assert code == 0, folder
    [weights] = {"model.gguf", "model.safetensors"} & {each.name for each in Path(folder).iterdir()}
    model = Model(folder, Settings())
    found, wanted = np.array(model(mx.array([IDS]), model.new_caches())[0]), Llama(path).logits(IDS)
    return weights, float(np.abs(found - wanted).max() / wanted.std())


@pytest.mark.parametrize("kind", AS_IT_IS, ids=lambda kind: kind.name)
def test_types_that_mlx_reads_stay_in_their_file(kind: Q, tmp_path: Path) -> None:
    weights, difference = logits(write(tmp_path / "tiny.gguf", FAMILY["llama"], kind))
    assert weights == "model.gguf"
    assert difference < 1e-3


@pytest.mark.parametrize("kind", ANEW, ids=lambda kind: kind.name)
def test_other_types_become_floats(kind: Q, tmp_path: Path) -> None:
    weights, difference = logits(write(tmp_path / "tiny.gguf", FAMILY["llama"], kind))
    assert weights == "model.safetensors"
    assert difference < FLOAT


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_other_members_become_floats(name: str, tmp_path: Path) -> None:
    weights, difference = logits(write(tmp_path / "tiny.gguf", FAMILY[name]))
    assert weights == "model.safetensors"
    assert difference < FLOAT


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("llama-3", "scaled rotary frequencies"),
        ("linear", "scaled rotary frequencies"),
        ("mistral", "a sliding window"),
    ],
)
def test_what_mlx_cannot_be_told_is_refused(name: str, what: str, tmp_path: Path) -> None:
    code, said = pulled(write(tmp_path / "tiny.gguf", FAMILY[name]))
    assert code == 1
    assert f"the model has {what}, which is not imported for mlx" in said
    assert "hint: use --engine onnx" in said
