"""Writes `blocks.json`: random blocks of every quantized type that the importer reads, and what the `gguf` package makes of them.

    python tests/golden/make_blocks.py

Bytes and 32-bit floats (little-endian) are in hexadecimal. The Rust test wants the same floats, bit for bit.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np

SCALES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
}
"""Where in a block its 16-bit floats are."""


def blocks(name: str, count: int, seed: int) -> np.ndarray:
    """Return `count` random blocks as bytes; their floats are finite, of either sign, and sometimes subnormal or 0."""
    random = np.random.default_rng(seed)
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]
    made = random.integers(0, 256, (count, size), dtype=np.uint8)
    for at in SCALES[name]:
        floats = (random.standard_normal(count) * 10.0 ** random.integers(-8, 2, count)).astype(np.float16)
        floats[0] = 0
        made[:, at : at + 2] = floats.view(np.uint8).reshape(count, 2)
    return made


def main() -> None:
    """Write the file."""
    golden = {}
    for seed, name in enumerate(SCALES):
        kind = gguf.GGMLQuantizationType[name]
        # Of the larger ones fewer: 256 elements are in each.
        stored = blocks(name, 16 if gguf.GGML_QUANT_SIZES[kind][0] == 32 else 3, seed)
        values = gguf.quants.dequantize(stored, kind).astype("<f4")
        golden[name] = {"number": int(kind), "blocks": stored.tobytes().hex(), "values": values.tobytes().hex()}
    text = json.dumps(golden, indent=1)
    (Path(__file__).parent / "blocks.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
