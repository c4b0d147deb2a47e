"""The keys and values of every sequence in an ONNX engine: one shared buffer a layer, one row a sequence.

Beside the rows that a graph works on lies a pool of blocks, in which snapshots of rows are kept. A graph with GroupQueryAttention reads its past from such a buffer and writes the present into the same memory, so a
run copies nothing. Rows are laid out for the whole context, but the system gives them memory only page by page as
tokens are written, and takes it back when a row is released: resident memory follows the context in use. Who sits in
which row, and what a block holds, is decided elsewhere.
"""

from __future__ import annotations

import mmap
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

BLOCK = 64
"""Tokens; a capacity of whole blocks lets rows start on a page: 64 tokens of 64 float32 are 16 KiB."""

_ALIGNED = 64
"""Bytes: what is copied to and fro starts on a line of the processor's caches."""


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
        self.capacity = (-(-context_length // BLOCK) | 1) * BLOCK
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

    def row(self, row: int) -> list[NDArray[np.floating]]:
        """One row of every layer, `[heads, capacity, width]`, as views."""
        return [buffer[row] for buffer in self.buffers]

    def move(self, source: int, target: int, length: int) -> None:
        """Moves the first `length` tokens of one row into another, and gives the memory of theirs back tensor by tensor."""
        for index, buffer in enumerate(self.buffers):
            buffer[target, :, :length] = buffer[source, :, :length]
            self._release(index, source)

    def release(self, row: int) -> None:
        """Gives a row's memory back to the system, where the system has a call for it."""
        for index in range(len(self.buffers)):
            self._release(index, row)

    def _release(self, index: int, row: int) -> None:
        size = self.buffers[index].strides[0]
        if size % mmap.PAGESIZE == 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._memory[index].madvise(mmap.MADV_DONTNEED, row * size, size)


class BlockPool:
    """Up to `budget` bytes of blocks, each with room for the keys and values of `BLOCK` tokens in every `Layer`.

    All blocks lie in one reservation, so no more than the budget is ever resident, and a block that is given back gives
    its memory back to the system.
    """

    def __init__(self, layers: list[Layer], budget: int) -> None:
        offsets: list[int] = []
        size = 0
        for layer in layers:
            offsets.append(size)
            size += -(-layer.heads * BLOCK * layer.width * np.dtype(layer.dtype).itemsize // _ALIGNED) * _ALIGNED
        self.block_bytes = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.capacity = budget // self.block_bytes
        """How many blocks there are."""
        self._fresh = 0
        """Blocks from here on have never been taken."""
        self._free: list[int] = []
        self._layers: list[NDArray[np.floating]] = []
        if not self.capacity:
            return
        self._memory, buffer = _reserve((self.capacity, self.block_bytes), np.uint8)
        for layer, offset in zip(layers, offsets, strict=True):
            dtype = np.dtype(layer.dtype)
            width = layer.width * dtype.itemsize
            strides = (self.block_bytes, BLOCK * width, width, dtype.itemsize)
            shape = (self.capacity, layer.heads, BLOCK, layer.width)
            self._layers.append(np.ndarray(shape, dtype, buffer, offset, strides))

    @property
    def taken(self) -> int:
        """How many blocks are in use."""
        return self._fresh - len(self._free)

    def take(self) -> int | None:
        """A block that nobody uses; `None` when there is none."""
        if self._free:
            return self._free.pop()
        if self._fresh == self.capacity:
            return None
        self._fresh += 1
        return self._fresh - 1

    def give_back(self, block: int) -> None:
        """Frees a block."""
        self._free.append(block)
        if hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED, block * self.block_bytes, self.block_bytes)

    def store(self, block: int, row: list[NDArray[np.floating]], start: int, first: int, end: int) -> None:
        """Copies tokens `first..end` of a block from a row (`[heads, capacity, width]` a layer), where it is at `start`."""
        for held, buffer in zip(self._layers, row, strict=True):
            held[block, :, first:end] = buffer[:, start + first : start + end]

    def restore(self, block: int, row: list[NDArray[np.floating]], start: int, count: int) -> None:
        """Copies the first `count` tokens of a block into a row, to `start`."""
        for held, buffer in zip(self._layers, row, strict=True):
            buffer[:, start : start + count] = held[block, :, :count]


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
