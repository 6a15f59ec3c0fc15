"""Products of short passes: inputs are made beforehand, of a single row fused into the product."""

import torch

from draftree.kernels.cuda.compile import Gpu
from draftree.kernels.cuda.layout import PackedMatrix
from draftree.kernels.cuda.linear import Workspace, can_own_row, linear, linear_row
from draftree.kernels.cuda.prepare import prepare
from draftree.kernels.cuda.program import MOST_ROWS
from draftree.kernels.cuda.scratch import CudaMatmulInput


def make_input(into: CudaMatmulInput, num_rows: int, gpu: Gpu, live: torch.Tensor) -> None:
    """What products of so many rows read, unless they make it themselves."""
    if num_rows > 1 or not can_own_row(into.tiles.padded_cols, gpu):
        form = into.tiles if num_rows <= MOST_ROWS else into.halves
        prepare(into.source(num_rows), form, gpu, live=live)


def multiply(
    x: CudaMatmulInput,
    matrix: PackedMatrix,
    out: torch.Tensor,
    workspace: Workspace,
    gpu: Gpu,
    *,
    live: torch.Tensor,
    bias: torch.Tensor | None = None,
    add_to: bool = False,
) -> None:
    """out = x @ matrix.T (+ bias), for at most MOST_ROWS rows after `make_input`."""
    where, tiles = (out, workspace, gpu), x.tiles
    if len(out) == 1 and can_own_row(tiles.padded_cols, gpu):
        linear_row(matrix, x.source(1), *where, bias=bias, add_to=add_to, live=live)
    else:
        linear(matrix, tiles, *where, bias=bias, add_to=add_to, live=live)
