"""An independent forward pass of the Llama family in numpy, 32-bit floats, straight from a GGUF file.

It shares nothing with the importer: the `gguf` package reads and dequantizes, and rotary embedding, attention and norms are
written out from their definitions. Llama, Mistral and SmolLM2 (`llama`), Qwen 2 and 2.5 (`qwen2`) and Qwen 3 (`qwen3`). It is slow and keeps the dequantized model in memory; it is a reference, not an engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]


class Llama:
    """A model of the family, read from a GGUF file."""

    def __init__(self, path: Path) -> None:
        """Read and dequantize all weights of the file at `path`."""
        reader = gguf.GGUFReader(str(path))
        self.weights: dict[str, Floats] = {}
        for tensor in reader.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            self.weights[tensor.name] = np.asarray(values, np.float32)

        architecture = reader.fields["general.architecture"].contents()

        def number(key: str, default: float | None = None) -> float:
            field = reader.fields.get(f"{architecture}.{key}")
            if field is not None:
                return float(field.contents())
            if default is None:
                raise KeyError(key)
            return default

        self.pairs = architecture == "llama"
        """Whether neighbouring elements are rotated, not those half a head apart."""
        self.layers = int(number("block_count"))
        self.heads = int(number("attention.head_count"))
        self.kv_heads = int(number("attention.head_count_kv"))
        self.epsilon = np.float32(number("attention.layer_norm_rms_epsilon"))
        self.head_dim = int(number("attention.key_length", number("embedding_length") // self.heads))
        exponents = np.arange(0, self.head_dim, 2) / self.head_dim
        self.frequencies = number("rope.freq_base") ** -exponents / number("rope.scaling.factor", 1)
        if "rope_freqs.weight" in self.weights:
            self.frequencies = self.frequencies / self.weights["rope_freqs.weight"]
        self.window = int(number("attention.sliding_window", number("context_length")))

    def logits(self, ids: list[int]) -> Floats:
        """Return the logits `[len(ids), vocabulary]` after each token of `ids`."""
        weights = self.weights
        hidden = weights["token_embd.weight"][ids]
        for layer in range(self.layers):
            prefix = f"blk.{layer}."
            normed = self._norm(hidden, weights[prefix + "attn_norm.weight"])
            hidden = hidden + self._attention(normed, prefix)
            normed = self._norm(hidden, weights[prefix + "ffn_norm.weight"])
            gate = normed @ weights[prefix + "ffn_gate.weight"].T
            up = normed @ weights[prefix + "ffn_up.weight"].T
            hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ weights[prefix + "ffn_down.weight"].T
        head = weights.get("output.weight", weights["token_embd.weight"])
        return np.asarray(self._norm(hidden, weights["output_norm.weight"]) @ head.T, np.float32)

    def greedy(self, prompt: list[int], ends: set[int], limit: int) -> list[int]:
        """Return what follows `prompt` when the likeliest token is taken each time, up to an id of `ends` (kept)."""
        made: list[int] = []
        while len(made) < limit and not ends.intersection(made):
            made.append(int(self.logits(prompt + made)[-1].argmax()))
        return made

    def _norm(self, x: Floats, weight: Floats) -> Floats:
        mean = np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float32)
        return np.asarray(x / np.sqrt(mean + self.epsilon) * weight, np.float32)

    def _rotate(self, x: Floats) -> Floats:
        """Rotate `[tokens, heads, head_dim]` as ggml does for the architecture."""
        angles = np.arange(len(x))[:, None, None] * self.frequencies
        half = self.head_dim // 2
        first, second = (x[..., 0::2], x[..., 1::2]) if self.pairs else (x[..., :half], x[..., half:])
        turned = (first + 1j * second) * np.exp(1j * angles)
        both = [turned.real, turned.imag]
        made = np.stack(both, axis=-1).reshape(x.shape) if self.pairs else np.concatenate(both, axis=-1)
        return np.asarray(made, np.float32)

    def _attention(self, x: Floats, prefix: str) -> Floats:
        def project(name: str, heads: int) -> Floats:
            made = x @ self.weights[f"{prefix}{name}.weight"].T + self.weights.get(
                f"{prefix}{name}.bias", np.float32(0)
            )
            made = made.reshape(len(x), heads, self.head_dim)
            norm = self.weights.get(f"{prefix}{name}_norm.weight")
            return np.asarray(made if norm is None else self._norm(made, norm), np.float32)

        queries = self._rotate(project("attn_q", self.heads))
        shared = self.heads // self.kv_heads
        keys = np.repeat(self._rotate(project("attn_k", self.kv_heads)), shared, axis=1)
        values = np.repeat(project("attn_v", self.kv_heads), shared, axis=1)
        scores = np.einsum("qhd,khd->hqk", queries, keys) / np.float32(self.head_dim**0.5)
        behind = np.subtract.outer(np.arange(len(x)), np.arange(len(x)))
        scores = np.where((behind >= 0) & (behind < self.window), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", shares, values).reshape(len(x), -1)
        return np.asarray(mixed @ self.weights[prefix + "attn_output.weight"].T, np.float32)
