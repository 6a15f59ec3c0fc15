"""Copies of float32 rows: into some columns of a wider array, and those that an index names.

`live`, int32 [1] on the device, says how many rows are copied.
"""

import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.prepare import check_rows

_THREADS = 256
COPY_SOURCE = KernelSource("copy_kernel", ("bits", "copy"))


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
