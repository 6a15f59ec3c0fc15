"""The GPU's memory: how much may be taken, and how much was."""

import torch

from draftree.kernels.cuda.compile import Gpu


def limit_memory(num_bytes: int, gpu: Gpu) -> None:
    """Let arrays take no more than this in all; more raises an error instead of spilling."""
    if gpu.is_real:
        total = torch.cuda.get_device_properties(gpu.index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), gpu.index)


def peak_bytes(gpu: Gpu) -> int:
    """The most that arrays, and what their allocator keeps, have taken so far."""
    return int(torch.cuda.max_memory_reserved(gpu.index)) if gpu.is_real else 0


def synchronize(gpu: Gpu) -> None:
    if gpu.is_real:
        torch.cuda.synchronize(gpu.index)
