"""CUDA C++ to loaded kernels: compiled by NVRTC for the chip at hand, kept on disk as machine code.

In: a `KernelSource` (files of source/, macro values). Out: a `Kernel` that launches on torch's
current stream, also while a CUDA graph is captured. Needs a driver and NVRTC, no toolkit.
"""

import hashlib
import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from draftree import env

Argument: TypeAlias = "torch.Tensor | int | float | None"
_FOLDER = Path(__file__).parent / "source"
OLDEST_ARCH = 80
_WARPGROUP_ARCH = 90  # no chip after it has these instructions
# Dynamic shared memory that needs no leave: 48 KiB, less what the kernel declares itself.
_PLAIN_SHARED = 32 * 1024
_COMPILERS = 8  # at a time
# In a persistent kernel: what all its operations declare themselves, and the driver's own.
PERSISTENT_RESERVED = 18 * 1024


@dataclass(frozen=True)
class KernelSource:
    """A kernel by its files, read one after the other, and the values of its macros."""

    name: str
    files: tuple[str, ...]
    macros: tuple[tuple[str, int], ...] = ()

    def text(self) -> str:
        return self.defines + "".join(map(read_file, self.files))

    @property
    def defines(self) -> str:
        return "".join(f"#define {name} {value}\n" for name, value in self.macros)


def read_file(name: str) -> str:
    return (_FOLDER / f"{name}.cu").read_text(encoding="utf-8")


class Launchable(Protocol):
    """A kernel that can be started; see `Kernel.launch`."""

    def launch(
        self,
        grid: tuple[int, ...],
        block: int,
        *args: "Argument",
        shared_bytes: int = 0,
        is_chained: bool = False,
        is_cooperative: bool = False,
        is_joint: bool = False,
    ) -> None: ...


@dataclass(frozen=True)
class RecordedLaunch:
    """A launch that was asked for, and has not run. args are kept where it may still run."""

    source: KernelSource
    grid: tuple[int, ...]
    block: int
    args: tuple["Argument", ...]
    shared_bytes: int


class Rehearsal:
    """While it is on, launches run nothing, and are recorded.

    is_persistent: they are to be one kernel, so no block may have more threads than it has, and
    none belongs to a cluster. Else only kernels are looked for, and arrays that launches make for
    themselves, such as a long pass's weights, may go.

    is_warming: launches run, and graphs are captured at their first use, since more will follow.
    """

    def __init__(self) -> None:
        self.is_on = self.is_persistent = self.is_warming = False
        self._launches: list[RecordedLaunch] = []

    @contextmanager
    def collect(self, *, is_persistent: bool = False) -> Iterator[list[RecordedLaunch]]:
        assert not self.is_on, "rehearsals do not nest"
        self.is_on, self.is_persistent, self._launches = True, is_persistent, []
        try:
            yield self._launches
        finally:
            self.is_on = self.is_persistent = False

    @contextmanager
    def warm(self) -> Iterator[None]:
        self.is_warming = True
        try:
            yield
        finally:
            self.is_warming = False

    def record(self, source: KernelSource) -> "Launchable":
        return _LaunchRecorder(source, self._launches, keeps_args=self.is_persistent)


@dataclass(frozen=True)
class _LaunchRecorder:
    """In place of a kernel."""

    source: KernelSource
    launches: list[RecordedLaunch]
    keeps_args: bool

    def launch(
        self,
        grid: tuple[int, ...],
        block: int,
        *args: "Argument",
        shared_bytes: int = 0,
        is_chained: bool = False,
        is_cooperative: bool = False,
        is_joint: bool = False,
    ) -> None:
        assert not is_cooperative, "one persistent kernel is not part of another"
        kept = args if self.keeps_args else ()
        self.launches.append(RecordedLaunch(self.source, grid, block, kept, shared_bytes))


@dataclass(frozen=True)
class Gpu:
    """What kernels need to know of a device. A loader replaces the compiler: tests run the same
    sources on the CPU.
    """

    index: int
    arch: int  # 90 for compute capability 9.0
    num_sms: int
    shared_per_sm: int
    shared_per_block: int
    loader: Callable[[KernelSource], Launchable] | None = field(default=None, compare=False)
    uses_warpgroups: bool = True  # where there are matrix instructions of four warps
    rehearsal: Rehearsal = field(default_factory=Rehearsal, compare=False, repr=False)

    @property
    def is_real(self) -> bool:
        return self.loader is None

    @property
    def place(self) -> torch.device:
        """Where tensors for its kernels live."""
        return torch.device("cuda", self.index) if self.is_real else torch.device("cpu")

    def reserved_shared(self, own: int) -> int:
        """Shared memory that a block has beside its dynamic one, for a kernel that needs `own`."""
        return PERSISTENT_RESERVED if self.rehearsal.is_persistent else own

    @property
    def has_warpgroups(self) -> bool:
        return self.arch == _WARPGROUP_ARCH and self.uses_warpgroups

    def without_warpgroups(self) -> "Gpu":
        """The same chip; what is to be part of a persistent kernel cannot use them."""
        return replace(self, uses_warpgroups=False)

    @property
    def can_chain(self) -> bool:
        """Whether a kernel may start while the one before it ends."""
        return self.arch >= 90


