"""Matrix products for long prompts: slabs of weights, as 16-bit floats, for the vendor's matmul.

Weights are rounded to 16 bits, which linear.py does not do. Scratch is bounded by `slab_bytes` of
weights and one slab of float32 products.
"""

import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.layout import ROWS, PackedMatrix, UnitFormat
from draftree.kernels.cuda.prepare import HalfRows, new_half_rows, prepare_plain

SLAB_BYTES = 128 * 1024 * 1024


def expand_source(name: str, form: UnitFormat) -> KernelSource:
    return KernelSource(name, ("bits", "format", "expand"), form.macros)


def expand(matrix: PackedMatrix, first_tile: int, num_tiles: int, gpu: Gpu) -> torch.Tensor:
    """Whole tiles as float16 [num_tiles * 128, padded columns], rows divided by their row_scale."""
    cols = matrix.num_chunks * matrix.format.cols
    out = torch.empty((num_tiles * ROWS, cols), dtype=torch.float16, device=matrix.units.device)
    load_kernel(expand_source("expand_kernel", matrix.format), gpu).launch(
        (num_tiles * matrix.num_chunks,),
        256,
        *(matrix.units[first_tile:], matrix.row_scale[first_tile * ROWS :], out),
        *(matrix.num_chunks, cols),
    )
    return out


def prepare_rows(x: torch.Tensor, gpu: Gpu) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [tokens, cols] -> float16 [tokens, padded columns] and scales, float32 [tokens]."""
    into = new_half_rows(x.shape[0], x.shape[1], gpu)
    prepare_plain(x, into, gpu)
    return into.halves, into.token_scale


def _multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float16 operands, float32 product; torch's matmul for the CPU has no such form."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def prefill_linear(
    matrix: PackedMatrix,
    x: torch.Tensor | HalfRows,
    out: torch.Tensor,
    gpu: Gpu,
    *,
    bias: torch.Tensor | None = None,
    add_to: bool = False,
    slab_bytes: int = SLAB_BYTES,
) -> torch.Tensor:
    """out = x @ matrix.T (+ bias), float32 [tokens, num_rows], for any number of tokens."""
    if isinstance(x, HalfRows):
        halves, token_scale = x.halves[: len(out)], x.token_scale[: len(out)]
    else:
        halves, token_scale = prepare_rows(x, gpu)
    cols = matrix.num_chunks * matrix.format.cols
    slab_tiles = max(1, slab_bytes // (2 * cols * ROWS))
    rescale = load_kernel(expand_source("rescale_kernel", matrix.format), gpu)
    used_tiles = -(-matrix.num_rows // ROWS)
    for tile in range(0, used_tiles, slab_tiles):
        num_tiles = min(slab_tiles, used_tiles - tile)
        weights = expand(matrix, tile, num_tiles, gpu)
        product = _multiply(halves[:, :cols], weights.T)
        row = tile * ROWS
        num_rows = min(matrix.num_rows - row, num_tiles * ROWS)
        rescale.launch(
            (-(-num_rows // 256), len(out)),
            256,
            *(product, matrix.row_scale[row:], token_scale, None if bias is None else bias[row:]),
            *(out[:, row:], num_tiles * ROWS, num_rows, out.stride(0), int(add_to)),
        )
    return out
