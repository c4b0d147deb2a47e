"""Keys and values of prompts and answers that were, by their tokens: a new prompt starts where an earlier one agrees.

What is kept is a tree of blocks of 64 tokens under one byte budget. A block is named by all tokens up to its end: the
path to it, compared in full and not by a hash, so two texts are never taken for one another. Texts with a common
beginning share its blocks; what follows it branches off. The last block of a text may hold fewer tokens, and of any
block the first tokens may be used alone, since a token's keys and values depend on nothing after it: a prefix is found
to the token, at the cost of one bisection a block.

What a block holds is never changed, only continued where it is not full. Blocks go when the budget is used up, the
least recently used first and each after those that build on it. Nothing here knows requests, rows or steps; calls come
from one thread, and nothing is held between two of them but the tree, so a block may go at any time.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from emberd.kv import BLOCK, BlockPool

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from emberd.kv import Layer

    Row = list[NDArray[np.floating]]
    """A row of the cache, one array `[heads, capacity, width]` a layer."""

_ID = np.dtype(">u4")
"""A token id in a block's name; with the highest byte first, names sort and branch as sequences of ids do."""

_LARGEST_DEFAULT = 1 << 30
_DEFAULT_WHERE_UNKNOWN = 256 << 20
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


class _Block:
    """Up to `BLOCK` tokens and their place in the pool. Of the blocks that follow one, none begins with another."""

    __slots__ = ("follow", "name", "names", "parent", "place")

    def __init__(self, parent: _Block | None, name: bytes, place: int) -> None:
        self.parent = parent
        self.name = name
        self.place = place
        self.names: list[bytes] = []
        """The names of `follow`, sorted."""
        self.follow: list[_Block] = []

    def nearest(self, name: bytes) -> tuple[_Block | None, int]:
        """The block among `follow` that shares the longest prefix with `name`, and that prefix's length in tokens."""
        at = bisect_left(self.names, name)
        best: tuple[_Block | None, int] = (None, 0)
        # Sorted sequences share the most with their neighbours.
        for candidate in self.follow[max(at - 1, 0) : at + 1]:
            shared = _shared(candidate.name, name)
            if shared > best[1]:
                best = (candidate, shared)
        return best

    def add(self, block: _Block) -> None:
        at = bisect_left(self.names, block.name)
        self.names.insert(at, block.name)
        self.follow.insert(at, block)

    def remove(self, block: _Block) -> None:
        at = bisect_left(self.names, block.name)
        del self.names[at], self.follow[at]


class Snapshots:
    """The tree. Lengths are tokens."""

    def __init__(self, layers: list[Layer], budget: int) -> None:
        """Keeps no more than `budget` bytes; with room for less than one block, nothing."""
        self._pool = BlockPool(layers, budget)
        self._root = _Block(None, b"", -1)
        self._recent: OrderedDict[_Block, None] = OrderedDict()
        """All blocks, the least recently used first. Those that follow a block stand before it: the first has none."""

    @property
    def resident(self) -> int:
        """Bytes of the blocks in use."""
        return self._pool.taken * self._pool.block_bytes

    def find(self, tokens: Sequence[int]) -> int:
        """How long a prefix of `tokens` is kept. It counts as used."""
        return sum(count for _, count in self._path(tokens))

    def restore(self, tokens: Sequence[int], row: Row) -> int:
        """Copies the longest prefix of `tokens` that is kept into the beginning of a row. Returns its length."""
        start = 0
        for block, count in self._path(tokens):
            self._pool.restore(block.place, row, start, count)
            start += count
        return start

    def save(self, tokens: Sequence[int], row: Row, most: int) -> int:
        """Keeps a row whose first `len(tokens)` tokens are `tokens`. Returns the length that is kept now.

        Copies what is not kept already, but into no more than `most` blocks; and keeps less than all where the budget
        has no room for more.
        """
        if not self._pool.capacity:
            return 0
        at, kept, copied = self._root, 0, 0
        path: list[_Block] = []
        for name in _names(tokens):
            count = len(name) // _ID.itemsize
            block, shared = at.nearest(name)
            if block is None or shared < count:
                if copied == most:
                    break
                if block is not None and len(block.name) == shared * _ID.itemsize:
                    at.remove(block)
                    block.name = name
                else:
                    place = self._place(path)
                    if place is None:
                        break
                    block, shared = _Block(at, name, place), 0
                self._pool.store(block.place, row, kept, shared, count)
                at.add(block)
                copied += 1
            path.append(block)
            kept += count
            at = block
        self._use(path)
        return kept

    def _path(self, tokens: Sequence[int]) -> list[tuple[_Block, int]]:
        """The blocks of the longest prefix of `tokens` that is kept, and how many tokens of each are in it."""
        path: list[tuple[_Block, int]] = []
        if not self._recent:
            return path
        at = self._root
        for name in _names(tokens):
            block, shared = at.nearest(name)
            if block is None:
                break
            path.append((block, shared))
            if shared < BLOCK:
                break
            at = block
        self._use([block for block, _ in path])
        return path

    def _use(self, path: list[_Block]) -> None:
        """Marks the blocks of a path, from the root on, as the most recently used, the first of them last."""
        for block in reversed(path):
            self._recent[block] = None
            self._recent.move_to_end(block)

    def _place(self, path: list[_Block]) -> int | None:
        """Room for a block after `path`; where there is none, that of the least recently used one outside the path."""
        place = self._pool.take()
        if place is not None:
            return place
        self._use(path)
        oldest = next(iter(self._recent), None)
        if oldest is None or oldest in path[-1:]:
            return None
        del self._recent[oldest]
        if oldest.parent is not None:
            oldest.parent.remove(oldest)
        self._pool.give_back(oldest.place)
        return self._pool.take()


def default_budget() -> int:
    """An eighth of the memory that is free now, at most 1 GiB; 256 MiB where the system does not tell (bytes)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        try:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):
            return _DEFAULT_WHERE_UNKNOWN
    with suppress(OSError, ValueError):  # a container's own bound; outside of one there is no such file, or "max" in it
        free = min(free, int(_CONTAINER_LIMIT.read_text()))
    return min(free // 8, _LARGEST_DEFAULT)


def _names(tokens: Sequence[int]) -> list[bytes]:
    """The names of the blocks that hold `tokens`."""
    whole, step = np.asarray(tokens, _ID).tobytes(), BLOCK * _ID.itemsize
    return [whole[start : start + step] for start in range(0, len(whole), step)]


def _shared(one: bytes, other: bytes) -> int:
    """The length of the common prefix of two names, in tokens."""
    size = min(len(one), len(other))
    # The highest bit in which they differ, all at once.
    difference = int.from_bytes(one[:size], "big") ^ int.from_bytes(other[:size], "big")
    return (8 * size - difference.bit_length()) // (8 * _ID.itemsize)
