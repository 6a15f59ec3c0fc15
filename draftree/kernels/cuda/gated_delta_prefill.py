"""The gated delta rule for long committed chains: chunks of 64 rows on the matrix units.

One kernel solves what a chunk needs of itself, for all chunks at once; a second takes the state
through them. The state and all sums are float32, operands have 11 bits, so the bits are not those
of gated_delta.py; they are the same in every run. Scratch is bounded by `_SLAB_ROWS`.
"""

from dataclasses import dataclass

import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.gated_delta import CudaDelta, check_inputs
from draftree.kernels.cuda.pass_args import CudaPassArgs

CHUNK = 64
_SLAB_ROWS = 16 * CHUNK
_FILES = ("bits", "gated_delta_bits")
_RESERVED_SHARED = 1024


def chunk_source(head_dim: int) -> KernelSource:
    macros = (("HEAD_DIM", head_dim),)
    return KernelSource("delta_chunk_kernel", (*_FILES, "gated_delta_chunk"), macros)


def chunk_shared_bytes(head_dim: int) -> int:
    return CHUNK * (2 * (head_dim + 8) + 4 * (CHUNK + 4) + 8 * head_dim)


@dataclass(frozen=True)
class PassPlan:
    """How the state is shared out: columns of a block, and chunks that are read ahead."""

    head_dim: int
    cols: int
    num_stages: int

    @property
    def shared_bytes(self) -> int:
        keys, rows = self.head_dim + 8, CHUNK + 8
        stage = 2 * (2 * CHUNK * keys + self.head_dim * rows + CHUNK * rows) + 4 * CHUNK
        return 4 * self.cols * (keys + rows) + self.num_stages * stage

    @property
    def source(self) -> KernelSource:
        macros = (("HEAD_DIM", self.head_dim), ("COLS", self.cols), ("STAGES", self.num_stages))
        return KernelSource("delta_pass_kernel", (*_FILES, "gated_delta_pass"), macros)


def plan_pass(head_dim: int, gpu: Gpu) -> PassPlan:
    room = gpu.shared_per_block - _RESERVED_SHARED
    plans = [PassPlan(head_dim, min(head_dim, c), n) for c, n in ((64, 2), (32, 2), (32, 1))]
    return next(plan for plan in plans if plan.shared_bytes <= room)


def gated_delta_prefill(
    qkv: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    decay_bias: torch.Tensor,
    state: CudaDelta,
    step: CudaPassArgs,
    out: torch.Tensor,
    gpu: Gpu,
) -> torch.Tensor:
    """Like `gated_delta` for a committed chain of any length."""
    check_inputs(qkv, alpha, beta, decay, decay_bias, state, out)
    for first in range(0, qkv.shape[0], _SLAB_ROWS):
        slab = slice(first, first + _SLAB_ROWS)
        rows = qkv[slab], alpha[slab], beta[slab]
        _advance_slab(first, *rows, decay, decay_bias, state, step, out[slab], gpu)
    return out


def _advance_slab(
    first: int,
    qkv: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    decay_bias: torch.Tensor,
    state: CudaDelta,
    step: CudaPassArgs,
    out: torch.Tensor,
    gpu: Gpu,
) -> None:
    num_rows, dim = qkv.shape[0], state.head_dim
    key_heads, heads, chunks = state.key_heads, state.value_heads, -(-num_rows // CHUNK)

    def half(*shape: int) -> torch.Tensor:
        return torch.empty((chunks, *shape), dtype=torch.float16, device=gpu.place)

    queries, keys = half(key_heads, CHUNK, dim), half(key_heads, dim, CHUNK)
    u = torch.empty((chunks, heads, CHUNK, dim), device=gpu.place)
    w, products = half(heads, CHUNK, dim), half(heads, CHUNK, CHUNK)
    growth = torch.empty((chunks, heads, CHUNK), device=gpu.place)
    parts = queries, keys, u, w, products, growth
    load_kernel(chunk_source(dim), gpu).launch(
        (chunks, key_heads),
        256,
        *(step.control, first, qkv, alpha, beta, decay, decay_bias, *parts),
        *(num_rows, key_heads, heads, qkv.stride(0), alpha.stride(0), beta.stride(0)),
        shared_bytes=chunk_shared_bytes(dim),
        is_chained=True,
    )
    plan = plan_pass(dim, gpu)
    load_kernel(plan.source, gpu).launch(
        (heads, dim // plan.cols),
        256,
        *(step.control, first, *parts, state.state, out, num_rows, key_heads, heads),
        out.stride(0),
        shared_bytes=plan.shared_bytes,
        is_chained=True,
    )
