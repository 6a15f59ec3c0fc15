"""Causal depthwise convolution over tokens, then SiLU.

Each row sees its own input and the kernel_len - 1 before it: earlier rows of a chain, ancestors in
a tree, then the committed window. A certain pass moves the window on; a tree pass stashes its
inputs per node, and one launch commits them for all layers.
"""

import numpy as np
import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.prepare import check_rows
from draftree.kernels.cuda.step import IS_TREE, NUM_TOKENS, PATH_LEN, CudaStep

_THREADS = 128  # of a block, four channels each
_FEW, _MANY = 4, 16  # rows that a thread goes through: in a tree or short chain, in a long one
_SHORT = 64  # rows of a chain that is not long
_MOST_LAYERS = 512


class CudaConv:
    """What one layer remembers: window [kernel_len - 1, channels], committed inputs, oldest first;
    stash [max_nodes, channels], the inputs of a tree's nodes.
    """

    def __init__(self, channels: int, kernel_len: int, max_nodes: int, gpu: Gpu) -> None:
        self.window = torch.zeros((kernel_len - 1, channels), device=gpu.place)
        self.stash = torch.zeros((max_nodes, channels), device=gpu.place)

    @property
    def channels(self) -> int:
        return self.window.shape[1]

    @property
    def kernel_len(self) -> int:
        return self.window.shape[0] + 1

    def snapshot(self, length: int) -> tuple[np.ndarray, ...]:
        """A copy of what is kept of any number of committed positions."""
        return (self.window.cpu().numpy().copy(),)

    def restore(self, parts: tuple[np.ndarray, ...]) -> None:
        """Put a copy back; no parts: the empty sequence."""
        if parts:
            self.window.copy_(torch.from_numpy(parts[0]))
        else:
            self.window.zero_()


class ConvArena:
    """The states of all layers of a sequence, which must be of one size, and where they lie."""

    def __init__(self, max_nodes: int, gpu: Gpu) -> None:
        self.states: list[CudaConv] = []
        self.addresses = torch.zeros((_MOST_LAYERS, 2), dtype=torch.int64, device=gpu.place)
        self._max_nodes, self._gpu = max_nodes, gpu

    def new(self, channels: int, kernel_len: int) -> CudaConv:
        if channels % 4 or not 2 <= kernel_len <= _FEW + 1:
            raise ValueError(f"convolutions of {channels} channels by {kernel_len} do not fit")
        state = CudaConv(channels, kernel_len, self._max_nodes, self._gpu)
        if self.states and state.window.shape != self.states[0].window.shape:
            raise ValueError("the convolutions of a model must be of one size")
        index = len(self.states)
        pointers = [state.window.data_ptr(), state.stash.data_ptr()]
        self.addresses[index] = torch.tensor(pointers, dtype=torch.int64)
        self.states.append(state)
        return state


def conv_source(name: str, kernel_len: int, *, is_long: bool = False) -> KernelSource:
    chunk = _MANY if is_long else _FEW
    macros = (("TAPS", kernel_len), ("CHUNK", chunk), ("MAY_BE_TREE", int(not is_long)))
    return KernelSource(name, ("bits", "sigmoid", "conv"), macros)


def conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: CudaConv,
    step: CudaStep,
    out: torch.Tensor,
    gpu: Gpu,
) -> torch.Tensor:
    """out [rows, channels] = silu(sum of taps); weight [channels, kernel_len], last tap: now.

    The grid covers the rows of x; how many are live, and whether they are a tree, step says.
    """
    num_rows, channels = x.shape
    if weight.shape != (channels, state.kernel_len) or channels != state.channels:
        raise ValueError("the weight does not fit the state")
    if not weight.is_contiguous() or weight.dtype != torch.float32:
        raise ValueError("the weight must be contiguous float32")
    if out.data_ptr() == x.data_ptr():
        raise ValueError("later rows still need the inputs: out must not be x")
    for array in (x, out):
        check_rows(array, channels)
    is_long = num_rows > max(_SHORT, step.max_nodes)
    chunk = _MANY if is_long else _FEW
    source = conv_source("conv_kernel", state.kernel_len, is_long=is_long)
    load_kernel(source, gpu).launch(
        (-(-channels // (4 * _THREADS)), -(-num_rows // chunk)),
        _THREADS,
        *(x, weight, state.window, state.stash, out),
        *(step.word(NUM_TOKENS), step.word(IS_TREE), step.depths, step.ancestors),
        *(channels, x.stride(0), out.stride(0), step.ancestors.stride(0)),
        is_chained=True,
    )
    return out


def conv_commit(arena: ConvArena, step: CudaStep, gpu: Gpu) -> None:
    """Move every layer's window along step.path, from what the last tree pass stashed."""
    if not arena.states:
        return
    state = arena.states[0]
    load_kernel(conv_source("conv_commit_kernel", state.kernel_len), gpu).launch(
        (-(-state.channels // (4 * _THREADS)), len(arena.states)),
        _THREADS,
        *(arena.addresses, step.word(NUM_TOKENS), step.word(PATH_LEN), step.path),
        state.channels,
        is_chained=True,
    )
