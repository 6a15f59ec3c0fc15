"""Which dot-product instructions this CPU has, and so which kernel variant is used."""

import ctypes
import platform
from dataclasses import dataclass
from functools import cache

import llvmlite.binding as llvm

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
NEON_DOTPROD = Isa("neon-dotprod", 4)
PORTABLE = Isa("portable", 8)
ALL_ISAS = (AMX, AVX512_VNNI, AVX_VNNI, AVX2, NEON_DOTPROD, PORTABLE)


@cache
def _may_use_tiles() -> bool:
    """Ask the operating system (Linux) for the tile registers, which are off until wanted."""
    if platform.system() != "Linux":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def supported_isas() -> tuple[Isa, ...]:
    """What this machine can run, best first; the portable variant is always last."""
    features = llvm.get_host_cpu_features()
    machine = platform.machine().lower()
    found = []
    if machine in ("x86_64", "amd64"):
        if features.get("avx512vnni") and features.get("avx512vl"):
            if features.get("amx-int8") and features.get("gfni") and _may_use_tiles():
                found.append(AMX)
            found.append(AVX512_VNNI)
        if features.get("avxvnni"):
            found.append(AVX_VNNI)
        if features.get("avx2"):
            found.append(AVX2)
    if machine in ("aarch64", "arm64") and features.get("dotprod"):
        found.append(NEON_DOTPROD)
    return (*found, PORTABLE)


@cache
def current_isa() -> Isa:
    """The best variant, or the one that the environment asks for if the machine can run it."""
    supported = supported_isas()
    forced = env.forced_isa()
    return next((isa for isa in supported if isa.name == forced), supported[0])
