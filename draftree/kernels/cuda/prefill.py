"""Matrix products for long prompts: slabs of weights, as 16-bit floats, for cuBLAS.

Weights are rounded to 16 bits, which linear.py does not do. Products go straight to their place,
or are added to what is there, and are scaled afterwards where a token or a row has a scale; only
those with a bias take a detour. Scratch is bounded by `slab_bytes` of weights and one slab of
float32 products.
"""

import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.layout import ROWS, HalfRows, PackedMatrix, UnitFormat, new_half_rows
from draftree.kernels.cuda.prepare import plain, prepare
from draftree.kernels.quant.formats import QuantType

_SLAB_BYTES, _LONG_ROWS = 192 * 1024 * 1024, 4096  # of so many rows twice as much
_THREADS = 256


def expand_source(name: str, form: UnitFormat, band: int = 2) -> KernelSource:
    return KernelSource(name, ("bits", "format", "expand"), (*form.macros, ("BAND", band)))


def expand(matrix: PackedMatrix, first_band: int, num_bands: int, gpu: Gpu) -> torch.Tensor:
    """Whole bands as float16 [rows, padded columns], rows divided by their row_scale."""
    cols, band_rows = matrix.num_chunks * matrix.format.cols, matrix.band_tiles * ROWS
    out = torch.empty(
        (num_bands * band_rows, cols), dtype=torch.float16, device=matrix.units.device
    )
    source = expand_source("expand_kernel", matrix.format, matrix.band_tiles)
    load_kernel(source, gpu).launch(
        (num_bands * matrix.num_chunks * matrix.band_tiles,),
        256,
        *(matrix.units[first_band:], matrix.row_scale[first_band * band_rows :], out),
        *(matrix.num_chunks, cols),
    )
    return out


def prepare_rows(x: torch.Tensor, gpu: Gpu) -> HalfRows:
    """float32 [tokens, cols] as 16-bit floats, columns padded, and a scale for each token."""
    return prepare(plain(x), new_half_rows(x.shape[0], x.shape[1], gpu), gpu)


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, add_to: bool) -> None:
    """float16 operands, float32 product; torch's matmul for the CPU has no such form."""
    if not a.is_cuda:
        product = a.float() @ b.float()
        out.copy_(out + product if add_to else product)
    elif add_to:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)


def prefill_linear(
    matrix: PackedMatrix,
    x: torch.Tensor | HalfRows,
    out: torch.Tensor,
    gpu: Gpu,
    *,
    bias: torch.Tensor | None = None,
    add_to: bool = False,
    slab_bytes: int = 0,
) -> torch.Tensor:
    """out = x @ matrix.T (+ bias), float32 [tokens, num_rows], for any number of tokens."""
    rows = x if isinstance(x, HalfRows) else prepare_rows(x, gpu)
    halves, token_scale = rows.halves[: len(out)], rows.token_scale[: len(out)]
    cols, band_rows = matrix.num_chunks * matrix.format.cols, matrix.band_tiles * ROWS
    slab_bytes = slab_bytes or _SLAB_BYTES * (1 + (len(out) >= _LONG_ROWS))
    slab_bands = max(1, slab_bytes // (2 * cols * band_rows))
    rescale = load_kernel(expand_source("rescale_kernel", matrix.format), gpu)
    is_direct = bias is None  # cuBLAS writes to out
    # A warp looks at a token's scale; where rows may have some too, a block goes through them all.
    width = _THREADS if matrix.format.qtype is QuantType.F16 or not is_direct else 32
    blocks = (-(-len(out) * width // _THREADS),)
    scales = matrix.row_scale, token_scale, None, matrix.is_plain
    whole = None, *scales, out, len(out), width, 0, matrix.num_rows, out.stride(0)
    if is_direct and add_to:
        rescale.launch(blocks, _THREADS, *whole, 1)
    for band in range(0, matrix.num_bands, slab_bands):
        num_bands = min(slab_bands, matrix.num_bands - band)
        row = band * band_rows
        num_rows = min(matrix.num_rows - row, num_bands * band_rows)
        weights = expand(matrix, band, num_bands, gpu)[:num_rows]
        to = out[:, row : row + num_rows]
        product = to if is_direct else torch.empty(to.shape, device=out.device)
        _multiply(halves[:, :cols], weights.T, product, add_to=is_direct and add_to)
        if not is_direct:
            parts = matrix.row_scale[row:], token_scale, None if bias is None else bias[row:]
            sizes = len(out), width, num_rows, num_rows, out.stride(0), int(add_to)
            rescale.launch(blocks, _THREADS, product, *parts, matrix.is_plain, to, *sizes)
    if is_direct:
        rescale.launch(blocks, _THREADS, *whole, 0)
    return out
