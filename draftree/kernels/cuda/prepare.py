"""Inputs of matrix products, made from what comes before: norms, gates, activations.

In: float32 rows, which may be views of wider buffers (RowSource). Out: 16-bit floats with one power
of two a row, as tiles for few rows or as plain rows (layout.py). A row's bits depend on the row
alone. A product of a single row makes its input itself (linear.py).
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.layout import Activations, HalfRows, band_tiles

Prepared = Activations | HalfRows
_Form = TypeVar("_Form", bound=Prepared)
_SLICE = 8  # columns that a thread has in registers
_SINGLE_WARP_ROWS = 16  # up to which matrix instructions of single warps are faster
_WARP_COLS = 32 * _SLICE
_MOST_BLOCKS = 8  # of a cluster
# Where kernels overlap, a block takes a quarter of a multiprocessor's registers, which a product
# leaves: so the next product's blocks can all start before this one ends.
_MOST_WARPS, _FEW_WARPS = 32, 12
_FEW_SLICES = 2
_LONG_SLICES, _LONG_WARPS = 3, 4  # of a thread, at most; of a block, at least
_CLUSTER_WARPS = 6  # of a block, if clusters can be had: more blocks read a row sooner


class RowOp(IntEnum):
    """What is computed on the way; the numbers are those of source/prepare.cu."""

    PLAIN = 0
    NORM = 1
    SILU_MUL = 2
    SIGMOID_MUL = 3
    GATED_NORM = 4


@dataclass(frozen=True)
class RowPlan:
    """How a row is shared out: blocks of a cluster, warps of a block, slices of a thread."""

    num_blocks: int
    num_warps: int
    num_slices: int

    @property
    def blocks_an_sm(self) -> int:
        """How many must fit, which bounds the registers of a thread."""
        is_small = self.num_warps <= _FEW_WARPS and self.num_slices <= _FEW_SLICES
        return 4 if is_small else 1


def plan_row(padded_cols: int, gpu: Gpu) -> RowPlan:
    """Depends on the width alone; the order of sums does not depend on it."""
    warps, blocks = padded_cols // _WARP_COLS, 1
    if gpu.rehearsal.is_persistent:
        most, has_clusters = 8 * band_tiles(gpu), False
    else:
        most = _FEW_WARPS if gpu.can_chain else _MOST_WARPS
        has_clusters = gpu.is_real and gpu.arch >= 90
    while has_clusters and blocks < _MOST_BLOCKS and warps > _CLUSTER_WARPS * blocks:
        blocks *= 2
    per_block = -(-warps // blocks)
    slices = -(-per_block // most)
    return RowPlan(blocks, -(-per_block // slices), slices)


def plan_long(padded_cols: int) -> RowPlan:
    """The same for rows of a long pass, of which many are under way at once: a block each."""
    warps = padded_cols // _WARP_COLS
    slices = max(1, min(_LONG_SLICES, warps // _LONG_WARPS), -(-warps // _MOST_WARPS))
    return RowPlan(1, -(-warps // slices), slices)


@dataclass(frozen=True)
class RowSource:
    """What inputs are made from: rows of x, and what goes with them."""

    op: RowOp
    x: torch.Tensor
    other: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    rows: torch.Tensor | None = None  # int32: row i is made from x[rows[i]]
    copy: torch.Tensor | None = None  # gets x as it is, on the way
    eps: float = 0.0
    head_dim: int = _SLICE

    @property
    def num_rows(self) -> int:
        return self.x.shape[0] if self.rows is None else self.rows.shape[0]

    def check(self, num_cols: int) -> None:
        for array in (self.x, self.other, self.copy):
            if array is not None:
                check_rows(array, num_cols)
                if array.shape[0] != self.x.shape[0]:
                    raise ValueError(f"{self.x.shape[0]} rows do not go with {array.shape[0]}")
        if num_cols % _SLICE:
            raise ValueError(f"{num_cols} columns are not a multiple of {_SLICE}")
        if self.op is RowOp.NORM and self.weight is not None and len(self.weight) != num_cols:
            raise ValueError(f"a norm of {num_cols} values is expected")
        if self.head_dim not in (8, 16, 32, 64, 128, 256) or num_cols % self.head_dim:
            raise ValueError(f"gated norms of heads of {self.head_dim} are not supported")


ROW_FILES = ("halves", "sigmoid", "row_op")


def row_macros(op: RowOp, head_dim: int, plan: RowPlan) -> tuple[tuple[str, int], ...]:
    """Those of ROW_FILES, but for the form of what is stored."""
    return (
        ("OP", op.value),
        ("KEPT", plan.num_slices),
        ("WARPS", plan.num_warps),
        ("CLUSTER", plan.num_blocks),
        ("HEAD_DIM", head_dim),
    )


def takes_warpgroups(num_rows: int, gpu: Gpu) -> bool:
    """Whether so many rows are multiplied by warpgroups, and their tiles lie in pieces."""
    return gpu.has_warpgroups and num_rows > _SINGLE_WARP_ROWS


def prepare_source(
    op: RowOp, plan: RowPlan, *, form: str = "", head_dim: int = _SLICE
) -> KernelSource:
    """form: IN_ROWS, WARPGROUPS, or tiles for single warps."""
    macros = (*row_macros(op, head_dim, plan), ("BLOCKS_AN_SM", plan.blocks_an_sm))
    macros += ((form, 1),) if form else ()
    return KernelSource("prepare_kernel", ("bits", *ROW_FILES, "prepare"), macros)


def check_rows(x: torch.Tensor, num_cols: int) -> None:
    if x.dtype != torch.float32 or x.shape[1] != num_cols or x.stride(1) != 1:
        raise ValueError(f"expected float32 rows of {num_cols}, not {x.dtype} {tuple(x.shape)}")
    if x.data_ptr() % 16 or x.stride(0) % 4 or num_cols % 4:
        raise ValueError("rows of activations must start at multiples of 16 bytes")


def prepare(source: RowSource, into: _Form, gpu: Gpu, *, live: torch.Tensor | None = None) -> _Form:
    """The inputs in `into`. live, int32 [1] on the device: so many rows count, others stay."""
    in_rows = into.halves.dtype == torch.float16
    room = into.halves.shape[0] if in_rows else 8 * into.halves.shape[1]
    source.check(into.num_cols)
    if source.num_rows > room:
        raise ValueError(f"{source.num_rows} rows do not fit into prepared activations for {room}")
    plan = plan_long(into.padded_cols) if in_rows else plan_row(into.padded_cols, gpu)
    in_pieces = not in_rows and takes_warpgroups(source.num_rows, gpu)
    form = "IN_ROWS" if in_rows else "WARPGROUPS" if in_pieces else ""
    kernel = prepare_source(source.op, plan, form=form, head_dim=source.head_dim)
    arrays = source.x, source.other, source.copy
    load_kernel(kernel, gpu).launch(
        (source.num_rows * plan.num_blocks,),
        32 * plan.num_warps,
        *(source.x, source.other, source.weight, source.rows, into.halves, into.token_scale),
        *(live, source.copy, float(source.eps), into.num_cols, into.padded_cols),
        *(0 if array is None else array.stride(0) for array in arrays),
        0 if in_rows else into.halves.shape[1],
        is_chained=True,
    )
    return into


def plain(x: torch.Tensor) -> RowSource:
    """The rows of x as they are."""
    return RowSource(RowOp.PLAIN, x)


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    rows: torch.Tensor | None = None,
    copy: torch.Tensor | None = None,
) -> RowSource:
    """x / sqrt(mean(x²) + eps) * weight for each row."""
    return RowSource(RowOp.NORM, x, weight=weight, rows=rows, copy=copy, eps=eps)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> RowSource:
    """silu(gate) * up."""
    return RowSource(RowOp.SILU_MUL, gate, up)


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> RowSource:
    """x * sigmoid(gate)."""
    return RowSource(RowOp.SIGMOID_MUL, x, gate)


def gated_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> RowSource:
    """The norm of every head of x, times weight [head_dim], times silu(z)."""
    return RowSource(RowOp.GATED_NORM, x, z, weight, eps=eps, head_dim=weight.shape[0])
