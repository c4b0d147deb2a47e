"""The keys and values of every sequence in an ONNX engine: one shared buffer a layer, one row a sequence.

A graph with GroupQueryAttention reads its past from such a buffer and writes the present into the same memory, so a
run copies nothing. Rows are laid out for the whole context, but the system gives them memory only page by page as
tokens are written, and takes it back when a row is released: resident memory follows the context in use. Who sits in
which row is decided elsewhere.
"""

from __future__ import annotations

import mmap
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

_BLOCK = 64
"""Tokens; a capacity of whole blocks lets rows start on a page: 64 tokens of 64 float32 are 16 KiB."""


class Layer(NamedTuple):
    """One tensor of the cache: the graph's names for its past and its present, and its shape for one token."""

    past: str
    present: str
    heads: int
    width: int
    dtype: str


class KvCache:
    """Buffers `[rows, heads, capacity, width]`, one for each `Layer`."""

    def __init__(self, layers: list[Layer], rows: int, context_length: int) -> None:
        # An odd number of blocks: at 128 of them every head starts 2 MiB after the last, all fall into the same sets of
        # the processor's caches, and a step over 8 rows takes 4 % longer (36.9 ms of processor time; 35.6 with 129).
        self.capacity = (-(-context_length // _BLOCK) | 1) * _BLOCK
        self._memory: list[mmap.mmap] = []
        self.buffers: list[NDArray[np.floating]] = []
        for layer in layers:
            shape = (rows, layer.heads, self.capacity, layer.width)
            memory, buffer = _reserve(shape, np.dtype(layer.dtype))
            self._memory.append(memory)
            self.buffers.append(buffer)

    def rows(self, first: int, end: int) -> list[NDArray[np.floating]]:
        """The rows `first..end` of every layer, as views."""
        return [buffer[first:end] for buffer in self.buffers]

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens of one row into another."""
        for buffer in self.buffers:
            buffer[target, :, :length] = buffer[source, :, :length]

    def release(self, row: int) -> None:
        """Gives a row's memory back to the system, where the system has a call for it."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        for memory, buffer in zip(self._memory, self.buffers, strict=True):
            size = buffer.strides[0]
            if size % mmap.PAGESIZE == 0:
                memory.madvise(mmap.MADV_DONTNEED, row * size, size)


def _reserve(shape: tuple[int, ...], dtype: DTypeLike) -> tuple[mmap.mmap, NDArray[np.floating]]:
    """Untouched address space for an array. NumPy's own asks for huge pages, where one token takes up 2 MiB."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if hasattr(mmap, "MAP_PRIVATE"):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        memory = mmap.mmap(-1, size, flags=flags)
    else:
        memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory, np.frombuffer(memory, dtype).reshape(shape)
