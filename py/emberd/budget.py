"""How much memory the keys and values of running requests may take, and who holds how much of it.

Counts blocks, and holds no memory itself: the rows of `kv.KvCache` are address space, to which the system gives memory
as tokens are written, page by page, and from which it takes it back when a row is released. So a request takes up what
its tokens need, rounded up to blocks of 64, and grows as its answer does; what is counted here is what can be
resident. What happens when there is no more is decided by the engine.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from emberd.kv import BLOCK

if TYPE_CHECKING:
    from emberd.engine import Request
    from emberd.kv import Layer

_WHERE_UNKNOWN = 1 << 30
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CONTAINER_USE = Path("/sys/fs/cgroup/memory.current")


class KvBudget:
    """Blocks of `BLOCK` tokens in every `Layer`, as many as `budget` bytes allow. `Request.room` says who holds what."""

    def __init__(self, layers: list[Layer], budget: int) -> None:
        # A head's 64 tokens lie together, and take whole pages.
        sizes = (BLOCK * each.width * np.dtype(each.dtype).itemsize for each in layers)
        pages = (each.heads * -(-size // mmap.PAGESIZE) for each, size in zip(layers, sizes, strict=True))
        self.block_bytes = sum(pages) * mmap.PAGESIZE
        self.capacity = max(budget, 0) // self.block_bytes
        """How many blocks there are."""
        self.taken = 0
        """How many of them are held."""

    @property
    def resident(self) -> int:
        """Bytes that the blocks which are held can take."""
        return self.taken * self.block_bytes

    def could_hold(self, tokens: int) -> bool:
        """Whether so many tokens have room where nobody else holds any."""
        return -(-tokens // BLOCK) <= self.capacity

    def has(self, tokens: int, spare: int) -> bool:
        """Whether so many tokens have room now, and `spare` blocks are left."""
        return -(-tokens // BLOCK) + spare <= self.capacity - self.taken

    def hold(self, request: Request, tokens: int) -> bool:
        """Lets a request hold room for `tokens` in all. Changes nothing where there is not enough left."""
        more = -(-tokens // BLOCK) - request.room // BLOCK
        if more > self.capacity - self.taken:
            return False
        if more > 0:
            self.taken += more
            request.room += more * BLOCK
        return True

    def give_back(self, request: Request) -> None:
        """Frees all that a request holds."""
        self.taken -= request.room // BLOCK
        request.room = 0

    def no_room(self, what: str, tokens: int) -> str:
        """Why a request fails that cannot hold the keys and values of so many tokens, even alone."""
        return refusal(what, -(-tokens // BLOCK) * self.block_bytes, self.capacity * self.block_bytes)


def refusal(what: str, needed: int, bytes: int) -> str:
    """Why a request fails for which there is no room, ever."""
    return (
        f"{what} needs {needed} bytes for keys and values, and there is room for {bytes}; "
        "hint: raise --kv-bytes, or make the prompt or its answer shorter"
    )


def default_kv_bytes() -> int:
    """Half of the memory that is free now; 1 GiB where the system does not tell."""
    free = free_memory()
    return _WHERE_UNKNOWN if free is None else free // 2


def free_memory() -> int | None:
    """Bytes that this process could take now; `None` where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        try:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):
            return None
    with suppress(OSError, ValueError):  # a container's own bound; outside of one there is no such file, or "max" in it
        free = min(free, max(int(_CONTAINER_LIMIT.read_text()) - int(_CONTAINER_USE.read_text()), 0))
    return free
