"""Convolution and gated delta rule for up to 64 rows: a matrix of state per value head, decayed
and corrected by every token.

A committed pass advances the state and the convolution's window in place. A tree pass only reads
them and keeps kilobytes per node, from which one launch commits a path in all layers. Whatever
shares a pass, a token's numbers have the same bits. Longer chains: conv.py, gated_delta_prefill.py.
"""

import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.conv import Convolution
from draftree.kernels.cuda.pass_args import CudaPassArgs
from draftree.kernels.cuda.prepare import check_rows
from draftree.kernels.ops import LayerStore

MOST_ROWS = 64
_HEAD_DIMS = (16, 32, 64, 128)
_MOST_LAYERS = 512
_COMMITTED_AT_ONCE = 8  # nodes of a path
_RESERVED_SHARED = 2048  # what the kernel has beside the rows and slots


class CudaDelta(LayerStore):
    """What one layer remembers: state [value_heads, value dim, key dim]; per node of the last tree
    its unit key, its correction (what it adds to the state, times that key) and its decay.
    """

    def __init__(
        self, key_heads: int, value_heads: int, head_dim: int, max_nodes: int, gpu: Gpu
    ) -> None:
        self.key_heads, self.value_heads, self.head_dim = key_heads, value_heads, head_dim
        place = gpu.place
        self.state = torch.zeros((value_heads, head_dim, head_dim), device=place)
        self.keys = torch.zeros((max_nodes, key_heads, head_dim), device=place)
        self.corrections = torch.zeros((max_nodes, value_heads, head_dim), device=place)
        self.decays = torch.zeros((max_nodes, value_heads), device=place)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        return self.state, self.keys, self.corrections, self.decays

    def snapshot(self, length: int) -> tuple[torch.Tensor, ...]:
        """The state as it is now, [value_heads, key dim, value dim]: the same size always."""
        return (self.state.transpose(1, 2),)

    def restore(self, parts: tuple[torch.Tensor, ...]) -> None:
        """Put a copy back; no parts: the empty sequence."""
        if parts:
            self.state.copy_(parts[0].transpose(1, 2))
        else:
            self.state.zero_()


class DeltaArena:
    """The states of all layers of a sequence, which must be of one size, and where they lie."""

    def __init__(self, max_nodes: int, gpu: Gpu) -> None:
        if max_nodes > MOST_ROWS:
            raise ValueError(f"trees of {max_nodes} nodes are not supported, only of {MOST_ROWS}")
        self.states: list[CudaDelta] = []
        self.addresses = torch.zeros((_MOST_LAYERS, 4), dtype=torch.int64, device=gpu.place)
        self._max_nodes, self._gpu = max_nodes, gpu

    def new(self, key_heads: int, value_heads: int, head_dim: int) -> CudaDelta:
        if head_dim not in _HEAD_DIMS or value_heads % key_heads:
            raise ValueError(f"{value_heads} heads of {head_dim} by {key_heads} keys do not fit")
        state = CudaDelta(key_heads, value_heads, head_dim, self._max_nodes, self._gpu)
        if self.states and state.keys.shape + state.state.shape != (
            self.states[0].keys.shape + self.states[0].state.shape
        ):
            raise ValueError("the recurrent states of a model must be of one size")
        pointers = [part.data_ptr() for part in state.parts]
        self.addresses[len(self.states)] = torch.tensor(pointers, dtype=torch.int64)
        self.states.append(state)
        return state


def num_slots(num_rows: int) -> int:
    """How many states a walk over a tree keeps at most.

    A slot is in use while a subtree with inner nodes is walked whose sibling, at least as large,
    still waits: so each slot more takes a tree of twice the size.
    """
    slots, smallest = 0, 5
    while smallest <= num_rows:
        slots, smallest = slots + 1, 2 * smallest + 1
    return slots


def shared_bytes(num_rows: int, head_dim: int, cols: int, kernel_len: int) -> int:
    """Rows of inputs, behind taps and two windows; gates; slots."""
    inputs = (num_rows + 3 * kernel_len - 2) * (2 * head_dim + cols)
    return 4 * (inputs + 4 * num_rows + num_slots(num_rows) * cols * head_dim)


def delta_source(head_dim: int, cols: int, kernel_len: int) -> KernelSource:
    files = "gated_delta_bits", "gated_delta_columns", "gated_delta_rows", "gated_delta"
    macros = (("HEAD_DIM", head_dim), ("COLS", cols), ("TAPS", kernel_len))
    return KernelSource("gated_delta_kernel", ("bits", "sigmoid", *files), macros)


