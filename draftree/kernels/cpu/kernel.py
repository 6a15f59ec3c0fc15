"""A kernel: a Python function compiled once for this machine and kept on disk.

Compiled code is filed under a hash of all kernel sources, the numba version and the instruction
set, so a changed source never meets stale code.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numba
from numba import cfunc, njit, types
from numba.core import config as numba_config

from draftree import env
from draftree.kernels.cpu.isa import current_isa

_log = logging.getLogger("draftree")
_SIGNATURE = types.void(types.CPointer(types.int64), types.int64, types.int64, types.int64)


@cache
def code_dir() -> Path:
    """The folder for this version of the sources on this machine."""
    digest = hashlib.sha256(f"{numba.__version__} {current_isa().name}".encode())
    here = Path(__file__).parent
    for source in sorted((*here.glob("*.py"), *here.parent.glob("quant/*.py"))):
        digest.update(source.read_bytes())
    return env.cache_dir() / "kernels" / digest.hexdigest()[:16]


@contextmanager
def _code_cache() -> Iterator[None]:
    """Point numba at our folder while a function is declared; other users of numba keep theirs."""
    before = numba_config.CACHE_DIR
    numba_config.CACHE_DIR = str(code_dir())
    try:
        yield
    finally:
        numba_config.CACHE_DIR = before


def cached_njit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile on first call, without the interpreter lock, and keep the code on disk."""
    with _code_cache():
        return njit(nogil=True, cache=True, error_model="numpy")(function)


def _announce_once() -> None:
    """Say why the first start is slow, if nothing has been compiled for this machine yet."""
    marker = code_dir() / "announced"
    if not marker.exists():
        code_dir().mkdir(parents=True, exist_ok=True)
        marker.touch()
        _log.warning("Compiling CPU kernels for this machine; this happens once.")


class Kernel:
    """`function(args, ticket, thread, num_threads)`: args is an int64 array of sizes and
    addresses.

    Every thread of a team calls it at once; it does its own share. ticket is the address of a
    counter that starts at 0, for work that is shared out piece by piece: the first thread's, which
    all may use, or with those of the others behind it one for each (`take_item`).
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.name = function.__name__.strip("_")
        self._function = function

    @cached_property
    def _compiled(self) -> Any:  # numba's CFunc
        _announce_once()
        start = time.perf_counter()
        with _code_cache():
            compiled = cfunc(_SIGNATURE, cache=True, error_model="numpy")(self._function)
        _log.debug("kernel %s ready in %.2f s", self.name, time.perf_counter() - start)
        return compiled

    @property
    def address(self) -> int:
        return int(self._compiled.address)


def kernel(function: Callable[..., None]) -> Kernel:
    """Decorator: compile on first use."""
    return Kernel(function)
