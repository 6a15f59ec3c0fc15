"""What is said where a GPU cannot be used; the driver is a fake."""

from collections.abc import Callable
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

from draftree.engine import gpu
from draftree.errors import DeviceError

MAJOR = 75
ALL = {"torch": "2.13.0", "cuda-core": "1.2.2", "cuda-bindings": "13.5.0", "gguf": "0.19.0"}


def _driver(major: int = 9, count: int = 1) -> SimpleNamespace:
    def put(value: int | None, at: int = 0) -> Callable[..., int]:
        def answer(*args: Any) -> int:
            args[at]._obj.value = value
            return 0

        return answer

    def attribute(place: Any, number: int, device: Any) -> int:
        place._obj.value = major if number == MAJOR else 0
        return 0

    def name(place: Any, length: int, device: Any) -> int:
        place.value = b"NVIDIA T"
        return 0

    return SimpleNamespace(
        cuInit=lambda flags: 0,
        cuDeviceGetCount=put(count),
        cuDeviceGet=put(0),
        cuDeviceGetAttribute=attribute,
        cuDeviceGetName=name,
        cuDeviceTotalMem_v2=put(24 << 30),
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def install(versions: dict[str, str], **details: int) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(gpu.metadata, "version", version)
        monkeypatch.setattr(gpu.ctypes, "CDLL", lambda name: _driver(**details))

    return install


def test_a_gpu_with_all_that_it_needs(machine) -> None:
    machine(ALL)
    found = gpu.find_gpu("auto")
    assert found is not None and (found.name, found.memory_bytes) == ("NVIDIA T", 24 << 30)
    assert gpu.find_gpu("cpu") is None


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_missing_package_is_named_with_its_command(machine, name: str) -> None:
    machine({other: version for other, version in ALL.items() if other != name})
    assert gpu.find_gpu("auto") is None
    with pytest.raises(DeviceError) as raised:
        gpu.find_gpu("cuda")
    words = str(raised.value)
    assert name in words and words.endswith("run `pip install 'draftree[gpu]'`.")


@pytest.mark.parametrize(
    ("versions", "details", "words"),
    [
        (ALL | {"torch": "2.13.0+cpu"}, {}, "torch is installed without CUDA"),
        (ALL, {"major": 7}, "NVIDIA T has compute capability 7.0"),
        (ALL, {"count": 0}, "the NVIDIA driver sees no GPU"),
    ],
)
def test_what_else_can_be_wrong(machine, versions, details, words: str) -> None:
    machine(versions, **details)
    assert gpu.find_gpu("auto") is None
    with pytest.raises(DeviceError, match=words):
        gpu.find_gpu("cuda")
