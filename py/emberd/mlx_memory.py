"""How much memory MLX may hold on to: limits of its own on Apple silicon, and what is free for keys and values.

Memory that arrays no longer need stays with MLX for the next ones; without a limit that grows to what the largest prompt
took. And what is wired is not paged out between two requests: on Apple silicon the first token after a pause is as fast as any.
Which model is loaded is not known here.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Callable

CACHE_SHARE = 8
"""This part of the memory that a device recommends to use is what MLX may hold on to."""

_UNKNOWN = 2 << 30
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
    with suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return _UNKNOWN
