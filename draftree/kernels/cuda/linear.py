"""Matrix products for a few tokens, 1 to 64 and more in slices: quantised weights, float32 results.

Activations are 16-bit floats already, made once for all matrices that read them (prepare.py). A
token's result has the same bits whatever other tokens share the call. The number of
tokens may lie in device memory, so that one CUDA graph serves several. Long prompts: prefill.py.
"""

from dataclasses import dataclass, replace

import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.layout import (
    X_TILE_BYTES,
    Activations,
    PackedMatrix,
    UnitFormat,
    band_tiles,
)
from draftree.kernels.quant.formats import QuantType

TOKEN_TILES = (1, 2, 3, 4, 6, 8)  # kernels exist for this many groups of 8 tokens
# Kernels for more tiles run out of registers; two launches are faster.
_MOST_TILES = dict.fromkeys((QuantType.F16, QuantType.Q8_0), 8)
_FEW_TILES = 4
_MOST_STAGES = 6
# Weights on their way to a block. More would only take bandwidth from the end of the product
# before, for which everything waits. Where a step takes longer, fewer steps ahead are enough.
_RING_BYTES, _SHORT_RING_BYTES = 100 * 1024, 70 * 1024
_LONG_STEP_TILES = 3
_STRIP = 16  # rows
_SWAP_TILES = 4
_RESERVED_SHARED = 2048  # what a block needs beside its stages, and the driver's own


@dataclass(frozen=True)
class Workspace:
    """Scratch for partial sums; products that share one must follow each other on one stream."""

    partial: torch.Tensor  # float32
    arrived: torch.Tensor  # int32 [strips], zero between launches


@dataclass(frozen=True)
class LinearPlan:
    """How one product is launched: a kernel for some token tiles with a ring of some stages."""

    format: UnitFormat
    token_tiles: int
    band_tiles: int  # row tiles that a block works on at once
    num_stages: int
    use_bulk: bool = True  # bulk copies, on chips that have them

    @property
    def stage_bytes(self) -> int:
        x_bytes = self.token_tiles * self.format.cols // 128 * X_TILE_BYTES
        return self.band_tiles * self.format.unit_bytes + x_bytes

    @property
    def swap_bytes(self) -> int:
        """Through which warps swap strips."""
        return 16 * self.num_threads * min(self.token_tiles, _SWAP_TILES)

    @property
    def shared_bytes(self) -> int:
        return self.num_stages * self.stage_bytes + self.swap_bytes

    @property
    def num_threads(self) -> int:
        return 256 * self.band_tiles

    @property
    def source(self) -> KernelSource:
        macros = (
            *self.format.macros,
            ("TOKEN_TILES", self.token_tiles),
            ("BAND", self.band_tiles),
            ("STAGES", self.num_stages),
            *(() if self.use_bulk else (("BULK", 0),)),
        )
        return KernelSource("linear_kernel", ("bits", "format", "ring", "linear"), macros)


def plan_linear(form: UnitFormat, num_tokens: int, gpu: Gpu) -> LinearPlan:
    """The kernel for num_tokens, which are shared out evenly if they are too many for a launch."""
    room, band = gpu.shared_per_block - gpu.reserved_shared(_RESERVED_SHARED), band_tiles(gpu)
    most = _MOST_TILES.get(form.qtype, _FEW_TILES)
    plans = [LinearPlan(form, tiles, band, 2) for tiles in TOKEN_TILES if tiles <= most]
    fitting = [plan for plan in plans if plan.shared_bytes <= room]
    wanted = -(-num_tokens // 8)
    num_launches = -(-wanted // fitting[-1].token_tiles)
    plan = next(plan for plan in fitting if plan.token_tiles * num_launches >= wanted)
    ring_bytes = _RING_BYTES if plan.token_tiles < _LONG_STEP_TILES else _SHORT_RING_BYTES
    enough = -(-ring_bytes // (band * form.unit_bytes)) if gpu.can_chain else _MOST_STAGES
    most_stages = (room - plan.swap_bytes) // plan.stage_bytes
    return replace(plan, num_stages=max(2, min(enough, _MOST_STAGES, most_stages)))


def partial_floats(token_tiles: int, gpu: Gpu) -> int:
    """Two bands' sums of every block, for so many groups of 8 tokens."""
    return gpu.num_sms * 2 * token_tiles * 8 * 128 * band_tiles(gpu)


def new_workspace(max_rows: int, max_tokens: int, gpu: Gpu) -> Workspace:
    """Scratch for matrices of up to max_rows rows."""
    tiles = next((n for n in TOKEN_TILES if n * 8 >= max_tokens), TOKEN_TILES[-1])
    floats, place = partial_floats(tiles, gpu), gpu.place
    band = 128 * band_tiles(gpu)
    strips = -(-max_rows // band) * band // _STRIP
    arrived = torch.zeros(strips, dtype=torch.int32, device=place)
    return Workspace(torch.empty(floats, device=place), arrived)


def linear(
    matrix: PackedMatrix,
    x: Activations,
    out: torch.Tensor,
    workspace: Workspace,
    gpu: Gpu,
    *,
    bias: torch.Tensor | None = None,
    add_to: bool = False,
    live: torch.Tensor | None = None,
    plan: LinearPlan | None = None,
    is_chained: bool = True,
) -> torch.Tensor:
    """out = x @ matrix.T (+ bias), float32 [tokens, num_rows]; add_to adds to what out holds.

    Rows from `live` (int32 [1] on the device) on are left as they are.
    """
    num_tokens = out.shape[0]
    if out.dtype != torch.float32 or out.shape[1] != matrix.num_rows or out.stride(1) != 1:
        raise ValueError(
            f"expected float32 rows of {matrix.num_rows}, not {out.dtype} {tuple(out.shape)}"
        )
    if x.num_cols != matrix.num_cols or num_tokens > 8 * x.num_tiles:
        raise ValueError(f"{x.num_tiles} tiles of {x.num_cols} columns do not fit the product")
    plan = plan or plan_linear(matrix.format, num_tokens, gpu)
    if partial_floats(plan.token_tiles, gpu) > workspace.partial.numel():
        raise ValueError(f"the workspace is too small for {8 * plan.token_tiles} tokens")
    kernel = load_kernel(plan.source, gpu)
    for first_token in range(0, num_tokens, 8 * plan.token_tiles):
        kernel.launch(
            (matrix.num_shares,),
            plan.num_threads,
            *(matrix.units, matrix.row_scale, x.halves, x.token_scale, out, bias),
            *(workspace.partial, workspace.arrived, live),
            min(8 * plan.token_tiles, num_tokens - first_token),
            *(first_token, matrix.num_rows, matrix.num_bands, matrix.num_chunks),
            *(x.num_tiles, out.stride(0), int(add_to)),
            shared_bytes=plan.shared_bytes,
            is_chained=is_chained,
        )
    return out
