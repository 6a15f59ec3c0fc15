"""A kernel: a Python function compiled once for this machine and kept on disk.

Object code is filed under a hash of all kernel sources, the compiler's version and the instruction
set, so a changed source never meets stale code. What is on disk is loaded without numba.
"""

import ctypes
import hashlib
import logging
import time
from collections.abc import Callable
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from types import CodeType
from typing import Any

from draftree import env
from draftree.kernels.cpu.isa import NEON, NEON_I8MM, current_isa, describe_cpu
from draftree.kernels.cpu.jit import realize
from draftree.kernels.cpu.loader import load_code
from draftree.kernels.cpu.store import is_writable, read_code, write_code

_log = logging.getLogger("draftree")
_KERNEL = "words int int int"
# What stands in a signature: numba's type, and that of an argument from Python.
_TYPES: dict[str, tuple[str, Any]] = {
    "words": ("int64*", ctypes.c_void_p),
    "int": ("int64", ctypes.c_int64),
    "float": ("float64", ctypes.c_double),
    "array": ("int64", ctypes.py_object),  # the address of the object (view.py)
}


@cache
def code_dir() -> Path:
    """The folder for this version of the sources on this machine."""
    compiler = f"{version('numba')} {version('llvmlite')} {current_isa().name}"
    digest = hashlib.sha256(compiler.encode())
    here = Path(__file__).parent
    for source in sorted((*here.glob("*.py"), *here.parent.glob("quant/*.py"))):
        digest.update(source.read_bytes())
    return env.cache_dir() / "kernels" / digest.hexdigest()[:16]


def _code_words(code: CodeType) -> tuple[object, ...]:
    constants = [_code_words(c) if isinstance(c, CodeType) else c for c in code.co_consts]
    return code.co_code, code.co_names, repr(constants)


class Compiled:
    """A C function made of a Python function, which may close over plain values only: a compiled
    function among them would be another one in every process, and code on disk never found again.

    signature: a word of _TYPES for each argument, then "-> " and that of what is returned, if
    anything is.
    """

    def __init__(self, function: Callable[..., Any], signature: str) -> None:
        self.name = function.__name__.strip("_")
        self._function = function
        self._signature = signature

    @cached_property
    def key(self) -> str:
        """A digest of what is compiled, for which processor."""
        function = self._function
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        assert all(isinstance(cell, bool | int | float | str) for cell in cells), self.name
        assert function.__defaults__ is None, self.name
        place = function.__module__, function.__qualname__, self._signature
        code = _code_words(function.__code__)
        words = (code_dir().name, describe_cpu(), place, function.__code__.co_freevars, cells, code)
        return hashlib.sha256(repr(words).encode()).hexdigest()

    @cached_property
    def address(self) -> int:
        kept = read_code(code_dir(), self.name, self.key)
        address = load_code(*kept) if kept else None
        return self._compile() if address is None else address

    def _compile(self) -> int:
        from numba import cfunc
        from numba.core.compiler_lock import global_compiler_lock

        is_writable(code_dir())  # says why this takes a while
        start = time.perf_counter()
        _name_features()
        with global_compiler_lock:
            realize(self._function)
            compiled = cfunc(self._numba_signature(), error_model="numpy")(self._function)
            code = compiled._library._get_compiled_object()
        _log.debug("kernel %s compiled in %.2f s", self.name, time.perf_counter() - start)
        address = load_code(compiled.native_name, code)
        if address is None:
            _log.debug("kernel %s cannot be kept", self.name)
            self._alive = compiled
            return int(compiled.address)
        write_code(code_dir(), self.name, self.key, compiled.native_name, code)
        return address

    def _numba_signature(self) -> Any:
        from numba import types

        def numba_type(word: str) -> Any:
            name = _TYPES[word][0]
            kind = getattr(types, name.rstrip("*"))
            return types.CPointer(kind) if name.endswith("*") else kind

        words, _, result = self._signature.partition(" -> ")
        returned = numba_type(result) if result else types.void
        return returned(*map(numba_type, words.split()))


class Kernel(Compiled):
    """`function(args, ticket, thread, num_threads)`: args is an int64 array of sizes and
    addresses.

    Every thread of a pool calls it at once; it does its own share. ticket is the address of a
    counter that starts at 0, for work that is shared out piece by piece: the first thread's, which
    all may use, or with those of the others behind it one for each (`take_item`).
    """

    def __init__(self, function: Callable[..., None]) -> None:
        super().__init__(function, _KERNEL)


class Native(Compiled):
    """A compiled function that Python calls, without the interpreter lock."""

    @cached_property
    def _call(self) -> Callable[..., Any]:
        words, _, result = self._signature.partition(" -> ")
        kinds = [_TYPES[word][1] for word in words.split()]
        return ctypes.CFUNCTYPE(_TYPES[result][1] if result else None, *kinds)(self.address)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)


def kernel(function: Callable[..., None]) -> Kernel:
    """Decorator: compile on first use."""
    return Kernel(function)


def native(signature: str) -> Callable[[Callable[..., Any]], Native]:
    """Decorator: compile on first call."""
    return lambda function: Native(function, signature)


def _name_features() -> None:
    """Of an arm64 processor the compiler knows what belongs to its name; if the name is newer than
    the compiler, it would refuse instructions that are there. Must come before it is first used.
    """
    from numba.core import codegen, config

    if current_isa() in NEON and config.CPU_FEATURES is None:
        own = ["+dotprod", *(["+i8mm"] if current_isa() == NEON_I8MM else [])]
        config.CPU_FEATURES = ",".join(filter(None, [codegen.get_host_cpu_features(), *own]))
