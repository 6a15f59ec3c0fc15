"""Object files of the compiler, put into memory without it: ELF for x86-64 and arm64, as numba
writes it.

In: the bytes of a relocatable object and the name of a function. Out: the function's address, or
None if there is anything that is not known here; then the compiler's own linker has to do it. Code
stays in memory as long as the process.
"""

import ctypes
import mmap
import platform
import struct
import sys
from dataclasses import dataclass
from functools import cache
from typing import Final

from draftree.kernels.cpu.relocation import MACHINES, Machine, UnknownCode

_IDENT: Final = b"\x7fELF\x02\x01\x01"  # 64 bits, little-endian
_RELOCATABLE = 1
_PROGBITS, _SYMTAB, _RELA, _NOBITS = 1, 2, 4, 8
_WRITE, _ALLOC = 1, 2
_UNDEFINED = 0
_FILE_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
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


@dataclass(frozen=True, slots=True)
class _Section:
    kind: int
    flags: int
    offset: int
    size: int
    link: int  # of a symbol table: the section of its names
    info: int  # of relocations: the section that they change
    align: int


def can_link() -> bool:
    return sys.platform == "linux" and platform.machine() in MACHINES


def link(code: bytes, symbol: str) -> int | None:
    """The address of a function of an object file, whose sections now lie in executable memory."""
    try:
        return _Object(code).place(symbol)
    except (UnknownCode, struct.error, ValueError, IndexError, OSError):
        return None


class _Object:
    def __init__(self, code: bytes) -> None:
        self._code = code
        ident, kind, machine, *_, sections_at, _, _, _, _, size, count, _ = (
            _FILE_HEADER.unpack_from(code)
        )
        self._machine: Machine = MACHINES[platform.machine()]
        known = ident.startswith(_IDENT) and (kind, machine) == (_RELOCATABLE, self._machine.number)
        if not known or size != _SECTION.size:
            raise UnknownCode
        self._sections = []
        for i in range(count):
            fields = _SECTION.unpack_from(code, sections_at + i * size)
            _, kind, flags, _, *rest, _ = fields
            self._sections.append(_Section(kind, flags, *rest))
        self._places: dict[int, int] = {}  # of loaded sections, in the image
        self._stubs: dict[str, int] = {}  # of functions elsewhere, in the image
        self._base = 0

    def place(self, symbol: str) -> int:
        size = 0
        for i, section in enumerate(self._sections):
            if section.flags & _ALLOC and section.kind in (_PROGBITS, _NOBITS) and section.size:
                if section.flags & _WRITE or section.kind == _NOBITS:
                    raise UnknownCode
                size = -(-size // section.align) * section.align
                self._places[i] = size
                size += section.size
        symbols = self._symbols()
        elsewhere = {name for name, section, _ in symbols if section == _UNDEFINED and name}
        for name in sorted(elsewhere):
            size = -(-size // 8) * 8
            self._stubs[name] = size
            size += self._machine.stub_bytes
        image = bytearray(size)
        for i, at in self._places.items():
            section = self._sections[i]
            image[at : at + section.size] = self._content(section)
        self._base = _new_pages(size)
        self._relocate(image, symbols)
        entry = next((s for s in symbols if s[0] == symbol and s[1] in self._places), None)
        if entry is None:
            raise UnknownCode
        ctypes.memmove(self._base, bytes(image), size)
        _make_executable(self._base, size)
        return self._address(entry)

    def _content(self, section: _Section) -> bytes:
        content = self._code[section.offset : section.offset + section.size]
        if len(content) != section.size:
            raise UnknownCode
        return content

    def _symbols(self) -> list[tuple[str, int, int]]:
        """Name, section and place in it of each symbol."""
        table = next((s for s in self._sections if s.kind == _SYMTAB), None)
        if table is None:
            raise UnknownCode
        names = self._content(self._sections[table.link])
        found = []
        for name, _, _, section, value, _ in _SYMBOL.iter_unpack(self._content(table)):
            found.append((names[name : names.index(b"\0", name)].decode(), section, value))
        return found

    def _relocate(self, image: bytearray, symbols: list[tuple[str, int, int]]) -> None:
        for section in self._sections:
            if section.kind != _RELA or section.info not in self._places:
                continue
            start = self._places[section.info]
            for offset, info, addend in _RELOCATION.iter_unpack(self._content(section)):
                kind, place, symbol = info & 0xFFFFFFFF, start + offset, symbols[info >> 32]
                stub = self._stubs.get(symbol[0], 0)
                value = self._address(symbol)
                self._machine.patch(image, self._base, place, kind, value + addend, stub)

    def _address(self, symbol: tuple[str, int, int]) -> int:
        name, section, value = symbol
        if section in self._places:
            return self._base + self._places[section] + value
        if section != _UNDEFINED:
            raise UnknownCode
        return _find(name)


@cache
def _process() -> ctypes.CDLL:
    """All that is loaded; the mathematical functions may be in a library of their own."""
    return ctypes.CDLL("libm.so.6", use_errno=True)


@cache
def _find(name: str) -> int:
    """Where a function of the C library or of Python is."""
    wanted = _INSTEAD.get(name, name)
    for library in (ctypes.pythonapi, _process()):
        if hasattr(library, wanted):
            address = ctypes.cast(getattr(library, wanted), ctypes.c_void_p).value
            assert address
            return address
    raise UnknownCode


def _new_pages(size: int) -> int:
    map_pages = _process().mmap
    map_pages.restype = ctypes.c_void_p
    map_pages.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = map_pages(None, size, access, kind, -1, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError("no memory for compiled code")
    return int(address)


def _make_executable(address: int, size: int) -> None:
    mprotect = _process().mprotect
    mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if mprotect(address, size, mmap.PROT_READ | mmap.PROT_EXEC) != 0:
        raise OSError("compiled code may not be made executable")
    if platform.machine() == "aarch64":  # caches of instructions and of data are two there
        clear_cache = getattr(ctypes.CDLL("libgcc_s.so.1"), "__clear_cache", None)
        if clear_cache is None:
            raise OSError("new code cannot be announced")
        clear_cache.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        clear_cache(address, address + size)
