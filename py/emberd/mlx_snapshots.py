"""Caches of prompts and answers that were, by their tokens: a new prompt starts from one that it begins like.

What is kept are whole caches of single sequences, under one byte budget. Those that can be cut serve every prefix of
their tokens. Those that cannot, of recurrent models and of windows that have moved on, serve only prompts that begin with all of
their tokens, so the engine keeps them at more points (`next_point`). The fields of a request that say what it may use are
explained in `docs/port.md` under *Reuse*. Nothing here knows requests or steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from emberd.mlx_caches import can_cut, copied, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from emberd.mlx_model import Caches

FIRST_POINT = 64
"""Tokens; to read fewer again costs little."""

_ID = np.dtype(">u4")
"""A token id in a text's name; with the highest byte first, the highest bit in which two names differ is in the first id that does."""


class _Snapshot:
    __slots__ = ("bytes", "caches", "length", "name", "salt", "text", "whole")

    def __init__(self, tokens: Sequence[int], caches: Caches, salt: str, name: int | None) -> None:
        self.text = _text(tokens)
        self.length = len(tokens)
        self.caches = caches
        self.bytes = size(caches)
        self.whole = not can_cut(caches)
        """Whether it serves only as a whole."""
        self.salt = salt
        self.name = name

    def serves(self, text: bytes) -> int:
        """How many tokens of a text can be had from it."""
        shared = _shared(self.text, text)
        return 0 if self.whole and shared < self.length else shared


class Snapshots:
    """The snapshots. Lengths are tokens."""

    def __init__(self, budget: int) -> None:
        """Keeps no more than `budget` bytes."""
        self.budget = budget
        self._held: list[_Snapshot] = []
        """The least recently used first."""
        self.resident = 0
        """Bytes."""

    def lease(self, name: int, salt: str = "") -> _Snapshot | None:
        """What has a name, which then counts for who asked even once the name is forgotten; `None` where nothing of this salt has it."""
        return next((each for each in self._held if each.salt == salt and each.name == name), None)

    def release(self, source: _Snapshot) -> None:
        """Ends a lease: nothing, since what goes meanwhile serves nobody."""

    def find(self, tokens: Sequence[int], salt: str = "", source: _Snapshot | None = None) -> int:
        """How long a prefix of `tokens` can be had: of all of this salt, or of `source` alone. It counts as used."""
        found = self._find(tokens, salt, source)
        return found[1] if found is not None else 0

    def restore(
        self, tokens: Sequence[int], salt: str = "", source: _Snapshot | None = None
    ) -> tuple[Caches, int] | None:
        """Caches of the longest prefix of `tokens` that can be had, as by `find`, the caller's own, and its length."""
        found = self._find(tokens, salt, source)
        if found is None:
            return None
        snapshot, length = found
        return copied(snapshot.caches, None if length == snapshot.length else length), length

    def save(self, tokens: Sequence[int], caches: Caches, salt: str = "", name: int | None = None) -> None:
        """Keeps a copy of caches that hold these tokens. What does not fit is cut, or not kept."""
        if not tokens or not self.budget:
            return
        new = _Snapshot(tokens, caches, salt, name)
        if new.bytes > self.budget and not new.whole:
            tokens = tokens[: len(tokens) * self.budget // new.bytes]
            if not tokens:
                return
            new = _Snapshot(tokens, copied(caches, len(tokens)), salt, name)
        if new.bytes > self.budget:
            return
        for old in [each for each in self._held if each.salt == salt]:
            # A text that another one begins with is in that one, where it can be cut.
            if (
                old.length <= new.length
                and _shared(old.text, new.text) == old.length
                and (not new.whole or old.length == new.length)
            ):
                if old.name is None or (name is None and old.length == new.length):
                    new.name = old.name if new.name is None else new.name
                    self._remove(old)
            elif name is None and not old.whole and old.serves(new.text) == new.length:
                self._use(old)
                return
        while self.resident + new.bytes > self.budget:
            self._remove(next((each for each in self._held if each.name is None), self._held[0]))
        new.caches = copied(new.caches)
        self._held.append(new)
        self.resident += new.bytes

    def forget(self, name: int) -> None:
        """Takes a snapshot's name away; what it holds serves on, as what has no name does."""
        for each in self._held:
            if each.name == name:
                each.name = None

    def clear(self) -> None:
        """Forgets everything."""
        self._held.clear()
        self.resident = 0

    def _find(self, tokens: Sequence[int], salt: str, source: _Snapshot | None) -> tuple[_Snapshot, int] | None:
        text = _text(tokens)
        allowed = [each for each in self._held if (each.salt == salt if source is None else each is source)]
        # Of those that serve as much, the one last used.
        best = max(reversed(allowed), key=lambda each: each.serves(text), default=None)
        if best is None or not (length := best.serves(text)):
            return None
        self._use(best)
        return best, length

    def _use(self, snapshot: _Snapshot) -> None:
        self._held.remove(snapshot)
        self._held.append(snapshot)

    def _remove(self, snapshot: _Snapshot) -> None:
        self._held.remove(snapshot)
        self.resident -= snapshot.bytes
        snapshot.caches = []  # Somebody may still have a lease.


def next_point(tokens: int) -> int:
    """Where a prompt of which so many tokens have been read is kept next, if its caches cannot be cut.

    Each of these points comes after twice as many tokens as the last. So a prompt that shares a beginning with another one starts after
    at least half of that, and all points together hold no more than twice what the last one does.
    """
    point = FIRST_POINT
    while point <= tokens:
        point *= 2
    return point


def _text(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, _ID).tobytes()


def _shared(one: bytes, other: bytes) -> int:
    """The length of the common prefix of two names, in tokens."""
    count = min(len(one), len(other))
    difference = int.from_bytes(one[:count], "big") ^ int.from_bytes(other[:count], "big")
    return (8 * count - difference.bit_length()) // (8 * _ID.itemsize)
