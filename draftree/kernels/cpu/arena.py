"""Memory for packed weights: one after the other in large regions, whose pages are large where the
system allows it. A pass reads all of them in order, and small pages cost it a tenth of its time.

In: sizes. Out: uint8 arrays that start on a cache line; a region lives as long as one of them. Also
zeros that take no memory before they are used.
"""

import mmap
from contextlib import suppress

import numpy as np

from draftree.kernels.cpu.form import LINE_BYTES

_REGION_BYTES = 256 << 20  # of addresses; only pages that were written take memory
_LARGE_PAGE = 2 << 20


class Arena:
    """Arrays are never given back one by one."""

    def __init__(self, region_bytes: int = _REGION_BYTES) -> None:
        self._region_bytes = region_bytes
        self._free = np.empty(0, dtype=np.uint8)  # the rest of the last region

    def take(self, count: int) -> np.ndarray:
        """Uninitialised uint8 [count] that starts on a cache line."""
        if len(self._free) < count:
            self._free = _new_region(max(count, self._region_bytes))
        taken = self._free[:count]
        self._free = self._free[-(-count // LINE_BYTES) * LINE_BYTES :]
        return taken

    def take_rest(self, count: int) -> np.ndarray | None:
        """Zeros in what is left of the last large page, which takes memory anyway."""
        is_large = hasattr(mmap, "MADV_HUGEPAGE") and len(self._free)
        rest = -self._free.ctypes.data % _LARGE_PAGE if is_large else 0
        return self.take(count) if count <= rest else None


def lazy_zeros(count: int) -> np.ndarray:
    """uint8 [count], on a cache line. Pages come when they are touched: the allocator would give
    memory that was used before, and clear it.
    """
    if not hasattr(mmap, "MAP_ANONYMOUS") or count < mmap.PAGESIZE:
        room = np.zeros(count + LINE_BYTES, dtype=np.uint8)
        start = -room.ctypes.data % LINE_BYTES
        return room[start : start + count]
    region = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(region, dtype=np.uint8)


def _new_region(count: int) -> np.ndarray:
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # Linux alone knows pages that grow
        room = np.empty(count + LINE_BYTES, dtype=np.uint8)
        return room[-room.ctypes.data % LINE_BYTES :]
    region = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without them
        region.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(region, dtype=np.uint8)
