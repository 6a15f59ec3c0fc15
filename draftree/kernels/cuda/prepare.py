"""Inputs of matrix products, made in one launch from what comes before: norms, gates, activations.

In: float32 rows, which may be views of wider buffers. Out: 16-bit floats with one power of two a
row, as tiles for few rows or as plain rows (layout.py). A row's bits depend on the row alone.
`live`, int32 [1] on the device, says how many rows count; the others are left alone.
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
_WARP_COLS = 32 * _SLICE
_MOST_BLOCKS = 8  # of a cluster
# Where kernels overlap, a block takes a quarter of a multiprocessor's registers, which a product
# leaves: so the next product's blocks can all start before this one ends.
_MOST_WARPS, _FEW_WARPS = 32, 12
_FEW_SLICES = 2
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


def prepare_source(
    op: RowOp, plan: RowPlan, *, in_rows: bool, head_dim: int = _SLICE
) -> KernelSource:
    macros = (
        ("OP", op.value),
        ("IN_ROWS", int(in_rows)),
        ("KEPT", plan.num_slices),
        ("WARPS", plan.num_warps),
        ("BLOCKS_AN_SM", plan.blocks_an_sm),
        ("CLUSTER", plan.num_blocks),
        ("HEAD_DIM", head_dim),
    )
    return KernelSource("prepare_kernel", ("bits", "halves", "sigmoid", "prepare"), macros)


def check_rows(x: torch.Tensor, num_cols: int) -> None:
    if x.dtype != torch.float32 or x.shape[1] != num_cols or x.stride(1) != 1:
        raise ValueError(f"expected float32 rows of {num_cols}, not {x.dtype} {tuple(x.shape)}")
    if x.data_ptr() % 16 or x.stride(0) % 4 or num_cols % 4:
        raise ValueError("rows of activations must start at multiples of 16 bytes")


def _launch(
    op: RowOp,
    x: torch.Tensor,
    into: Prepared,
    gpu: Gpu,
    live: torch.Tensor | None,
    *,
    other: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    copy: torch.Tensor | None = None,
    eps: float = 0.0,
    head_dim: int = _SLICE,
) -> None:
    num_rows = x.shape[0] if rows is None else rows.shape[0]
    in_rows = into.halves.dtype == torch.float16
    room = into.halves.shape[0] if in_rows else 8 * into.halves.shape[1]
    for array in (x, other, copy):
        if array is not None:
            check_rows(array, into.num_cols)
            if array.shape[0] != x.shape[0]:
                raise ValueError(f"{x.shape[0]} rows do not go with {array.shape[0]}")
    if into.num_cols % _SLICE:
        raise ValueError(f"{into.num_cols} columns are not a multiple of {_SLICE}")
    if num_rows > room:
        raise ValueError(f"{num_rows} rows do not fit into prepared activations for {room}")
    plan = plan_row(into.padded_cols, gpu)
    source = prepare_source(op, plan, in_rows=in_rows, head_dim=head_dim)
    load_kernel(source, gpu).launch(
        (num_rows * plan.num_blocks,),
        32 * plan.num_warps,
        *(x, other, weight, rows, into.halves, into.token_scale, live, copy, float(eps)),
        *(into.num_cols, into.padded_cols),
        *(0 if array is None else array.stride(0) for array in (x, other, copy)),
        0 if in_rows else into.halves.shape[1],
        is_chained=True,
    )


def prepare_plain(
    x: torch.Tensor, into: _Form, gpu: Gpu, *, live: torch.Tensor | None = None
) -> _Form:
    """The rows of x as they are, in `into`."""
    _launch(RowOp.PLAIN, x, into, gpu, live)
    return into


def norm_prepare(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    into: Prepared,
    gpu: Gpu,
    *,
    live: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    copy: torch.Tensor | None = None,
) -> None:
    """x / sqrt(mean(x²) + eps) * weight for each row; with rows, int32, row i is of x[rows[i]].

    copy: gets x as it is, on the way.
    """
    if weight.shape != (into.num_cols,):
        raise ValueError(f"a norm of {into.num_cols} values is expected")
    _launch(RowOp.NORM, x, into, gpu, live, weight=weight, rows=rows, copy=copy, eps=eps)


def silu_mul_prepare(
    gate: torch.Tensor,
    up: torch.Tensor,
    into: Prepared,
    gpu: Gpu,
    *,
    live: torch.Tensor | None = None,
) -> None:
    """silu(gate) * up."""
    _launch(RowOp.SILU_MUL, gate, into, gpu, live, other=up)


def sigmoid_mul_prepare(
    x: torch.Tensor,
    gate: torch.Tensor,
    into: Prepared,
    gpu: Gpu,
    *,
    live: torch.Tensor | None = None,
) -> None:
    """x * sigmoid(gate)."""
    _launch(RowOp.SIGMOID_MUL, x, into, gpu, live, other=gate)


def gated_norm_prepare(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    into: Prepared,
    gpu: Gpu,
    *,
    live: torch.Tensor | None = None,
) -> None:
    """The norm of every head of x, times weight [head_dim], times silu(z)."""
    head_dim = weight.shape[0]
    if head_dim not in (8, 16, 32, 64, 128, 256) or into.num_cols % head_dim:
        raise ValueError(f"gated norms of heads of {head_dim} are not supported")
    _launch(
        RowOp.GATED_NORM, x, into, gpu, live, other=z, weight=weight, eps=eps, head_dim=head_dim
    )
