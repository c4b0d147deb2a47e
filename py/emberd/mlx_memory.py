"""How much memory MLX may hold on to: limits of its own on Apple silicon, and who has how much of what is free for keys and values.

Memory that arrays no longer need stays with MLX for the next ones; without a limit that grows to what the largest prompt
took. And what is wired is not paged out between two requests: on Apple silicon the first token after a pause is as fast as any.
Which model is loaded is not known here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx

from emberd.budget import default_kv_bytes, refusal
from emberd.kv import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable

    from emberd.engine import Request

CACHE_SHARE = 8
"""This part of the memory that a device recommends to use is what MLX may hold on to."""

_RECOMMENDED = "max_recommended_working_set_size"


class Device(Protocol):
    """What is asked of a device; `mlx.core` is one."""

    def device_info(self) -> dict[str, Any]:
        """Facts; on Apple silicon `max_recommended_working_set_size` is among them, in bytes."""

    def set_wired_limit(self, limit: int, /) -> int:
        """Sets how many bytes are not paged out; returns the limit before."""

    def set_cache_limit(self, limit: int, /) -> int:
        """Sets how many bytes that no array needs are held on to; returns the limit before."""

    def get_active_memory(self) -> int:
        """Bytes of the arrays there are."""


def limit(device: Device | None = None) -> Callable[[], None]:
    """Sets the limits where the device recommends a size; returns what sets those from before again."""
    device = device or mx
    recommended = device.device_info().get(_RECOMMENDED)
    if not recommended:
        return lambda: None
    wired = device.set_wired_limit(int(recommended))
    cache = device.set_cache_limit(int(recommended) // CACHE_SHARE)

    def restore() -> None:
        device.set_wired_limit(wired)
        device.set_cache_limit(cache)

    return restore


def kv_budget(device: Device | None = None) -> int:
    """Half of the memory that is free, in bytes: what the keys and values of running requests may take by default."""
    device = device or mx
    recommended = device.device_info().get(_RECOMMENDED)
    if recommended:
        return max(int(recommended) - device.get_active_memory(), 0) // 2
    return default_kv_bytes()


class BatchBudget:
    """As `parts.Budget`, of caches that lie side by side, where each takes as much as the longest.

    A prompt that is read alone is counted as if it were among the others: it will be.
    """

    def __init__(self, size: Callable[[int], int], budget: int) -> None:
        """`size` says how many bytes the caches of one sequence of so many tokens take; all may take `budget` bytes."""
        self._size = size
        self._budget = max(budget, 0)
        self._rooms: dict[int, int] = {}
        """Tokens that each request holds room for."""

    @property
    def resident(self) -> int:
        """Bytes that those who hold room can take."""
        return len(self._rooms) * self._size(max(self._rooms.values())) if self._rooms else 0

    def could_hold(self, tokens: int) -> bool:
        """Whether so many tokens have room where nobody else holds any."""
        return self._size(_whole(tokens)) <= self._budget

    def has(self, tokens: int, spare: int) -> bool:
        """Whether one more request's tokens have room now; where some are to have room to grow, all grow by a block."""
        longest = max([_whole(tokens), *self._rooms.values()]) + (BLOCK if spare else 0)
        return (len(self._rooms) + 1) * self._size(longest) <= self._budget

    def hold(self, request: Request, tokens: int) -> bool:
        """Lets a request hold room for `tokens` in all. Changes nothing where there is not enough left."""
        if tokens <= request.room:
            return True
        room = _whole(tokens)
        rooms = self._rooms | {request.id: room}
        if len(rooms) * self._size(max(rooms.values())) > self._budget:
            return False
        self._rooms, request.room = rooms, room
        return True

    def give_back(self, request: Request) -> None:
        """Frees all that a request holds."""
        self._rooms.pop(request.id, None)
        request.room = 0

    def no_room(self, what: str, tokens: int) -> str:
        """Why a request fails that cannot hold the keys and values of so many tokens, even alone."""
        return refusal(what, self._size(_whole(tokens)), self._budget)


def _whole(tokens: int) -> int:
    """Rounded up to blocks, so that room is not asked for with every token."""
    return -(-tokens // BLOCK) * BLOCK
