"""Reads the weights of a GGUF file for MLX: those of Q4_0, Q4_1 and Q8_0 packed as they are, so that nothing is rounded anew.

Only the llama architecture, as the core's import. The tokenizer and the template in the file are the core's business; it lays
them beside the file. Names of tensors and metadata: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx

from emberd.engine import EngineError

_TAKE = "take a file of type F32, F16, Q8_0, Q4_0 or Q4_1, or run this one with --engine onnx"
_CONVERT = "give an mlx-lm folder of this model, or a hub repository of one"
_TENSORS = {
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
_SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "head_dim": "attention.key_length",
}


def find(folder: Path) -> Path | None:
    """The GGUF file of a folder; `None` where it has none, or weights in another form. Raises `EngineError` where it has several."""
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        raise EngineError(f"{folder} holds {len(files)} .gguf files", "keep one of them, or give its path as the model")
    return files[0] if files else None


def read(file: Path) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """What the config of an mlx-lm folder would say, and its weights. Raises `EngineError` for a file that cannot be run."""
    try:
        tensors, metadata = mx.load(str(file), format="gguf", return_metadata=True)
    except Exception as error:  # a file that is cut off or none, or has tensors of a type that MLX does not read
        raise EngineError(f"{file} cannot be loaded: {' '.join(str(error).split())}", _TAKE) from error
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise EngineError(f"{file} has the architecture {architecture}, which is not read from gguf", _CONVERT)
    weights = {_name(file, name): value for name, value in tensors.items()}
    return _config(file, metadata, weights), weights


def _name(file: Path, name: str) -> str:
    """mlx-lm's name of a tensor, or of one part of it (`weight`, `scales`, `biases`)."""
    *stem, part = name.split(".")
    layer = f"model.layers.{stem[1]}." if stem[0] == "blk" and len(stem) == 3 else ""
    known = _TENSORS.get(stem[-1])
    if known is None or part not in ("weight", "scales", "biases"):
        raise EngineError(f"{file} has a tensor {name}, which plain llama does not have", _CONVERT)
    return f"{layer}{known}.{part}"


def _config(file: Path, metadata: dict[str, Any], weights: dict[str, mx.array]) -> dict[str, Any]:
    def number(key: str) -> float | None:
        value = metadata.get(f"llama.{key}")
        return None if value is None else float(value.item())

    for key, plain in (("expert_count", 0), ("rope.scaling.factor", 1)):
        if number(key) not in (None, plain):
            raise EngineError(f"{file} has llama.{key} {number(key):g}, which is not run from gguf", _CONVERT)
    sizes = {name: number(key) for name, key in _SIZES.items()}
    sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or sizes["num_attention_heads"]
    missing = [_SIZES[name] for name, size in sizes.items() if size is None and name != "head_dim"]
    if missing:
        raise EngineError(f"{file} gives no llama.{missing[0]}", "the file is damaged or unfinished: fetch it anew")
    config: dict[str, Any] = {name: int(size) for name, size in sizes.items() if size is not None}
    config |= {
        "model_type": "llama",
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon") or 1e-5,
        "rope_theta": number("rope.freq_base") or 10000.0,
        # Its rows of queries and keys are in the order of neighbours that turn together.
        "rope_traditional": True,
        "vocab_size": weights["model.embed_tokens.weight"].shape[0] if "model.embed_tokens.weight" in weights else 0,
        "tie_word_embeddings": "lm_head.weight" not in weights,
    }
    if (eos := metadata.get("tokenizer.ggml.eos_token_id")) is not None:
        config["eos_token_id"] = int(eos.item())
    if any(name.endswith(".scales") for name in weights):
        config["quantization"] = {"group_size": 32, "bits": 4}  # of each tensor its own, by its shapes
    return config
