"""Weight rows as they stand in a file -> a `PackedMatrix`, slab by slab, by kernels on the device.

Nothing is widened to float on the way, except formats that have no layout of their own: those are
decoded on the host and kept as 16-bit floats.
"""

import numpy as np
import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.layout import ROWS, PackedMatrix, UnitFormat, new_matrix, unit_format
from draftree.kernels.quant.formats import QuantType, dequantize

SLAB_BYTES = 64 * 1024 * 1024
_FLOATS = (QuantType.F32, QuantType.F16, QuantType.BF16)


def is_native(qtype: QuantType) -> bool:
    """Whether kernels read the format as it stands in a file."""
    return qtype in _FLOATS or unit_format(qtype).qtype == qtype


def repack_source(name: str, qtype: QuantType, form: UnitFormat) -> KernelSource:
    macros = (*form.macros, ("SOURCE", qtype.value))
    return KernelSource(name, ("bits", "format", "raw", "repack"), macros)


def repack(
    raw: torch.Tensor, qtype: QuantType, matrix: PackedMatrix, first_row: int, gpu: Gpu
) -> None:
    """Write rows that lie on the GPU, uint8 [rows, row_bytes]; first_row is a multiple of 128."""
    num_rows = raw.shape[0]
    if not raw.is_contiguous() or first_row % ROWS:
        raise ValueError("slabs of rows must be contiguous and start at a multiple of 128")
    scale_rows = matrix.row_scale[first_row:]
    load_kernel(repack_source("row_scale_kernel", qtype, matrix.format), gpu).launch(
        (-(-num_rows // 8),), 256, raw, scale_rows, num_rows, matrix.num_cols
    )
    num_units = -(-num_rows // ROWS) * matrix.num_chunks
    load_kernel(repack_source("repack_kernel", qtype, matrix.format), gpu).launch(
        (num_units * 4,),
        256,
        *(raw, scale_rows, matrix.units[first_row // ROWS :]),
        *(num_rows, matrix.num_cols, matrix.num_chunks),
    )


def pack(raw: np.ndarray, qtype: QuantType, gpu: Gpu) -> PackedMatrix:
    """Upload and repack whole rows, uint8 [rows, row_bytes]; ready when this returns."""
    num_rows, row_bytes = raw.shape
    num_cols = row_bytes // qtype.block_bytes * qtype.block_len
    if num_cols % 32:
        raise ValueError(f"rows of {num_cols} weights cannot be used: not a multiple of 32")
    matrix = new_matrix(unit_format(qtype), num_rows, num_cols, gpu)
    is_kept = is_native(qtype)
    source_type, source_bytes = (qtype, row_bytes) if is_kept else (QuantType.F32, 4 * num_cols)
    slab_rows = max(ROWS, SLAB_BYTES // source_bytes // ROWS * ROWS)
    size = min(slab_rows, num_rows) * source_bytes
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=gpu.is_real)
    staging = torch.empty(size, dtype=torch.uint8, device=matrix.units.device)
    for first_row in range(0, num_rows, slab_rows):
        rows = raw[first_row : first_row + slab_rows]
        if not is_kept:
            rows = dequantize(rows, qtype).view(np.uint8)
        used = rows.shape[0] * source_bytes
        np.copyto(pinned.numpy()[:used].reshape(rows.shape), rows)
        slab = staging[:used].copy_(pinned[:used], non_blocking=True)
        repack(slab.view(rows.shape), source_type, matrix, first_row, gpu)
        # Frees the pinned memory; and chained kernels read units before they wait for this stream.
        if gpu.is_real:
            torch.cuda.current_stream(gpu.index).synchronize()
    return matrix
