"""Joules that a GPU has used, by its own counter (NVML)."""

from collections.abc import Callable
from typing import Final

_MILLI: Final = 1000.0


def read_joules() -> Callable[[], float] | None:
    """A function that reads the first GPU's counter; None where there is none."""
    import torch

    try:
        from cuda.bindings import nvml
    except ImportError:  # an older package
        return None
    place = torch.cuda.get_device_properties(0)
    bus = f"{place.pci_domain_id:08x}:{place.pci_bus_id:02x}:{place.pci_device_id:02x}.0"
    try:
        nvml.init_v2()
        handle = nvml.device_get_handle_by_pci_bus_id_v2(bus)
        nvml.device_get_total_energy_consumption(handle)
    except (nvml.NvmlError, RuntimeError):  # not counted, or there is no NVML
        return None
    return lambda: nvml.device_get_total_energy_consumption(handle) / _MILLI
