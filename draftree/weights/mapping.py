"""A file as read-only bytes in memory, without reading it. Knows no file format."""

import mmap
import os
import stat
from pathlib import Path

import numpy as np

from draftree.errors import CheckpointError


def map_file(path: Path) -> np.ndarray:
    """The whole file as a read-only uint8 [size] view, unmapped when its last view is gone."""
    try:
        # Non-blocking, so that a named pipe is refused below instead of waited for.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be opened: {error}.") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not an ordinary file.")
        if status.st_size == 0:
            raise CheckpointError(f"{path} is empty; download it again.")
        data = mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be mapped into memory: {error}.") from None
    finally:
        os.close(descriptor)
    return np.frombuffer(data, dtype=np.uint8)


def forget_file(view: np.ndarray) -> None:
    """Take the mapped file behind a view out of memory; what is read again comes from disk
    again.
    """
    mapping = _mapping_of(view)
    if mapping is not None:
        mapping.madvise(mmap.MADV_DONTNEED)


def forget_rows(view: np.ndarray) -> None:
    """The same for the pages that a view lies on alone."""
    mapping = _mapping_of(view)
    if mapping is not None:
        low, high = np.lib.array_utils.byte_bounds(view)
        base = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
        start = (low - base) // mmap.PAGESIZE * mmap.PAGESIZE
        mapping.madvise(mmap.MADV_DONTNEED, start, high - base - start)


def _mapping_of(view: np.ndarray) -> mmap.mmap | None:
    owner: object = view
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return owner if isinstance(owner, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED") else None
