"""Tiny MLX model folders that a test builds itself: the llama of `tiny`, with the same weights, and other kinds of caches.

`tiny` has an MLP without a gate's partner; here its product is with ones, which a bias makes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

import tiny
from emberd.mlx_model import classes

WINDOW = 24

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": tiny.HIDDEN,
    "num_hidden_layers": tiny.LAYERS,
    "intermediate_size": 2 * tiny.HIDDEN,
    "num_attention_heads": tiny.HEADS,
    "num_key_value_heads": tiny.KV_HEADS,
    "head_dim": tiny.HEAD_DIM,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": tiny.VOCAB,
    "max_position_embeddings": tiny.CONTEXT,
    "tie_word_embeddings": False,
    "mlp_bias": True,
}
SLIDING = LLAMA | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": WINDOW}
MAMBA: dict[str, Any] = {
    "model_type": "mamba",
    "vocab_size": tiny.VOCAB,
    "hidden_size": tiny.HIDDEN,
    "intermediate_size": 2 * tiny.HIDDEN,
    "state_size": 8,
    "num_hidden_layers": tiny.LAYERS,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 4,
    "tie_word_embeddings": False,
    "max_position_embeddings": tiny.CONTEXT,
}
LFM2: dict[str, Any] = {
    "model_type": "lfm2",
    "vocab_size": tiny.VOCAB,
    "hidden_size": tiny.HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": tiny.HEADS,
    "num_key_value_heads": tiny.KV_HEADS,
    "max_position_embeddings": tiny.CONTEXT,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": tiny.HIDDEN,
    "block_ff_dim": 2 * tiny.HIDDEN,
    "block_multiple_of": 16,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "full_attn_idxs": [1],
    "rope_theta": 10000.0,
}


def llama_weights(seed: int, steps: int = 0) -> dict[str, mx.array]:
    """The tensors of `tiny`, by mlx-lm's names and in its layout `[out, in]`."""
    tensors = tiny.weights(seed, steps)
    wide = 2 * tiny.HIDDEN
    named = {
        "model.embed_tokens.weight": tensors["embed"],
        "model.norm.weight": tensors["gain"],
        "lm_head.weight": tensors["head"].T,
    }
    for layer in range(tiny.LAYERS):
        name = f"model.layers.{layer}"
        for part in "qkvo":
            named[f"{name}.self_attn.{part}_proj.weight"] = tensors[f"{part}{layer}"].T
        named |= {
            f"{name}.input_layernorm.weight": tensors["gain"],
            f"{name}.post_attention_layernorm.weight": tensors["gain"],
            f"{name}.mlp.gate_proj.weight": tensors[f"up{layer}"].T,
            f"{name}.mlp.gate_proj.bias": np.zeros(wide, np.float32),
            f"{name}.mlp.up_proj.weight": np.zeros((wide, tiny.HIDDEN), np.float32),
            f"{name}.mlp.up_proj.bias": np.ones(wide, np.float32),
            f"{name}.mlp.down_proj.weight": tensors[f"down{layer}"].T,
            f"{name}.mlp.down_proj.bias": np.zeros(tiny.HIDDEN, np.float32),
        }
    return {name: mx.array(np.ascontiguousarray(value)) for name, value in named.items()}


def other_weights(config: dict[str, Any], seed: int) -> dict[str, mx.array]:
    """Random weights for a model of any kind, scaled so that greedy answers wander; gains are as the class has them."""
    model_class, arguments = classes(config)
    model: nn.Module = model_class(arguments.from_dict(config))
    rng = np.random.Generator(np.random.PCG64(seed))
    weights = {}
    for name, value in tree_flatten(model.parameters()):
        if name.endswith("weight") and value.ndim > 1:
            gain = 1.0 if "embed" in name else 2.0 / np.sqrt(np.prod(value.shape[1:]))
            value = mx.array((rng.standard_normal(value.shape) * gain).astype(np.float32))
        elif name.endswith("bias"):
            value = mx.array((rng.standard_normal(value.shape) * 0.1).astype(np.float32))
        weights[name] = value
    return weights


def _quantized(weights: dict[str, mx.array], quantization: dict[str, Any]) -> dict[str, mx.array]:
    """Every matrix of the decoder's layers as codes, scales and biases."""
    packed: dict[str, mx.array] = {}
    for name, value in weights.items():
        if value.ndim != 2 or not name.startswith("model.layers"):
            packed[name] = value
            continue
        stem = name.removesuffix(".weight")
        parts = mx.quantize(value, **quantization)
        packed |= dict(zip((f"{stem}.weight", f"{stem}.scales", f"{stem}.biases"), parts, strict=False))
    return packed


def build(
    folder: Path,
    config: dict[str, Any] = LLAMA,
    seed: int = 0,
    eos: int | list[int] = tiny.EOS,
    steps: int = 0,
    quantization: dict[str, Any] | None = None,
) -> Path:
    """Writes the model folder: `model.safetensors`, `config.json`, `generation_config.json`. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = llama_weights(seed, steps) if config["model_type"] == "llama" else other_weights(config, seed)
    if quantization is not None:
        weights, config = _quantized(weights, quantization), config | {"quantization": quantization}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": tiny.EOS}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return folder


_SIZES: dict[str, Any] = {
    "hidden_size": tiny.HIDDEN,
    "num_hidden_layers": 2,
    "intermediate_size": 2 * tiny.HIDDEN,
    "num_attention_heads": tiny.HEADS,
    "num_key_value_heads": tiny.KV_HEADS,
    "head_dim": tiny.HEAD_DIM,
    "vocab_size": tiny.VOCAB,
    "max_position_embeddings": tiny.CONTEXT,
    "rms_norm_eps": 1e-6,
}
_GEMMA = {"query_pre_attn_scalar": tiny.HEAD_DIM, "sliding_window": WINDOW, "sliding_window_pattern": 2}
_FALCON = {"mamba_d_ssm": 64, "mamba_d_head": 16, "mamba_n_heads": 4, "mamba_d_state": 8, "lm_head_multiplier": 1.0}
OTHERS: dict[str, dict[str, Any]] = {
    "qwen2": {**_SIZES, "model_type": "qwen2", "rope_theta": 1e6, "tie_word_embeddings": True},
    "qwen3": {**_SIZES, "model_type": "qwen3", "rope_theta": 1e6, "tie_word_embeddings": True},
    "gemma3_text": {**_SIZES, **_GEMMA, "model_type": "gemma3_text"},
    "gemma3": {
        "model_type": "gemma3",
        "vocab_size": tiny.VOCAB,
        "text_config": {**_SIZES, **_GEMMA, "model_type": "gemma3_text"},
    },
    "falcon_h1": {**_SIZES, **_FALCON, "model_type": "falcon_h1"},
}
"""Further kinds of models that omp has keys for; some keep two caches a layer, some are nested."""
