"""Tiny models of the Llama family as GGUF files, with random weights, written by the `gguf` package."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import gguf
import numpy as np

from support.kquants import quantized

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

F32 = gguf.GGMLQuantizationType.F32


class Member(NamedTuple):
    """What a member of the family has; all sizes are in elements."""

    architecture: str
    pre: str
    head_dim: int = 64
    theta: float = 10_000.0
    factors: bool = False
    window: int | None = None
    linear: float | None = None
    tied: bool = False
    inner: int = 512


FAMILY = {
    "llama": Member("llama", "smollm", tied=True),
    "llama-3": Member("llama", "llama-bpe", theta=500_000.0, factors=True),
    "linear": Member("llama", "gpt-2", linear=4.0),
    "mistral": Member("llama", "default", window=7),
    "qwen2": Member("qwen2", "qwen2", theta=1_000_000.0, tied=True),
    "qwen3": Member("qwen3", "qwen2", head_dim=128, theta=1_000_000.0, tied=True),
}
"""By name; Qwen 3's heads are wider than the hidden state divided by their number."""

LAYERS, WIDTH, HEADS, KV_HEADS, CONTEXT, VOCABULARY = 2, 256, 4, 2, 128, 400


def stored(
    values: NDArray[np.float32], kind: gguf.GGMLQuantizationType, random: np.random.Generator
) -> NDArray[np.uint8]:
    """`values` as bytes of a type; for IQ4, which nothing here quantizes to, random codes of the same spread."""
    if (blocks := quantized(values, kind.name)) is not None:
        return blocks
    if not kind.name.startswith("IQ4"):
        return np.asarray(gguf.quants.quantize(values, kind)).view(np.uint8)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    made = random.integers(0, 256, (len(values), values.shape[1] // elements, size), dtype=np.uint8)
    rows = made.reshape(len(values), -1)
    for step in (1.0, None):  # A block begins with its scale.
        scale = step or values.std() / gguf.quants.dequantize(rows, kind).std()
        made[..., :2] = np.array([scale], np.float16).view(np.uint8)
    return rows


def write(
    path: Path, member: Member, kinds: dict[str, gguf.GGMLQuantizationType] | gguf.GGMLQuantizationType = F32
) -> Path:
    """Write a model; `kinds` are the types of its matrices, all alike or by the end of their names (else F32)."""
    random = np.random.default_rng(len(member.pre) + member.head_dim)
    writer = gguf.GGUFWriter(path, member.architecture)
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(member.inner)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(member.theta)
    if member.head_dim != WIDTH // HEADS:
        writer.add_key_length(member.head_dim)
        writer.add_value_length(member.head_dim)
    if member.window is not None:
        writer.add_sliding_window(member.window)
    if member.linear is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(member.linear)
    _tokenizer(writer, member.pre)

    def matrix(name: str, rows: int, columns: int) -> None:
        values = (random.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)
        kind = kinds if isinstance(kinds, gguf.GGMLQuantizationType) else F32
        if isinstance(kinds, dict):
            kind = next((found for end, found in kinds.items() if name.endswith(end)), F32)
        if kind == F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, stored(values, kind, random), raw_dtype=kind)

    def vector(name: str, size: int, middle: float) -> None:
        writer.add_tensor(name, (middle + 0.2 * random.standard_normal(size)).astype(np.float32))

    queries, keys = HEADS * member.head_dim, KV_HEADS * member.head_dim
    matrix("token_embd.weight", VOCABULARY, WIDTH)
    if member.factors:
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 8, member.head_dim // 2, dtype=np.float32))
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        vector(prefix + "attn_norm.weight", WIDTH, 1)
        # Larger than usual, so that attention looks at some positions and not at all alike.
        matrix(prefix + "attn_q.weight", queries, WIDTH)
        matrix(prefix + "attn_k.weight", keys, WIDTH)
        matrix(prefix + "attn_v.weight", keys, WIDTH)
        matrix(prefix + "attn_output.weight", WIDTH, queries)
        vector(prefix + "ffn_norm.weight", WIDTH, 1)
        matrix(prefix + "ffn_gate.weight", member.inner, WIDTH)
        matrix(prefix + "ffn_up.weight", member.inner, WIDTH)
        matrix(prefix + "ffn_down.weight", WIDTH, member.inner)
        if member.architecture == "qwen2":
            for part, size in (("attn_q", queries), ("attn_k", keys), ("attn_v", keys)):
                vector(f"{prefix}{part}.bias", size, 0.5)
        if member.architecture == "qwen3":
            vector(prefix + "attn_q_norm.weight", member.head_dim, 2)
            vector(prefix + "attn_k_norm.weight", member.head_dim, 1)
    vector("output_norm.weight", WIDTH, 1)
    if not member.tied:
        matrix("output.weight", VOCABULARY, WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    """The bytes in the notation of byte-level BPE, one merge, and tokens of their own."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    tokens = [chr(each) for each in printable] + [chr(256 + at) for at in range(256 - len(printable))]
    tokens += ["he", "<|end|>"]
    tokens += [f"<|spare {at}|>" for at in range(VOCABULARY - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3] * (VOCABULARY - 257))
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(257)