@cache
def gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    return Gpu(
        index,
        properties.major * 10 + properties.minor,
        properties.multi_processor_count,
        properties.shared_memory_per_multiprocessor,
        properties.shared_memory_per_block_optin,
    )


def compile_cubin(source: KernelSource, arch: int) -> bytes:
    """Machine code for compute capability arch / 10, made once and then read from disk."""
    if arch < OLDEST_ARCH:
        raise ValueError(
            f"the GPU kernels need compute capability 8.0 or newer, this is {arch / 10}"
        )
    path = _cubin_path(source, arch)
    if path.exists():
        return path.read_bytes()
    code = _compile(source.text(), source.name, arch)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.write_bytes(code)
    scratch.replace(path)  # another process never sees half a file
    return code


def _cubin_path(source: KernelSource, arch: int) -> Path:
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    digest = hashlib.sha256(f"{arch} {major}.{minor} {source.text()}".encode()).hexdigest()[:24]
    return env.cache_dir() / "cuda" / f"{source.name}_{digest}.cubin"


def compile_missing(
    sources: Collection[KernelSource], arch: int, report: Callable[[int, int], None]
) -> None:
    """Those that are not on disk yet, several at a time. report: how many are, and of how many."""
    missing = [source for source in sources if not _cubin_path(source, arch).exists()]
    if missing:
        _load_compiler()
    with ThreadPoolExecutor(_COMPILERS) as pool:
        done = as_completed([pool.submit(compile_cubin, source, arch) for source in missing])
        for number, each in enumerate(done, 1):
            each.result()
            report(number, len(missing))


def _load_compiler() -> None:
    """Before there are several threads: to the others it would be half loaded."""
    import cuda.core  # noqa: F401


def _compile(text: str, name: str, arch: int) -> bytes:
    from cuda.core import Program, ProgramOptions

    target = f"sm_{arch}a" if arch == _WARPGROUP_ARCH else f"sm_{arch}"
    options = ProgramOptions(name=name, arch=target, std="c++17", diag_suppress=177)
    code = Program(text, "c++", options).compile("cubin").code
    assert isinstance(code, bytes)
    return code


class Kernel:
    """A compiled kernel on one device."""

    def __init__(self, source: KernelSource, device: Gpu) -> None:
        from cuda.core import ObjectCode

        self._device = device
        self._object = ObjectCode.from_cubin(compile_cubin(source, device.arch), name=source.name)
        self._kernel = self._object.get_kernel(source.name)
        self._shared_limit = _PLAIN_SHARED

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
        """Tensors are passed as pointers, None as a null pointer, numbers as 32 bits.

        A chained launch may overlap with the end of the kernel before; the source must expect that.
        is_cooperative: blocks wait for each other, so all must be on the chip at once, which is
        made sure of. is_joint: the same, and the caller has no more blocks than fit.
        """
        from cuda.core import LaunchConfig, launch

        if shared_bytes > self._shared_limit:
            self._raise_shared_limit(shared_bytes)
        config = LaunchConfig(
            grid=grid,
            block=block,
            shmem_size=shared_bytes,
            programmatic_stream_serialization=is_chained and self._device.can_chain,
            is_cooperative=is_cooperative,
        )
        launch(_current_stream(self._device.index), config, self._kernel, *map(_argument, args))

    def _raise_shared_limit(self, shared_bytes: int) -> None:
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        kernel, device = driver.CUkernel(int(self._kernel.handle)), self._device.index
        (error,) = driver.cuKernelSetAttribute(attribute, shared_bytes, kernel, device)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{shared_bytes} bytes of shared memory were refused: {error.name}")
        self._shared_limit = shared_bytes


def load_kernel(source: KernelSource, device: Gpu) -> Launchable:
    return device.rehearsal.record(source) if device.rehearsal.is_on else _load(source, device)


@cache
def _load(source: KernelSource, device: Gpu) -> Launchable:
    return Kernel(source, device) if device.loader is None else device.loader(source)


def _current_stream(index: int) -> Any:
    from cuda.core import LEGACY_DEFAULT_STREAM, Stream

    handle = torch.cuda.current_stream(index).cuda_stream
    return Stream.from_handle(handle) if handle else LEGACY_DEFAULT_STREAM


def _argument(value: Argument) -> Any:
    if value is None:
        return 0
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return np.float32(value) if isinstance(value, float) else np.int32(value)
