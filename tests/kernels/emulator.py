"""Runs CUDA sources on the CPU: a `Gpu` whose kernels are compiled as C++ and work on CPU tensors.

In: a `KernelSource`; out: something that launches like `compile.Kernel` and raises where a real
chip would hang or give rubbish. See emulator.h for what it checks, emulator_device.h and
emulator_twins.h for what it knows, emulator.cpp for how. Blocks run in turn, so one must not wait
for a later one unless they were launched together.
"""

import ctypes
import hashlib
import mmap
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

from draftree import env
from draftree.kernels.cuda.compile import Argument, Gpu, KernelSource

STACK_BYTES = 128 * 1024
MAX_THREADS = 1024
HEADERS = ("emulator.h", "emulator_device.h", "emulator_twins.h")
COMMON = "emulator.cpp"
FLAGS = (
    *("-std=c++17", "-g0", "-w", "-fPIC", "-fsigned-char", "-ffp-contract=off"),
    *("-fno-strict-aliasing", "-fwrapv", "-fno-stack-protector"),
)
# Of kernels, which are many: fast to compile, and checked.
KERNEL_FLAGS = ("-O1", "-fsanitize=alignment,bounds", "-fno-sanitize-recover=all")
# Instructions that take a tenth or more off launches and leave every bit as it is.
WIDE_FLAGS = {"avx2": "-mavx2", "f16c": "-mf16c", "fma": "-mfma"}
DYNAMIC_SHARED = re.compile(
    r"extern\s+__shared__\s+(?:__align__|alignas)?(?:\([^)]*\))?([^;\[]*?)(\w+)\s*\[\s*\]\s*;"
)
LAUNCH = """
}}
static const unsigned long long* emulator_words;
extern "C" const char* emulator_signature() {{ return emulator::signature(&{name}); }}
extern "C" const char* emulator_launch(const unsigned long long* words, const unsigned* grid,
    unsigned threads, unsigned shared_bytes, unsigned is_cooperative, char* stacks,
    unsigned long long stack_bytes) {{
  emulator_words = words;
  return emulator::launch([] {{ emulator::call(&{name}, emulator_words); }}, grid, threads,
                          shared_bytes, is_cooperative, stacks, stack_bytes);
}}
"""


@dataclass(frozen=True)
class Snippet(KernelSource):
    """A kernel written in a test, behind some files of the package."""

    code: str = ""

    def text(self) -> str:
        return super().text() + self.code


class EmulationError(RuntimeError):
    """A kernel did what a chip would hang at or answer with rubbish."""


def emulated_gpu(arch: int = 80) -> Gpu:
    """A small chip on the CPU; from arch 90 on with bulk copies, 90 with warpgroups' matrices."""
    shared = 233472 if arch == 90 else 167936
    return Gpu(0, arch, 4, shared, shared - 1024, partial(EmulatedKernel, arch=arch))


def host_text(source: KernelSource) -> str:
    """The source as C++ behind the headers: in an unnamed namespace, with a way to call it."""
    shared = r"\1* const \2 = reinterpret_cast<\1*>(emulator::dynamic_shared);"
    text = DYNAMIC_SHARED.sub(shared, source.text())
    where = f'#line 1 "{"+".join(source.files)}"'
    return f"namespace {{\n{where}\n{text}{LAUNCH.format(name=source.name)}"


def build(source: KernelSource, arch: int) -> Path:
    """A shared library, compiled once for the same text and compiler."""
    flags = (*FLAGS, *_wide_flags(), *KERNEL_FLAGS, f"-D__CUDA_ARCH__={arch * 10}")
    header, text = _build_headers(flags), host_text(source)
    digest = _digest(header.name, text)
    path = header.parent / f"{source.name}_{digest}.so"
    if not path.exists():
        # The usual linker takes a third of the time for a short kernel.
        linker = ("-fuse-ld=gold",) if shutil.which("ld.gold") else ()
        common = ("-x", "none", str(header.with_suffix(".o")))
        arguments = ("-shared", *linker, "-include", str(header), "-x", "c++", "-", *common, *flags)
        _compile(arguments, text, path)
    return path


