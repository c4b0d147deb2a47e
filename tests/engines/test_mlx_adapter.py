"""Adapters that mlx-lm trained: what they change, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import tiny
import tiny_mlx
from cases import prompt
from emberd import loop
from emberd.mlx_model import Model
from fakeport import FakePort, Launch, Settings

QUERY = "model.layers.1.self_attn.q_proj"
RANK, SCALE = 4, 2.5


def noise(*shape: int, seed: int = 3) -> mx.array:
    rng = np.random.Generator(np.random.PCG64(seed))
    return mx.array((rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32))


def adapter(folder: Path, weights: dict[str, mx.array], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    parameters = {"rank": RANK, "scale": SCALE, "dropout": 0.0}
    (folder / "adapter_config.json").write_text(
        json.dumps({"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters} | config)
    )
    return folder


def low_rank(name: str = QUERY, width: int = tiny.HIDDEN) -> dict[str, mx.array]:
    return {f"{name}.lora_a": noise(width, RANK), f"{name}.lora_b": noise(RANK, tiny.HEADS * tiny.HEAD_DIM, seed=4)}


def logits(folder: Path) -> Any:
    model = Model(str(folder), Settings())
    return np.array(model(mx.array([prompt(1, 20)]), model.new_caches())[0])


def merged(folder: Path, weights: dict[str, mx.array]) -> Path:
    """The model with other weights of its own."""
    tiny_mlx.build(folder)
    mx.save_safetensors(str(folder / "model.safetensors"), tiny_mlx.llama_weights(0) | weights)
    return folder


@pytest.mark.parametrize("place", ["", "adapters"])
def test_what_it_adds_is_that_of_a_merged_model(place: str, tmp_path: Path) -> None:
    pair = low_rank()
    adapter(tiny_mlx.build(tmp_path / "own") / place, pair)
    weight = tiny_mlx.llama_weights(0)[f"{QUERY}.weight"]
    change = SCALE * (pair[f"{QUERY}.lora_a"] @ pair[f"{QUERY}.lora_b"]).T
    wanted = logits(merged(tmp_path / "merged", {f"{QUERY}.weight": weight + change}))
    found = logits(tmp_path / "own")
    assert np.abs(found - wanted).max() < 1e-4
    assert np.abs(found - logits(tiny_mlx.build(tmp_path / "plain"))).max() > 0.1


def test_it_adds_to_quantized_layers(tmp_path: Path) -> None:
    quantization = {"group_size": 32, "bits": 8}
    plain = logits(tiny_mlx.build(tmp_path / "plain", quantization=quantization))
    folder = tiny_mlx.build(tmp_path / "own", quantization=quantization)
    found = logits(adapter(folder, low_rank()))
    adapter(tiny_mlx.build(tmp_path / "wide"), low_rank())
    assert np.abs(found - plain).max() > 0.1
    assert np.abs(found - logits(tmp_path / "wide")).max() < 0.2 * np.abs(found - plain).max()


def test_whole_tensors_take_the_place_of_the_models_own(tmp_path: Path) -> None:
    weights = {f"{QUERY}.weight": noise(tiny.HEADS * tiny.HEAD_DIM, tiny.HIDDEN)}
    adapter(tiny_mlx.build(tmp_path / "own"), weights, fine_tune_type="full")
    assert (logits(tmp_path / "own") == logits(merged(tmp_path / "merged", weights))).all()


@pytest.mark.parametrize(
    ("weights", "config", "said"),
    [
        (low_rank(), {"fine_tune_type": "dora"}, "is of the kind dora"),
        (low_rank(), {"lora_parameters": {"rank": 4, "alpha": 8}}, "gives no lora_parameters.scale"),
        (
            low_rank("model.layers.9.self_attn.q_proj"),
            {},
            "has model.layers.9.self_attn.q_proj.lora_a, which does not fit",
        ),
        (low_rank(width=12), {}, f"has {QUERY}.lora_a, which does not fit"),
        ({f"{QUERY}.lora_a": noise(tiny.HIDDEN, RANK)}, {}, f"has {QUERY}.lora_a, which does not fit"),
        (low_rank("model.embed_tokens"), {}, "changes model.embed_tokens, a Embedding"),
        ({"other": noise(3, 3)}, {"fine_tune_type": "full"}, "has other, which does not fit"),
    ],
)
def test_what_is_not_applied_is_refused(
    weights: dict[str, mx.array], config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    adapter(tiny_mlx.build(tmp_path), weights, **config)
    port = FakePort()
    loop.run(Launch("mlx", str(tmp_path), Settings(), port))
    assert port.reason is not None and "hint: " in port.reason
    assert said in port.reason.splitlines()[0]
