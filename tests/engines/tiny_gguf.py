"""A tiny GGUF file of the llama architecture that a test writes itself, with the weights of `tiny`."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

import tiny

FEED_FORWARD = 2 * tiny.HIDDEN


def weights(seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Every tensor, by its name in the file, `[out, in]`; rows of queries and keys in the order of transformers."""
    tensors = tiny.weights(seed)
    rng = np.random.Generator(np.random.PCG64(seed + 1000))
    named = {
        "token_embd.weight": tensors["embed"],
        "output_norm.weight": tensors["gain"],
        "output.weight": tensors["head"].T,
    }
    for layer in range(tiny.LAYERS):
        gate = (rng.standard_normal((FEED_FORWARD, tiny.HIDDEN)) / np.sqrt(tiny.HIDDEN)).astype(np.float32)
        named |= {
            f"blk.{layer}.attn_norm.weight": tensors["gain"],
            f"blk.{layer}.ffn_norm.weight": tensors["gain"],
            f"blk.{layer}.attn_q.weight": tensors[f"q{layer}"].T,
            f"blk.{layer}.attn_k.weight": tensors[f"k{layer}"].T,
            f"blk.{layer}.attn_v.weight": tensors[f"v{layer}"].T,
            f"blk.{layer}.attn_output.weight": tensors[f"o{layer}"].T,
            f"blk.{layer}.ffn_gate.weight": gate,
            f"blk.{layer}.ffn_up.weight": tensors[f"up{layer}"].T,
            f"blk.{layer}.ffn_down.weight": tensors[f"down{layer}"].T,
        }
    return {name: np.ascontiguousarray(value) for name, value in named.items()}


def stored(kind: gguf.GGMLQuantizationType, value: NDArray[np.float32]) -> NDArray[np.float32]:
    """What is left of a matrix that is stored as this kind."""
    left: NDArray[np.float32] = dequantize(quantize(value, kind), kind)
    return left


def write(
    file: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
    more: dict[str, NDArray[np.float32]] | None = None,
    **metadata: float,
) -> Path:
    """Writes the file, its matrices as `kind`; `more` are further tensors, `metadata` further numbers of the architecture."""
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_context_length(tiny.CONTEXT)
    writer.add_embedding_length(tiny.HIDDEN)
    writer.add_block_count(tiny.LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(tiny.HEADS)
    writer.add_head_count_kv(tiny.KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    for key, value in metadata.items():
        writer.add_float32(f"{architecture}.{key.replace('__', '.')}", value)
    for name, value in (weights() | (more or {})).items():
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            value = value.reshape(-1, 2, tiny.HEAD_DIM // 2, tiny.HIDDEN).swapaxes(1, 2).reshape(value.shape)
        matrix = value.ndim == 2
        writer.add_tensor(name, quantize(value, kind) if matrix else value, raw_dtype=kind if matrix else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
