"""Keys and values of prompts and answers that were, by their tokens: a new prompt starts where an earlier one agrees.

What is kept is a tree of blocks of 64 tokens for each salt, all of one model and under one byte budget. A block is
named by all tokens up to its end: the path to it, compared in full and not by a hash, so two texts are never taken for
one another. Texts with a common beginning share its blocks; what follows it branches off. The last block of a text may
hold fewer tokens, and of any block the first tokens may be used alone, since a token's keys and values depend on
nothing after it: a prefix is found to the token, at the cost of one bisection a block. So the ends of messages inside
a text need no snapshots of their own.

What a block holds is never changed, only continued where it is not full. Blocks go when the budget is used up, the
least recently used first and each after those that build on it. A text may have a name (`Named`): its blocks stay
until there are no others, and while someone is about to start from it they stay in any case. Nothing here knows
requests, rows or steps; calls come from one thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from emberd.budget import free_memory
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


class _Block:
    """Up to `BLOCK` tokens and their place in the pool. Of the blocks that follow one, none begins with another."""

    __slots__ = ("follow", "name", "named", "names", "parent", "place")

    def __init__(self, parent: _Block | None, name: bytes, place: int) -> None:
        self.parent = parent
        self.name = name
        self.place = place
        self.named = 0
        """Names of texts that it is a part of."""
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


class Named:
    """A text with a name: its blocks, and how many tokens they hold of it. The last may hold more of another text."""

    __slots__ = ("count", "forgotten", "leases", "path", "salt")

    def __init__(self, salt: str, path: list[_Block], count: int) -> None:
        self.salt = salt
        self.path = path
        self.count = count
        self.forgotten = False
        self.leases = 0
        """How many are about to start from it."""


class Snapshots:
    """The trees. Lengths are tokens; a `salt` tells which tree, and nothing of another is found."""

    def __init__(self, layers: list[Layer], budget: int) -> None:
        """Keeps no more than `budget` bytes; with room for less than one block, nothing."""
        self._pool = BlockPool(layers, budget)
        self._roots: dict[str, _Block] = {}
        self._recent: OrderedDict[_Block, None] = OrderedDict()
        """All blocks without a name, the least recently used first. Those that follow a block stand before it."""
        self._named: OrderedDict[int, Named] = OrderedDict()
        """By name, the least recently used first."""

    @property
    def resident(self) -> int:
        """Bytes of the blocks in use."""
        return self._pool.taken * self._pool.block_bytes

    def find(self, tokens: Sequence[int], salt: str = "", source: Named | None = None) -> int:
        """How long a prefix of `tokens` is kept, in `source` if that is given. It counts as used."""
        return sum(count for _, count in self._path(tokens, salt, source))

    def restore(self, tokens: Sequence[int], row: Row, salt: str = "", source: Named | None = None) -> int:
        """Copies the longest prefix of `tokens` that is kept into the beginning of a row. Returns its length."""
        start = 0
        for block, count in self._path(tokens, salt, source):
            self._pool.restore(block.place, row, start, count)
            start += count
        return start

    def save(self, tokens: Sequence[int], row: Row, most: int, salt: str = "") -> int:
        """Keeps a row whose first `len(tokens)` tokens are `tokens`. Returns the length that is kept now.

        Copies what is not kept already, but into no more than `most` blocks; and keeps less than all where the budget
        has no room for more, since nothing that has a name goes for it.
        """
        return self._keep(tokens, row, most, salt)[1]

    def save_as(self, name: int, tokens: Sequence[int], row: Row, salt: str = "") -> int:
        """Keeps a row as `save` does, in full, under a name that is not in use. Returns the length that is kept.

        It is less than all where the budget has no room for more beside what others are about to start from.
        """
        self.forget(name)
        path, count = self._keep(tokens, row, len(tokens), salt, named=True)
        if path:
            self._named[name] = Named(salt, path, count)
        for block in path:
            block.named += 1
            self._recent.pop(block, None)
        return count

    def forget(self, name: int) -> None:
        """Takes a name away; what had it goes when its turn comes. One that nothing has is no error."""
        named = self._named.pop(name, None)
        if named is not None:
            named.forgotten = True
            if not named.leases:
                self._let_go(named)

    def lease(self, name: int, salt: str = "") -> Named | None:
        """What has a name, to be kept until `release`; `None` where nothing of this salt has it."""
        named = self._named.get(name)
        if named is None or named.salt != salt:
            return None
        self._named.move_to_end(name)
        named.leases += 1
        return named

    def release(self, named: Named) -> None:
        """Ends a lease."""
        named.leases -= 1
        if not named.leases and named.forgotten:
            self._let_go(named)

    def _keep(
        self, tokens: Sequence[int], row: Row, most: int, salt: str, named: bool = False
    ) -> tuple[list[_Block], int]:
        """Saves, and returns the blocks that hold what is kept of `tokens`, and how many tokens that is."""
        path: list[_Block] = []
        if not self._pool.capacity:
            return path, 0
        at = self._roots.get(salt) or _Block(None, salt.encode(), -1)
        kept = copied = 0
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
                    place = self._place(path, named)
                    if place is None:
                        break
                    block, shared = _Block(at, name, place), 0
                self._pool.store(block.place, row, kept, shared, count)
                at.add(block)
                copied += 1
                if not path:
                    self._roots[salt] = at
            path.append(block)
            kept += count
            at = block
        self._use(path)
        return path, kept

    def _path(self, tokens: Sequence[int], salt: str, source: Named | None) -> list[tuple[_Block, int]]:
        """The blocks of the longest prefix of `tokens` that is kept, and how many tokens of each are in it."""
        path: list[tuple[_Block, int]] = []
        at = self._roots.get(salt)
        if at is None or (source is not None and source.salt != salt):
            return path
        if source is not None:
            tokens = tokens[: source.count]
        for number, name in enumerate(_names(tokens)):
            if source is None:
                block, shared = at.nearest(name)
                if block is None:
                    break
            else:
                block = source.path[number]
                shared = _shared(block.name, name)
                if not shared:
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
            if not block.named:
                self._recent[block] = None
                self._recent.move_to_end(block)

    def _let_go(self, named: Named) -> None:
        """Puts the blocks of what has no name any more among the others."""
        for block in named.path:
            block.named -= 1
        self._use(named.path)

    def _place(self, path: list[_Block], named: bool) -> int | None:
        """Room for a block after `path`; where there is none, that of the least recently used one outside the path."""
        while (place := self._pool.take()) is None:
            self._use(path)
            oldest = next(iter(self._recent), None)
            if oldest is not None and oldest not in path[-1:]:
                self._evict(oldest)
                continue
            name = next((name for name, each in self._named.items() if not each.leases), None) if named else None
            if name is None:
                return None
            self.forget(name)
        return place

    def _evict(self, block: _Block) -> None:
        """Frees a block that none follows."""
        del self._recent[block]
        parent = block.parent
        if parent is not None:
            parent.remove(block)
            if parent.parent is None and not parent.follow:
                self._roots.pop(parent.name.decode(), None)
        self._pool.give_back(block.place)


def default_budget() -> int:
    """An eighth of the memory that is free now, at most 1 GiB; 256 MiB where the system does not tell (bytes)."""
    free = free_memory()
    return _DEFAULT_WHERE_UNKNOWN if free is None else min(free // 8, _LARGEST_DEFAULT)


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
