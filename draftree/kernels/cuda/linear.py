"""Matrix products for a few tokens, 1 to 64 and more in slices: quantised weights, float32 results.

Activations are 16-bit floats already, made once for all matrices that read them (prepare.py); of a
single token that is fused: each block makes them itself. A token's result has the same bits
whatever other tokens share the call. The number of tokens may lie in device memory, so that one
CUDA graph serves several. Long prompts: prefill.py.
"""

from dataclasses import dataclass, replace

import torch

from draftree.kernels.cuda.compile import Argument, Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.layout import (
    X_COLS,
    X_TILE_BYTES,
    Activations,
    PackedMatrix,
    UnitFormat,
    band_tiles,
    unit_format,
)
from draftree.kernels.cuda.prepare import (
    ROW_FILES,
    RowPlan,
    RowSource,
    row_macros,
    takes_warpgroups,
)
from draftree.kernels.quant.formats import QuantType

TOKEN_TILES = (1, 2, 3, 4, 6, 8)  # kernels exist for this many groups of 8 tokens
# Kernels of single warps for more tiles run out of registers; two launches are faster.
_MOST_TILES = dict.fromkeys((QuantType.F16, QuantType.Q8_0), 8)
_FEW_TILES = 4
_MOST_STAGES = 6
_RING_BYTES = 100 * 1024  # of weights on their way to a block
_RESERVED_SHARED = 2048  # what a block needs beside its stages, and the driver's own
_MOST_SLICES = (
    2  # of 8 columns in a thread; made by every block, a longer row costs more than it saves
)


@dataclass(frozen=True)
class Workspace:
    """Scratch for partial sums; products that share one must follow each other on one stream."""

    partial: torch.Tensor  # int32, the bits of float32; -1 between launches


@dataclass(frozen=True)
class LinearPlan:
    """How one product is launched: a kernel for some token tiles with a ring of some stages."""

    format: UnitFormat
    token_tiles: int
    band_tiles: int  # row tiles that a block works on at once
    num_stages: int
    use_bulk: bool = True  # bulk copies, on chips that have them
    own_cols: int = 0  # of a row that blocks make themselves, padded; 0: there are tiles
    row_macros: tuple[tuple[str, int], ...] = ()  # how they make it
    has_warpgroups: bool = False  # whose matrix instructions multiply
    early_stages: int = 2  # filled before earlier kernels have ended
    least_shared: int = 0  # bytes

    @property
    def stage_bytes(self) -> int:
        x_bytes = 0 if self.own_cols else self.x_bytes
        return self.band_tiles * self.format.unit_bytes + x_bytes

    @property
    def x_bytes(self) -> int:
        """Tiles of activations that go with a step."""
        return self.token_tiles * self.format.cols // 128 * X_TILE_BYTES

    @property
    def shared_bytes(self) -> int:
        return max(self.num_stages * self.stage_bytes + self.fixed_bytes, self.least_shared)

    @property
    def fixed_bytes(self) -> int:
        """Beside the stages; a row takes 2 bytes a column, and 4 bytes for the sum of 32."""
        return self.own_cols // 32 * 68

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
            ("EARLY_STAGES", min(self.early_stages, self.num_stages)),
            *(() if self.use_bulk else (("BULK", 0),)),
            *self.row_macros,
        )
        row_files = ROW_FILES if self.own_cols else ()
        multiply: tuple[str, ...] = ("multiply_halves",)
        if self.has_warpgroups:
            multiply = "warpgroup", "multiply_warpgroup"
        files = ("bits", "format", "ring", *row_files, "strip", *multiply, "linear")
        return KernelSource("linear_kernel", files, macros)


