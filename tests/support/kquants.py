"""Quantizes floats to K-quants, which the `gguf` package only reads: by the smallest and the largest value of each block.

llama.cpp searches for better scales; for tests it is enough that blocks look like those of a quantizer and not like noise. Where the
bits go is written from the format's description; that it is right shows when the package reads back what was written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Floats = NDArray[np.float64]


def quantized(values: NDArray[np.float32], name: str) -> Bytes | None:
    """Rows of whole super-blocks as bytes; `None` for a type that is not a K-quant."""
    if name not in KINDS:
        return None
    return KINDS[name](values.astype(np.float64).reshape(-1, 256)).reshape(len(values), -1)


def _half(values: Floats) -> Bytes:
    return np.ascontiguousarray(values.astype(np.float16)).view(np.uint8).reshape(len(values), 2)


def _affine(values: Floats, block: int, largest: int, steps: int) -> tuple[Bytes, Bytes, Bytes, Bytes, Bytes]:
    """Codes, whole scales and minimums, and their floats, for `w = d * s * q - e * m` with `s` and `m` up to `steps`."""
    blocks = values.reshape(len(values), -1, block)
    low = np.minimum(blocks.min(-1), 0)
    scales, minimums = (blocks.max(-1) - low) / largest, -low
    d, e = (np.float64(np.float16(each.max(-1, keepdims=True) / steps)) for each in (scales, minimums))
    s, m = (np.clip(np.rint(each / unit), 0, steps) for each, unit in ((scales, d), (minimums, e)))
    codes = np.clip(np.rint((blocks + (e * m)[..., None]) / np.maximum(d * s, 1e-9)[..., None]), 0, largest)
    return codes.astype(np.uint8), s.astype(np.uint8), m.astype(np.uint8), _half(d), _half(e)


def _symmetric(values: Floats, middle: int, steps: int) -> tuple[Bytes, NDArray[np.int64], Bytes]:
    """Codes, whole scales of blocks of 16, and their float, for `w = d * s * (q - middle)` with `s` from `-steps` to `steps - 1`."""
    blocks = values.reshape(len(values), 16, 16)
    peaks = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)[..., 0]
    d = np.float64(np.float16(np.abs(peaks).max(-1, keepdims=True) / middle / steps))
    s = np.clip(np.rint(-peaks / middle / d), -steps, steps - 1)
    step = (d * np.where(s == 0, 1, s))[..., None]
    codes = np.clip(np.rint(blocks / step) + middle, 0, 2 * middle - 1)
    return codes.astype(np.uint8), s.astype(np.int64), _half(d)


def _pairs(codes: Bytes) -> Bytes:
    """Two bits of each element: quarters of a half lie above one another."""
    quarters = codes.reshape(len(codes), 2, 4, 32)
    return np.bitwise_or.reduce(quarters << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=2).reshape(len(codes), 64)


def _q2_k(values: Floats) -> Bytes:
    codes, s, m, d, e = _affine(values, 16, 3, 15)
    return np.concatenate([s | m << 4, _pairs(codes), d, e], -1)


def _q3_k(values: Floats) -> Bytes:
    codes, s, d = _symmetric(values, 4, 32)
    flat = codes.reshape(len(codes), 8, 32)
    high = np.bitwise_or.reduce((flat >> 2) << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    steps = (s + 32).astype(np.uint8)
    low = steps[:, :8] & 15 | (steps[:, 8:] & 15) << 4
    upper = np.bitwise_or.reduce((steps >> 4).reshape(-1, 4, 4) << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=1)
    return np.concatenate([high, _pairs(codes & 3), low, upper, d], -1)


def _six_bit_pairs(s: Bytes, m: Bytes) -> Bytes:
    first = s[:, :4] | s[:, 4:] >> 4 << 6
    second = m[:, :4] | m[:, 4:] >> 4 << 6
    return np.concatenate([first, second, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4], -1)


def _nibbles(codes: Bytes) -> Bytes:
    both = codes.reshape(len(codes), 4, 2, 32) & 15
    return (both[:, :, 0] | both[:, :, 1] << 4).reshape(len(codes), 128)


def _q4_k(values: Floats) -> Bytes:
    codes, s, m, d, e = _affine(values, 32, 15, 63)
    return np.concatenate([d, e, _six_bit_pairs(s, m), _nibbles(codes)], -1)


def _q5_k(values: Floats) -> Bytes:
    codes, s, m, d, e = _affine(values, 32, 31, 63)
    high = np.bitwise_or.reduce((codes >> 4) << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    return np.concatenate([d, e, _six_bit_pairs(s, m), high, _nibbles(codes)], -1)


def _q6_k(values: Floats) -> Bytes:
    codes, s, d = _symmetric(values, 32, 128)
    low = codes.reshape(len(codes), 2, 2, 64) & 15
    low = (low[:, :, 0] | low[:, :, 1] << 4).reshape(len(codes), 128)
    return np.concatenate([low, _pairs(codes.reshape(len(codes), 256) >> 4), s.astype(np.int8).view(np.uint8), d], -1)


KINDS: dict[str, Callable[[Floats], Bytes]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
