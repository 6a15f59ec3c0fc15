"""Memory that loading needs and running does not, given back: that of LLVM, a library of a hundred
megabytes which kernels are compiled with, and what the allocator holds free.

The library's pages are those of a file. They come again from there by themselves when they are
needed. Knows Linux alone; elsewhere nothing happens.
"""

import ctypes
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

_LIBRARY, _MODULE = "libllvmlite", "llvmlite.binding"


def release_memory() -> None:
    """Take what is free, and LLVM's pages if it was needed at all, out of this process."""
    maps = Path("/proc/self/smaps")
    if not maps.exists() or not hasattr(mmap, "MADV_DONTNEED"):
        return
    process = ctypes.CDLL(None)
    if _MODULE in sys.modules:
        process.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for start, end in clean_ranges(maps.read_text(encoding="utf-8"), _LIBRARY):
            process.madvise(start, end - start, mmap.MADV_DONTNEED)
    if hasattr(process, "malloc_trim"):  # not every C library has it
        process.malloc_trim(0)


def clean_ranges(maps: str, library: str) -> Iterator[tuple[int, int]]:
    """Address ranges of a library that hold what its file holds: read-only, and no page of them was
    written before they became so (addresses that the loader fills in are lost if given back).
    """
    found: tuple[int, int] | None = None
    for line in maps.splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            is_ours = library in line and rest[0].startswith("r") and "w" not in rest[0]
            start, _, end = first.partition("-")
            found = (int(start, 16), int(end, 16)) if is_ours else None
        elif first == "Anonymous:" and found is not None and rest[0] == "0":
            yield found
