"""Object code put into memory by LLVM's linker, without numba.

In: the bytes of an object file and the name of a function in it. Out: the function's address, or
None if it cannot be linked. Code stays in memory as long as the process.
"""

import ctypes
from functools import cache
from itertools import count
from typing import Any, Final

# Functions of numba's and what is called instead. A compiled function that raises is a mistake of
# ours, which ends the process; and none makes arrays of its own, so none is ever given up.
_INSTEAD: Final = {
    "numba_frexp": "frexp",
    "numba_gil_ensure": "abort",
    "numba_gil_release": "abort",
    "numba_do_raise": "abort",
    "numba_unpickle": "abort",
    "numba_runtime_build_excinfo_struct": "abort",
    "NRT_Free": "abort",
    "NRT_MemInfo_call_dtor": "abort",
}


def load_code(symbol: str, code: bytes) -> int | None:
    """The address of a function of an object file, which is now in executable memory."""
    return _loader().load(symbol, code)


class _Loader:
    def __init__(self) -> None:
        # Takes as long as all else that loading does, and a GPU needs none of it.
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self._jit = llvm.create_lljit_compiler(suppress_errors=True)
        self._new_library = llvm.JITLibraryBuilder
        self._names = map(str, count(1))
        process = ctypes.CDLL(None)
        self._instead = {name: _address(process, other) for name, other in _INSTEAD.items()}

    def load(self, symbol: str, code: bytes) -> int | None:
        library = self._new_library().add_object_img(code).add_current_process()
        for name, address in self._instead.items():
            library.import_symbol(name, address)
        try:
            loaded = library.export_symbol(symbol).link(self._jit, next(self._names))
        except RuntimeError:  # a damaged object, or one that needs a symbol which is not there
            return None
        loaded.detach()  # never unloaded: programs hold addresses, not owners
        return int(loaded[symbol])


@cache
def _loader() -> _Loader:
    return _Loader()


def _address(library: ctypes.CDLL, name: str) -> Any:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
