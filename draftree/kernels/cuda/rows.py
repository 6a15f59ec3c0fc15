"""Float32 rows: copies, into some columns of a wider array or of those that an index names, norms,
and a convolution over them.

`live`, int32 [1] on the device, says how many rows there are.
"""

import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.prepare import check_rows

_THREADS = 256
COPY_SOURCE = KernelSource("copy_kernel", ("bits", "copy"))
CONV_SOURCE = KernelSource("block_conv_kernel", ("bits", "block_conv"))
NORM_SOURCE = KernelSource("norm_rows_kernel", ("bits", "norm_rows"))


def _copy(
    x: torch.Tensor, rows: torch.Tensor | None, into: torch.Tensor, live: torch.Tensor, gpu: Gpu
) -> None:
    num_cols = x.shape[1]
    num_rows = x.shape[0] if rows is None else rows.shape[0]
    for array in (x, into):
        check_rows(array, num_cols)
    if num_rows > into.shape[0]:
        raise ValueError(f"{num_rows} rows do not fit into {into.shape[0]}")
    load_kernel(COPY_SOURCE, gpu).launch(
        (num_rows, -(-num_cols // (4 * _THREADS))),
        _THREADS,
        *(x, rows, into, live, num_cols // 4, x.stride(0), into.stride(0)),
        is_chained=True,
    )


def copy_columns(
    x: torch.Tensor, into: torch.Tensor, column: int, gpu: Gpu, *, live: torch.Tensor
) -> None:
    """into[:, column : column + cols] = x."""
    _copy(x, None, into[:, column : column + x.shape[1]], live, gpu)


def gather_rows(
    x: torch.Tensor, rows: torch.Tensor, into: torch.Tensor, gpu: Gpu, *, live: torch.Tensor
) -> None:
    """into[i] = x[rows[i]] for int32 rows."""
    _copy(x, rows, into, live, gpu)


def norm_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    gpu: Gpu,
    *,
    live: torch.Tensor,
) -> None:
    """out = x / sqrt(mean(x²) + eps) * weight for each row."""
    num_cols = x.shape[1]
    for array in (x, out):
        check_rows(array, num_cols)
    if weight.shape != (num_cols,) or out.shape[0] < x.shape[0]:
        raise ValueError(f"{num_cols} weights and {x.shape[0]} rows are expected")
    load_kernel(NORM_SOURCE, gpu).launch(
        (x.shape[0],),
        _THREADS,
        *(x, weight, out, live, float(eps), num_cols, x.stride(0), out.stride(0)),
        is_chained=True,
    )


def block_conv(
    x: torch.Tensor,
    own: torch.Tensor,
    base: torch.Tensor,
    out: torch.Tensor,
    gpu: Gpu,
    *,
    live: torch.Tensor,
    is_added: bool,
) -> None:
    """out = sum over taps of (base[tap] + own[row, tap, group]) * x[row - tap]; is_added: to what
    out holds.
    """
    taps, width = base.shape
    for array in (x, out):
        check_rows(array, width)
    group_len = width * taps // own.shape[1]
    if own.shape[1] * group_len != width * taps or own.stride(1) != 1 or not base.is_contiguous():
        raise ValueError(f"coefficients for groups of {width} columns are expected")
    load_kernel(CONV_SOURCE, gpu).launch(
        (x.shape[0], -(-width // _THREADS)),
        _THREADS,
        *(x, own, base, out, live, width, group_len, taps),
        *(x.stride(0), own.stride(0), out.stride(0), int(is_added)),
        is_chained=True,
    )