def commit_source(head_dim: int) -> KernelSource:
    files = "bits", "gated_delta_bits", "gated_delta_columns", "gated_delta_commit"
    macros = (("HEAD_DIM", head_dim), ("COLS", min(head_dim, 64)), ("GROUP", _COMMITTED_AT_ONCE))
    return KernelSource("delta_commit_kernel", files, macros)


def block_cols(num_rows: int, head_dim: int, kernel_len: int, gpu: Gpu) -> int:
    """Columns of a state that a block has: many share the work on keys, if they fit.

    The bits of a column do not depend on it.
    """
    room = gpu.shared_per_block - _RESERVED_SHARED
    sizes = [cols for cols in (64, 32, 16, 8) if cols <= head_dim]
    shape = num_rows, head_dim
    return next(cols for cols in sizes if shared_bytes(*shape, cols, kernel_len) <= room)


def num_threads(head_dim: int, cols: int) -> int:
    """A lane has two columns; 8 lanes share them, or fewer where there is not enough to share."""
    return cols * min(head_dim // 4, 8) // 2


def gated_delta(
    qkv: Convolution,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    decay_bias: torch.Tensor,
    state: CudaDelta,
    step: CudaPassArgs,
    out: torch.Tensor,
    gpu: Gpu,
) -> torch.Tensor:
    """out [rows, value_heads * head_dim] from qkv: queries, keys, values, which are
    convolved here.

    alpha, beta [rows, value_heads], beta before its sigmoid; decay (negative), decay_bias
    [value_heads]. Queries and keys are normalised here, queries also scaled by 1 / sqrt(head_dim).
    """
    x, weight, conv = qkv
    qkv.check()
    check_inputs(x, alpha, beta, decay, decay_bias, state, out)
    num_rows, dim, kernel_len = len(x), state.head_dim, conv.kernel_len
    if num_rows > MOST_ROWS:
        raise ValueError(f"{num_rows} rows are too many for one walk, at most {MOST_ROWS} are not")
    cols = block_cols(num_rows, dim, kernel_len, gpu)
    load_kernel(delta_source(dim, cols, kernel_len), gpu).launch(
        (state.value_heads * (dim // cols),),
        num_threads(dim, cols),
        *(step.control, step.parents, x, weight, conv.windows, conv.second_at, conv.stash),
        *(alpha, beta, decay, decay_bias, *state.parts, out),
        *(state.key_heads, state.value_heads),
        *(x.stride(0), alpha.stride(0), beta.stride(0), out.stride(0)),
        *(num_rows, step.parents.shape[0]),
        shared_bytes=shared_bytes(num_rows, dim, cols, kernel_len),
        is_chained=True,
    )
    return out


def delta_commit(arena: DeltaArena, step: CudaPassArgs, gpu: Gpu) -> None:
    """Advance every layer's state along step.path, from what the last tree pass kept."""
    if not arena.states:
        return
    state = arena.states[0]
    dim, cols = state.head_dim, min(state.head_dim, 64)
    load_kernel(commit_source(dim), gpu).launch(
        (state.value_heads * (dim // cols), len(arena.states)),
        num_threads(dim, cols),
        *(arena.addresses, step.control, step.path, state.key_heads, state.value_heads),
        shared_bytes=4 * _COMMITTED_AT_ONCE * (dim + cols),
        is_chained=True,
    )


def check_inputs(
    qkv: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    decay_bias: torch.Tensor,
    state: CudaDelta,
    out: torch.Tensor,
) -> None:
    heads, dim = state.value_heads, state.head_dim
    check_rows(qkv, (2 * state.key_heads + heads) * dim)
    check_rows(out, heads * dim)
    for gate in (alpha, beta):
        if gate.dtype != torch.float32 or gate.shape[1] != heads or gate.stride(1) != 1:
            raise ValueError(f"expected float32 rows of {heads} gates, not {tuple(gate.shape)}")
    for weight in (decay, decay_bias):
        if weight.shape != (heads,) or weight.dtype != torch.float32 or not weight.is_contiguous():
            raise ValueError(f"expected {heads} float32 decays, not {tuple(weight.shape)}")
    if len({len(rows) for rows in (qkv, alpha, beta, out)}) > 1:
        raise ValueError("inputs and output have different numbers of rows")
