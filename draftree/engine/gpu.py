"""Which GPU there is, asked of the driver alone, so that a machine without one pays nothing."""

import ctypes
from importlib import metadata

from draftree.config import GpuInfo
from draftree.errors import DeviceError

_OLDEST = 80  # compute capability 8.0
_NAME_LEN = 128
_PACKAGES = "torch", "cuda-core", "cuda-bindings", "gguf"  # of the extra `gpu`
_MAJOR, _MINOR = 75, 76  # attributes of the compute capability


def find_gpu(device: str) -> GpuInfo | None:
    """The first GPU that can be used; None where device is "cpu", or "auto" and there is none.

    "cuda" without a usable GPU is an error that says what is missing.
    """
    if device == "cpu":
        return None
    gpu, missing = _look()
    if gpu is None and device == "cuda":
        raise DeviceError(f"No GPU can be used: {missing}.")
    return gpu


def _look() -> tuple[GpuInfo | None, str]:
    """A gpu, or what is missing."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, "the NVIDIA driver is not installed"
    count, handle = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return None, "the NVIDIA driver sees no GPU"
    if driver.cuDeviceGet(ctypes.byref(handle), 0):
        return None, "the NVIDIA driver does not answer"
    major, minor, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(_NAME_LEN)
    driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, handle)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, handle)
    driver.cuDeviceGetName(name, _NAME_LEN, handle)
    driver.cuDeviceTotalMem_v2(ctypes.byref(size), handle)
    title, arch = name.value.decode(errors="replace"), major.value * 10 + minor.value
    if arch < _OLDEST:
        return None, f"{title} has compute capability {arch / 10}, and 8.0 is the oldest that works"
    try:
        versions = [metadata.version(name) for name in _PACKAGES]
    except metadata.PackageNotFoundError as error:
        return None, f"{error.name} is not installed; run `pip install 'draftree[gpu]'`"
    if versions[0].endswith("+cpu"):
        return None, "torch is installed without CUDA"
    return GpuInfo(0, title, size.value), ""
