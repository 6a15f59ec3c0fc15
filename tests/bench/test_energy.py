"""The GPU's own counter of energy, and GPUs that have none."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from draftree.bench.energy import read_joules


class NvmlError(Exception):
    """As NVML's own."""


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=26, pci_device_id=0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: place)
    module, bindings = ModuleType("nvml"), ModuleType("cuda.bindings")
    module.NvmlError, module.init_v2, module.used_mj = NvmlError, lambda: None, 5000

    def count(handle: str) -> int:
        assert handle == "00000000:1a:00.0"
        if module.used_mj is None:
            raise NvmlError("not supported")
        return module.used_mj

    module.device_get_handle_by_pci_bus_id_v2 = lambda bus: bus
    module.device_get_total_energy_consumption = count
    bindings.nvml = module
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    return module


def test_joules_since_some_moment(nvml: ModuleType) -> None:
    read = read_joules()
    assert read is not None
    before, nvml.used_mj = read(), 7500
    assert read() - before == 2.5


def test_a_gpu_that_does_not_count(nvml: ModuleType) -> None:
    nvml.used_mj = None
    assert read_joules() is None


def test_no_bindings(nvml: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", ModuleType("cuda.bindings"))
    assert read_joules() is None