def plan_linear(form: UnitFormat, num_tokens: int, gpu: Gpu) -> LinearPlan:
    """The kernel for num_tokens, which are shared out evenly if they are too many for a launch."""
    band, is_wide = band_tiles(gpu), takes_warpgroups(num_tokens, gpu)
    most = TOKEN_TILES[-1] if is_wide else _MOST_TILES.get(form.qtype, _FEW_TILES)
    plans = [
        LinearPlan(form, tiles, band, 2, has_warpgroups=is_wide)
        for tiles in TOKEN_TILES
        if tiles <= most
    ]
    fitting = [plan for plan in plans if plan.shared_bytes <= _room(gpu)]
    wanted = -(-num_tokens // 8)
    num_launches = -(-wanted // fitting[-1].token_tiles)
    plan = next(plan for plan in fitting if plan.token_tiles * num_launches >= wanted)
    return _with_stages(plan, gpu, is_single=num_tokens == 1)


def can_own_row(padded_cols: int, gpu: Gpu) -> bool:
    """Whether blocks make a row of so many columns themselves, for a matrix of any format."""
    widest = unit_format(QuantType.F16)
    plan = LinearPlan(widest, 1, band_tiles(gpu), 2, own_cols=padded_cols)
    slices = _own_plan(padded_cols, gpu).num_slices
    return slices <= _MOST_SLICES and plan.shared_bytes <= _room(gpu)


def plan_own_row(matrix: PackedMatrix, source: RowSource, gpu: Gpu) -> LinearPlan:
    """The kernel for one token whose activations each block makes itself."""
    cols = -(-matrix.num_chunks * matrix.format.cols // X_COLS) * X_COLS
    row = row_macros(source.op, source.head_dim, _own_plan(cols, gpu))
    macros = (("OWN_ROW", 1), *row)
    plan = LinearPlan(matrix.format, 1, band_tiles(gpu), 2, True, cols, macros)
    return _with_stages(plan, gpu, is_single=True)


def _own_plan(padded_cols: int, gpu: Gpu) -> RowPlan:
    num_warps = 8 * band_tiles(gpu)
    return RowPlan(1, num_warps, -(-padded_cols // X_COLS // num_warps))


def _with_stages(plan: LinearPlan, gpu: Gpu, *, is_single: bool) -> LinearPlan:
    step_bytes = plan.band_tiles * plan.format.unit_bytes
    most = min(_MOST_STAGES, (_room(gpu) - plan.fixed_bytes) // plan.stage_bytes)
    if not gpu.can_chain:
        return replace(plan, num_stages=max(2, most), early_stages=max(2, most))
    stages = max(2, min(most, -(-_RING_BYTES // step_bytes)))
    # More than one would take bandwidth from the end of the product before, for which everything
    # waits; what a single row leaves to others is less than what it gains.
    early = stages if is_single or gpu.rehearsal.is_persistent else 1
    # Two blocks on one multiprocessor would leave another one without.
    least = 0 if gpu.rehearsal.is_persistent else gpu.shared_per_sm // 2
    return replace(plan, num_stages=stages, early_stages=early, least_shared=least)


def _room(gpu: Gpu) -> int:
    """Dynamic shared memory of a block."""
    return gpu.shared_per_block - gpu.reserved_shared(_RESERVED_SHARED)


def partial_floats(token_tiles: int, gpu: Gpu) -> int:
    """Two bands' sums of every block, for so many groups of 8 tokens."""
    return gpu.num_sms * 2 * token_tiles * 8 * 128 * band_tiles(gpu)


def new_workspace(max_tokens: int, gpu: Gpu) -> Workspace:
    """Scratch for products of up to max_tokens."""
    tiles = next((n for n in TOKEN_TILES if n * 8 >= max_tokens), TOKEN_TILES[-1])
    shape = (partial_floats(tiles, gpu),)
    return Workspace(torch.full(shape, -1, dtype=torch.int32, device=gpu.place))


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
    _check_out(matrix, out)
    if x.num_cols != matrix.num_cols or num_tokens > 8 * x.num_tiles:
        raise ValueError(f"{x.num_tiles} tiles of {x.num_cols} columns do not fit the product")
    plan = plan or plan_linear(matrix.format, num_tokens, gpu)
    _check_workspace(plan, workspace, gpu)
    kernel = load_kernel(plan.source, gpu)
    for first_token in range(0, num_tokens, 8 * plan.token_tiles):
        count = min(8 * plan.token_tiles, num_tokens - first_token)
        kernel.launch(
            (matrix.num_shares,),
            plan.num_threads,
            *_arguments(matrix, out, workspace, bias, live, (count, first_token), add_to=add_to),
            *(x.halves, x.token_scale, x.num_tiles),
            shared_bytes=plan.shared_bytes,
            is_chained=is_chained,
            is_joint=True,
        )
    return out


def linear_row(
    matrix: PackedMatrix,
    source: RowSource,
    out: torch.Tensor,
    workspace: Workspace,
    gpu: Gpu,
    *,
    bias: torch.Tensor | None = None,
    add_to: bool = False,
    live: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same for one row, which each block makes from `source` itself (can_own_row)."""
    _check_out(matrix, out)
    source.check(matrix.num_cols)
    plan = plan_own_row(matrix, source, gpu)
    if source.num_rows != 1 or len(out) != 1:
        raise ValueError(f"a single row is expected, not {source.num_rows}")
    _check_workspace(plan, workspace, gpu)
    load_kernel(plan.source, gpu).launch(
        (matrix.num_shares,),
        plan.num_threads,
        *_arguments(matrix, out, workspace, bias, live, (1, 0), add_to=add_to),
        *(source.x, source.other, source.weight, source.rows, source.copy, float(source.eps)),
        *(matrix.num_cols, source.x.stride(0)),
        shared_bytes=plan.shared_bytes,
        is_chained=True,
        is_joint=True,
    )
    return out


def _arguments(
    matrix: PackedMatrix,
    out: torch.Tensor,
    workspace: Workspace,
    bias: torch.Tensor | None,
    live: torch.Tensor | None,
    tokens: tuple[int, int],
    *,
    add_to: bool,
) -> tuple[Argument, ...]:
    """All but where activations come from. tokens: how many, and the first."""
    return (
        *(matrix.units, matrix.row_scale, out, bias, workspace.partial, live),
        *(*tokens, matrix.num_rows, matrix.num_bands, matrix.num_chunks),
        *(out.stride(0), int(add_to)),
    )


def _check_out(matrix: PackedMatrix, out: torch.Tensor) -> None:
    if out.dtype != torch.float32 or out.shape[1] != matrix.num_rows or out.stride(1) != 1:
        raise ValueError(
            f"expected float32 rows of {matrix.num_rows}, not {out.dtype} {tuple(out.shape)}"
        )


def _check_workspace(plan: LinearPlan, workspace: Workspace, gpu: Gpu) -> None:
    if partial_floats(plan.token_tiles, gpu) > workspace.partial.numel():
        raise ValueError(f"the workspace is too small for {8 * plan.token_tiles} tokens")
