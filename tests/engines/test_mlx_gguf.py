"""GGUF files run by the engine over MLX: the weights are the file's own, and what cannot be run is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

import tiny
import tiny_gguf
import tiny_mlx
from cases import prompt
from emberd import loop
from emberd.mlx_model import Model
from fakeport import Admit, FakePort, Launch, Settings

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def reference(folder: Path, kind: Kind) -> Model:
    """The same model as an mlx-lm folder, its matrices as the file has them but in floats."""
    weights = {}
    for name, value in tiny_gguf.weights().items():
        *stem, part = name.split(".")
        layer = f"model.layers.{stem[1]}." if len(stem) == 3 else ""
        weights[f"{layer}{NAMES[stem[-1]]}.{part}"] = mx.array(
            tiny_gguf.stored(kind, value) if value.ndim == 2 else value
        )
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(tiny_mlx.LLAMA | {"mlp_bias": False}))
    return Model(str(folder), Settings())


def refusal(folder: Path) -> str:
    port = FakePort()
    loop.run(Launch("mlx", str(folder), Settings(), port))
    assert port.reason is not None and "hint:" in port.reason
    return port.reason.splitlines()[0]


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_the_weights_are_the_files_own(kind: Kind, tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "model.gguf", kind)
    model, expected = Model(str(tmp_path), Settings()), reference(tmp_path / "reference", kind)
    assert (model.context_length, model.vocab_size) == (tiny.CONTEXT, tiny.VOCAB)
    for length in (1, 30):
        ids = mx.array([prompt(length, length)])
        found, wanted = (np.array(each(ids, each.new_caches())) for each in (model, expected))
        assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()


def test_a_gguf_file_answers_through_the_engine(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "model.gguf", Kind.Q4_1)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [319]}')
    port = FakePort().at(0, *(Admit(id, prompt(id, 5 * id), 20) for id in range(1, 5)))
    loop.run(Launch("mlx", str(tmp_path), Settings(), port))
    assert port.reason is None and port.violations == []
    assert port.capabilities is not None and port.capabilities.eos_ids == [319]
    assert all(len(answer) == 20 or answer[-1] == 319 for answer in port.answers.values())
    assert len(port.answers) == 4


def test_another_architecture_is_refused_by_its_name(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "model.gguf", architecture="gpt2")
    assert "has the architecture gpt2" in refusal(tmp_path)


def test_a_tensor_that_plain_llama_has_not_is_named(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "model.gguf", more={"rope_freqs.weight": np.ones(8, np.float32)})
    assert "has a tensor rope_freqs.weight" in refusal(tmp_path)


def test_what_changes_the_pass_is_refused(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "model.gguf", rope__scaling__factor=4.0)
    assert "has llama.rope.scaling.factor 4" in refusal(tmp_path)


def test_a_type_that_mlx_does_not_read_is_refused(tmp_path: Path) -> None:
    file = tiny_gguf.write(tmp_path / "model.gguf")
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((4, 110), np.uint8), raw_dtype=Kind.Q3_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert f"{file} cannot be loaded" in refusal(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    file = tiny_gguf.write(tmp_path / "model.gguf")
    file.write_bytes(b"<html>")
    assert f"{file} cannot be loaded" in refusal(tmp_path)


def test_a_folder_with_two_files_is_refused(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "one.gguf")
    tiny_gguf.write(tmp_path / "two.gguf")
    assert "holds 2 .gguf files" in refusal(tmp_path)
