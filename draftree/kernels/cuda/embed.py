"""Token ids -> rows of the embedding table, decoded on the GPU from the bytes of the file.

Only a few rows are read at a time, so the table stays in host memory, pinned, where kernels reach
it. Bit-equal to the plain decoder; formats without a decoder here become 16-bit floats.
"""

from dataclasses import dataclass

import numpy as np
import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.layout import unit_format
from draftree.kernels.cuda.pack import is_native
from draftree.kernels.quant.formats import QuantType, dequantize

_CHUNK, _THREADS = 1024, 256  # columns and threads of a block, see source/embed.cu
_DECODED_ROWS = 4096  # decoded at once on the host


@dataclass(frozen=True)
class EmbedTable:
    """The rows of a table, one behind the other."""

    qtype: QuantType
    num_rows: int
    width: int
    raw: torch.Tensor  # uint8, in host memory, padded to a multiple of 16 bytes


def new_embed_table(raw: np.ndarray, qtype: QuantType, gpu: Gpu) -> EmbedTable:
    """A copy of whole rows as they stand in a file, uint8 [rows, row_bytes]."""
    num_rows, row_bytes = raw.shape
    width = row_bytes // qtype.block_bytes * qtype.block_len
    if width % 4:
        raise ValueError(f"rows of {width} values cannot be used: not a multiple of 4")
    kept = qtype if is_native(qtype) else QuantType.F16
    kept_bytes = width // kept.block_len * kept.block_bytes
    padded = -(-num_rows * kept_bytes // 16) * 16
    table = torch.zeros(padded, dtype=torch.uint8, pin_memory=gpu.is_real)
    rows = table[: num_rows * kept_bytes].view(num_rows, kept_bytes).numpy()
    for first in range(0, num_rows, _DECODED_ROWS):
        part = raw[first : first + _DECODED_ROWS]
        if kept != qtype:
            part = dequantize(part, qtype).astype(np.float16).view(np.uint8)
        rows[first : first + _DECODED_ROWS] = part
    return EmbedTable(kept, num_rows, width, table)


def embed_source(qtype: QuantType) -> KernelSource:
    macros = (*unit_format(qtype).macros, ("SOURCE", qtype.value))
    return KernelSource("embed_kernel", ("bits", "format", "raw", "embed"), macros)


def embed(
    table: EmbedTable, tokens: torch.Tensor, out: torch.Tensor, live: torch.Tensor, gpu: Gpu
) -> torch.Tensor:
    """out[i] = the row of tokens[i], float32 [rows, width]; rows from live (int32 [1]) on stay."""
    num_rows = out.shape[0]
    if out.dtype != torch.float32 or out.shape[1] != table.width or out.stride(1) != 1:
        raise ValueError(
            f"expected float32 rows of {table.width}, not {out.dtype} {tuple(out.shape)}"
        )
    if out.data_ptr() % 16 or out.stride(0) % 4:
        raise ValueError("rows of activations must start at multiples of 16 bytes")
    if tokens.dtype != torch.int32 or tokens.shape[0] < num_rows or not tokens.is_contiguous():
        raise ValueError(f"expected {num_rows} tokens as int32")
    load_kernel(embed_source(table.qtype), gpu).launch(
        (num_rows, -(-table.width // _CHUNK)),
        _THREADS,
        *(table.raw, tokens, live, out, table.width, out.stride(0)),
        is_chained=True,
    )
    return out
