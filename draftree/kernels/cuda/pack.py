"""Weight rows as they stand in a file -> a `PackedMatrix`, slab by slab, by kernels on the device.

Nothing is widened to float on the way, except formats that have no layout of their own: those are
decoded on the host and kept as 16-bit floats. Copying to the GPU goes on while the next slab is
read.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.layout import (
    ROWS,
    PackedMatrix,
    UnitFormat,
    new_matrix,
    stacked_format,
    unit_format,
)
from draftree.kernels.quant.formats import QuantType, dequantize, row_bytes

SLAB_BYTES = 32 * 1024 * 1024
_FLOATS = (QuantType.F32, QuantType.F16, QuantType.BF16)
_NUM_SLOTS = 2
_NUM_READERS = 4  # threads that read one slab; one alone is slower than the bus


def is_native(qtype: QuantType) -> bool:
    """Whether kernels read the format as it stands in a file."""
    return qtype in _FLOATS or unit_format(qtype).qtype == qtype


def repack_source(name: str, qtype: QuantType, form: UnitFormat, band: int = 2) -> KernelSource:
    macros = (*form.macros, ("SOURCE", qtype.value), ("BAND", band))
    return KernelSource(name, ("bits", "format", "raw", "repack"), macros)


def repack(
    raw: torch.Tensor, qtype: QuantType, matrix: PackedMatrix, first_row: int, gpu: Gpu
) -> None:
    """Write rows that lie on the GPU, uint8 [rows, row_bytes], to first_row and on."""
    if not raw.is_contiguous():
        raise ValueError("slabs of rows must be contiguous")
    last_row = first_row + raw.shape[0]
    options = qtype, matrix.format, matrix.band_tiles
    load_kernel(repack_source("row_scale_kernel", *options), gpu).launch(
        (-(-raw.shape[0] // 8),),
        256,
        *(raw, matrix.row_scale[first_row:], matrix.is_plain, raw.shape[0], matrix.num_cols),
    )
    num_tiles = -(-last_row // ROWS) - first_row // ROWS
    load_kernel(repack_source("repack_kernel", *options), gpu).launch(
        (num_tiles * matrix.num_chunks * 4,),
        256,
        *(raw, matrix.row_scale, matrix.units, first_row, last_row),
        *(matrix.num_rows, matrix.num_cols, matrix.num_chunks),
    )


@dataclass(frozen=True)
class _Slot:
    """Where a slab lies on its way; free when the event has happened."""

    pinned: torch.Tensor
    staging: torch.Tensor
    is_free: torch.cuda.Event | None


class Uploader:
    """Packs many matrices through the same few buffers."""

    def __init__(self, gpu: Gpu, slab_bytes: int = SLAB_BYTES) -> None:
        self._gpu, self._slab_bytes = gpu, slab_bytes
        self._slots = [self._new_slot(slab_bytes) for _ in range(_NUM_SLOTS)]
        self._readers = ThreadPoolExecutor(_NUM_READERS)
        self._next = 0

    def pack(self, parts: Sequence[tuple[np.ndarray, QuantType]]) -> PackedMatrix:
        """One matrix of all parts' rows, uint8 [rows, row_bytes], one part after the other.

        Products with it may be launched once `finish` has returned.
        """
        form = stacked_format(qtype for _, qtype in parts)
        widths = {raw.shape[1] // qtype.block_bytes * qtype.block_len for raw, qtype in parts}
        if form is None or len(widths) != 1:
            raise ValueError("only rows of one format and width can be stacked")
        num_cols = widths.pop()
        if num_cols % 32:
            raise ValueError(f"rows of {num_cols} weights cannot be used: not a multiple of 32")
        matrix = new_matrix(form, sum(len(raw) for raw, _ in parts), num_cols, self._gpu)
        first_row = 0
        for raw, qtype in parts:
            for rows, source_type in self._slabs(raw, qtype, num_cols):
                slab = self._upload(rows)
                repack(slab.view(rows.shape), source_type, matrix, first_row, self._gpu)
                self._release()
                first_row += len(rows)
        return matrix

    def finish(self) -> None:
        """Waits for the GPU: chained kernels read units before they wait for their stream."""
        if self._gpu.is_real:
            torch.cuda.current_stream(self._gpu.index).synchronize()

    def _slabs(
        self, raw: np.ndarray, qtype: QuantType, num_cols: int
    ) -> Iterator[tuple[np.ndarray, QuantType]]:
        kept = qtype if is_native(qtype) else QuantType.F32
        slab_rows = max(1, self._slab_bytes // row_bytes(kept, num_cols))
        for first in range(0, len(raw), slab_rows):
            rows = raw[first : first + slab_rows]
            yield (rows if kept == qtype else dequantize(rows, qtype).view(np.uint8)), kept

    def _upload(self, rows: np.ndarray) -> torch.Tensor:
        slot = self._slots[self._next]
        if slot.is_free:
            slot.is_free.synchronize()
        if rows.nbytes > slot.pinned.numel():
            slot = self._slots[self._next] = self._new_slot(rows.nbytes)
        pinned = slot.pinned.numpy()[: rows.nbytes].reshape(rows.shape)
        cuts = np.linspace(0, len(rows), _NUM_READERS + 1).astype(int)
        pieces = [slice(*cut) for cut in pairwise(cuts)]
        list(self._readers.map(lambda piece: np.copyto(pinned[piece], rows[piece]), pieces))
        return slot.staging[: rows.nbytes].copy_(slot.pinned[: rows.nbytes], non_blocking=True)

    def _release(self) -> None:
        event = self._slots[self._next].is_free
        if event:
            event.record(torch.cuda.current_stream(self._gpu.index))
        self._next = (self._next + 1) % _NUM_SLOTS

    def _new_slot(self, num_bytes: int) -> _Slot:
        is_real = self._gpu.is_real
        return _Slot(
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_real),
            torch.empty(num_bytes, dtype=torch.uint8, device=self._gpu.place),
            torch.cuda.Event() if is_real else None,
        )
