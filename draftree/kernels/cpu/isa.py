"""Which dot-product instructions this CPU has, and so which kernel variant is used."""

import ctypes
import platform
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

from draftree import env


@dataclass(frozen=True, slots=True)
class Isa:
    """A kernel variant. rows is the number of int32 lanes, and so of weight rows in a strip."""

    name: str
    rows: int


AMX = Isa("amx", 16)
AVX512_VNNI = Isa("avx512vnni", 16)
AVX_VNNI = Isa("avxvnni", 8)
AVX2 = Isa("avx2", 8)
NEON_I8MM = Isa("neon-i8mm", 4)
NEON_DOTPROD = Isa("neon-dotprod", 4)
PORTABLE = Isa("portable", 8)
ALL_ISAS = (AMX, AVX512_VNNI, AVX_VNNI, AVX2, NEON_I8MM, NEON_DOTPROD, PORTABLE)
NEON = (NEON_I8MM, NEON_DOTPROD)
_CPU_FIELDS = ("vendor", "model", "cpu family", "cpu implementer", "cpu part", "flags", "features")
_LINUX_WORDS = {
    "avx512vnni": "avx512_vnni",
    "avxvnni": "avx_vnni",
    "amx-int8": "amx_int8",
    "dotprod": "asimddp",
}


@cache
def _may_use_tiles() -> bool:
    """Ask the operating system (Linux) for the tile registers, which are off until wanted."""
    if platform.system() != "Linux":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


@cache
def describe_cpu() -> str:
    """The processor that code is compiled for: its model, and what it can do in Linux's words."""
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        with listing.open(encoding="utf-8") as lines:
            first = list(takewhile(str.strip, lines))  # of several that are alike
        return "".join(line for line in first if line.lower().startswith(_CPU_FIELDS))
    import llvmlite.binding as llvm

    found = [name for name, is_there in llvm.get_host_cpu_features().items() if is_there]
    words = [*(_LINUX_WORDS.get(name, name) for name in found), *_apple_words()]
    return " ".join((llvm.get_host_cpu_name(), *dict.fromkeys(words)))


def _apple_words() -> list[str]:
    """What macOS says of an arm64 processor, which the compiler does not list."""
    if platform.system() != "Darwin" or platform.machine() != "arm64":
        return []
    ask, value = ctypes.CDLL(None).sysctlbyname, ctypes.c_int64()
    found = []
    for word, name in (("asimddp", b"FEAT_DotProd"), ("i8mm", b"FEAT_I8MM")):
        value.value, size = 0, ctypes.c_size_t(ctypes.sizeof(value))
        failed = ask(b"hw.optional.arm." + name, ctypes.byref(value), ctypes.byref(size), None, 0)
        if not failed and value.value:
            found.append(word)
    return found


def supported_isas() -> tuple[Isa, ...]:
    """What this machine can run, best first; the portable variant is always last."""
    features = set(describe_cpu().split())
    machine = platform.machine().lower()
    found = []
    if machine in ("x86_64", "amd64"):
        if {"avx512_vnni", "avx512vl"} <= features:
            if {"amx_int8", "gfni"} <= features and _may_use_tiles():
                found.append(AMX)
            found.append(AVX512_VNNI)
        if "avx_vnni" in features:
            found.append(AVX_VNNI)
        if "avx2" in features:
            found.append(AVX2)
    if machine in ("aarch64", "arm64") and "asimddp" in features:
        found += [NEON_I8MM, NEON_DOTPROD] if "i8mm" in features else [NEON_DOTPROD]
    return (*found, PORTABLE)


@cache
def current_isa() -> Isa:
    """The best variant, or the one that the environment asks for if the machine can run it."""
    supported = supported_isas()
    forced = env.forced_isa()
    names = [isa.name for isa in ALL_ISAS]
    if forced not in (None, *names):
        raise ValueError(f"DRAFTREE_ISA is {forced!r}; known are {', '.join(names)}")
    return next((isa for isa in supported if isa.name == forced), supported[0])
