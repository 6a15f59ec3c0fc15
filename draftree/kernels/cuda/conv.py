"""Causal depthwise convolution over tokens, then SiLU, and what a layer remembers of its inputs.

Each row sees its own input and the kernel_len - 1 before it: earlier rows of a chain, ancestors in
a tree, then the committed window. Here long committed chains are convolved, and the windows of all
layers committed; passes of few rows are convolved by the operation that reads them
(gated_delta.py).
"""

from typing import NamedTuple

import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.pass_args import CudaPassArgs
from draftree.kernels.cuda.prepare import check_rows
from draftree.kernels.ops import LayerStore

_THREADS = 128  # of a block, four channels each
_CHUNK = 16  # rows that a thread goes through
_MOST_TAPS = 5
_MOST_LAYERS = 512


class CudaConv(LayerStore):
    """What one layer remembers: windows [2, kernel_len - 1, channels], committed inputs, oldest
    first; stash [max_nodes, channels], the inputs of a tree's nodes. The second window counts when
    exactly second_at tokens are committed, the first one otherwise.
    """

    def __init__(self, channels: int, kernel_len: int, max_nodes: int, gpu: Gpu) -> None:
        self.windows = torch.zeros((2, kernel_len - 1, channels), device=gpu.place)
        self.second_at = torch.full((1,), -1, dtype=torch.int32, device=gpu.place)
        self.stash = torch.zeros((max_nodes, channels), device=gpu.place)

    @property
    def channels(self) -> int:
        return self.windows.shape[2]

    @property
    def kernel_len(self) -> int:
        return self.windows.shape[1] + 1

    def snapshot(self, length: int) -> tuple[torch.Tensor, ...]:
        """The window after `length` committed positions: now."""
        return (torch.where(self.second_at == length, self.windows[1], self.windows[0]),)

    def restore(self, parts: tuple[torch.Tensor, ...]) -> None:
        """Put a copy back; no parts: the empty sequence."""
        self.second_at.fill_(-1)
        if parts:
            self.windows[0].copy_(parts[0])
        else:
            self.windows[0].zero_()


class Convolution(NamedTuple):
    """Rows that are convolved by what reads them: x [rows, channels] before it, weight [channels,
    kernel_len], last tap: now.
    """

    x: torch.Tensor
    weight: torch.Tensor
    state: CudaConv

    def check(self) -> None:
        channels, kernel_len = self.state.channels, self.state.kernel_len
        check_rows(self.x, channels)
        if self.weight.shape != (channels, kernel_len):
            raise ValueError("the weight does not fit the state")
        if not self.weight.is_contiguous() or self.weight.dtype != torch.float32:
            raise ValueError("the weight must be contiguous float32")


class ConvArena:
    """The states of all layers of a sequence, which must be of one size, and where they lie."""

    def __init__(self, max_nodes: int, gpu: Gpu) -> None:
        self.states: list[CudaConv] = []
        self.addresses = torch.zeros((_MOST_LAYERS, 3), dtype=torch.int64, device=gpu.place)
        self._max_nodes, self._gpu = max_nodes, gpu

    def new(self, channels: int, kernel_len: int) -> CudaConv:
        if channels % 4 or not 2 <= kernel_len <= _MOST_TAPS:
            raise ValueError(f"convolutions of {channels} channels by {kernel_len} do not fit")
        state = CudaConv(channels, kernel_len, self._max_nodes, self._gpu)
        if self.states and state.windows.shape != self.states[0].windows.shape:
            raise ValueError("the convolutions of a model must be of one size")
        index = len(self.states)
        parts = state.windows, state.stash, state.second_at
        pointers = [part.data_ptr() for part in parts]
        self.addresses[index] = torch.tensor(pointers, dtype=torch.int64)
        self.states.append(state)
        return state


def conv_source(name: str, kernel_len: int) -> KernelSource:
    return KernelSource(name, ("bits", "sigmoid", "conv"), (("TAPS", kernel_len),))


def conv(rows: Convolution, step: CudaPassArgs, out: torch.Tensor, gpu: Gpu) -> torch.Tensor:
    """out [rows, channels] = silu(sum of taps) of a committed chain, whose window moves on.

    The grid covers the rows of x; how many are live, step says.
    """
    rows.check()
    x, weight, state = rows
    check_rows(out, state.channels)
    if out.data_ptr() == x.data_ptr():
        raise ValueError("later rows still need the inputs: out must not be x")
    load_kernel(conv_source("conv_kernel", state.kernel_len), gpu).launch(
        (-(-state.channels // (4 * _THREADS)), -(-len(x) // _CHUNK)),
        _THREADS,
        *(step.control, x, weight, state.windows, state.second_at, out),
        *(state.channels, x.stride(0), out.stride(0)),
        is_chained=True,
    )
    return out


def conv_commit(arena: ConvArena, step: CudaPassArgs, gpu: Gpu) -> None:
    """Move every layer's window along step.path, from what the last tree pass stashed."""
    if not arena.states:
        return
    state = arena.states[0]
    load_kernel(conv_source("conv_commit_kernel", state.kernel_len), gpu).launch(
        (-(-state.channels // (4 * _THREADS)), len(arena.states)),
        _THREADS,
        *(arena.addresses, step.control, step.path, state.channels),
        is_chained=True,
    )
