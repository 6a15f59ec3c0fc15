"""Which dot-product instructions this CPU has, and so which kernel variant is used."""

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


AVX512_VNNI = Isa("avx512vnni", 16)
AVX_VNNI = Isa("avxvnni", 8)
AVX2 = Isa("avx2", 8)
NEON_I8MM = Isa("neon-i8mm", 4)
NEON_DOTPROD = Isa("neon-dotprod", 4)
PORTABLE = Isa("portable", 8)
ALL_ISAS = (AVX512_VNNI, AVX_VNNI, AVX2, NEON_I8MM, NEON_DOTPROD, PORTABLE)


def supported_isas() -> tuple[Isa, ...]:
    """What this machine can run, best first; the portable variant is always last."""
    features = llvm.get_host_cpu_features()
    machine = platform.machine().lower()
    found = []
    if machine in ("x86_64", "amd64"):
        if features.get("avx512vnni") and features.get("avx512vl"):
            found.append(AVX512_VNNI)
        if features.get("avxvnni"):
            found.append(AVX_VNNI)
        if features.get("avx2"):
            found.append(AVX2)
    elif machine in ("aarch64", "arm64"):
        if features.get("i8mm"):
            found.append(NEON_I8MM)
        if features.get("dotprod"):
            found.append(NEON_DOTPROD)
    return (*found, PORTABLE)


@cache
def current_isa() -> Isa:
    """The best variant, or the one that the environment asks for if the machine can run it."""
    supported = supported_isas()
    forced = env.forced_isa()
    return next((isa for isa in supported if isa.name == forced), supported[0])