@cache
def _wide_flags() -> tuple[str, ...]:
    """What this processor has, where the system says so."""
    info = Path("/proc/cpuinfo")
    words = set(info.read_text(encoding="utf-8").split()) if info.exists() else set()
    return tuple(flag for name, flag in WIDE_FLAGS.items() if name in words)


@cache
def _build_headers(flags: tuple[str, ...]) -> Path:
    """The headers as one file, beside it what the compiler makes of it to save time later, and what
    all kernels have in common.
    """
    folder = Path(__file__).parent
    *texts, common = ((folder / name).read_text(encoding="utf-8") for name in (*HEADERS, COMMON))
    version = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True)
    digest = _digest(version.stdout, platform.machine(), *flags, *texts, common)
    path = env.cache_dir() / "emulated" / f"emulator_{digest}.h"
    compiled = path.with_suffix(".h.gch")
    if not compiled.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(texts), encoding="utf-8")
        once = ("-c", "-O2", "-x", "c++", "-", *FLAGS, *_wide_flags())
        _compile(once, "".join((*texts, common)), path.with_suffix(".o"))
        _compile(("-x", "c++-header", str(path), *flags), "", compiled)
    return path


def _compile(arguments: tuple[str, ...], text: str, path: Path) -> None:
    scratch = path.with_suffix(f".{os.getpid()}")
    command = ["g++", *arguments, "-o", str(scratch)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=1200)
    if done.returncode:
        raise EmulationError(f"this is not C++ that runs here:\n{done.stderr[:4000]}")
    scratch.replace(path)  # another process never sees half a file


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:24]


class EmulatedKernel:
    """A kernel of an emulated GPU; launches return when it is done."""

    def __init__(self, source: KernelSource, arch: int) -> None:
        # PyDLL keeps the interpreter's lock: a library can run one launch at a time.
        library = ctypes.PyDLL(str(build(source, arch)))
        self._name = source.name
        self._launch = library.emulator_launch
        self._launch.restype = library.emulator_signature.restype = ctypes.c_char_p
        self._kinds: str = library.emulator_signature().decode()

    def launch(
        self,
        grid: tuple[int, ...],
        block: int,
        *args: Argument,
        shared_bytes: int = 0,
        is_chained: bool = False,
        is_cooperative: bool = False,
        is_joint: bool = False,
    ) -> None:
        is_cooperative |= is_joint
        if not 0 < block <= MAX_THREADS or not 0 < len(grid) <= 3 or min(grid) < 1:
            raise EmulationError(f"{self._name}: no launch of {grid} blocks of {block} threads")
        kinds = "".join(map(_kind, args))
        if kinds != self._kinds:
            raise EmulationError(f"{self._name} takes arguments {self._kinds}, not {kinds}")
        words = (ctypes.c_uint64 * max(1, len(args)))(*map(_word, args))
        sizes = (ctypes.c_uint32 * 3)(*grid, *[1] * (3 - len(grid)))
        num_stacks = block * grid[0] if is_cooperative else MAX_THREADS
        stacks = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(_stacks(num_stacks))))
        shape = map(ctypes.c_uint32, (block, shared_bytes, is_cooperative))
        error = self._launch(words, sizes, *shape, stacks, ctypes.c_uint64(STACK_BYTES))
        if error:
            raise EmulationError(f"{self._name}: {error.decode()}")


def _kind(value: Argument) -> str:
    if value is None or isinstance(value, torch.Tensor):
        return "p"
    return "f" if isinstance(value, float) else "i"


def _word(value: Argument) -> int:
    if value is None:
        return 0
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise EmulationError(f"a tensor on {value.device} for an emulated GPU")
        return value.data_ptr()
    if isinstance(value, float):
        return ctypes.c_uint32.from_buffer(ctypes.c_float(value)).value
    if not -(2**31) <= value < 2**31:
        raise OverflowError(f"{value} does not fit into 32 bits")
    return value & 0xFFFFFFFF


@cache
def _stacks(count: int) -> mmap.mmap:
    return mmap.mmap(-1, STACK_BYTES * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
