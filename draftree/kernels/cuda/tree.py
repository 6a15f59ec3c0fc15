"""Passes that a round sets up on the device itself: the draft tree, a plain step, the draft's own.

What a pass runs over is written into a `CudaPassArgs`; the anchor and the limits are read from the
request's params. Once the request has ended, every pass is one over nothing. One small block each.
"""

import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.lookup import MAX_LOOKED, DeviceText
from draftree.kernels.cuda.pass_args import CudaPassArgs
from draftree.kernels.cuda.request import PARAM_MACROS, RequestParams

MAX_NODES = 64
MAX_CANDIDATES = 64
_THREADS = 64
_GROWTH_BYTES = 20 * 1024  # of shared memory, for a tree that grows
_MACROS = (
    *PARAM_MACROS,
    ("MAX_NODES", MAX_NODES),
    ("MAX_CANDIDATES", MAX_CANDIDATES),
    ("MAX_LOOKED", MAX_LOOKED),
    ("GROWTH_BYTES", _GROWTH_BYTES),
)


def tree_source() -> KernelSource:
    return KernelSource("tree_kernel", ("bits", "request", "tree"), _MACROS)


def plan_source(name: str) -> KernelSource:
    return KernelSource(name, ("bits", "request", "plan"), PARAM_MACROS)


def build_tree(
    ids: torch.Tensor,  # int32 [positions, candidates], best first, no token twice in a row
    log_probs: torch.Tensor,  # float32 [positions, candidates]
    params: RequestParams,
    step: CudaPassArgs,
    gpu: Gpu,
    text: DeviceText | None = None,
    *,
    max_nodes: int = MAX_NODES,
) -> None:
    """The tree of decode/tree.py, as deep as the request still may go. text: what `find_match` has
    found in it is the first branch. max_nodes: with the root; the request has a budget, too.
    """
    num_positions, num_candidates = ids.shape
    if num_positions >= MAX_NODES or num_candidates > MAX_CANDIDATES or step.max_nodes > MAX_NODES:
        raise ValueError(f"a block of {tuple(ids.shape)} is too large for a tree on the device")
    if ids.shape != log_probs.shape or not (ids.is_contiguous() and log_probs.is_contiguous()):
        raise ValueError("candidates must be contiguous and of one shape")
    load_kernel(tree_source(), gpu).launch(
        (1,),
        _THREADS,
        *(ids, log_probs, params.device),
        *((None, None) if text is None else (text.match, text.tokens)),
        *(step.control, step.tokens, step.positions),
        *(step.parents, step.depths, step.order, step.rows, step.ancestors),
        *(num_positions, num_candidates, min(step.max_nodes, max_nodes), step.max_nodes),
        shared_bytes=_GROWTH_BYTES,
        is_chained=True,
    )


def plan_plain(params: RequestParams, step: CudaPassArgs, gpu: Gpu) -> None:
    """A committed pass over the anchor."""
    load_kernel(plan_source("plan_plain_kernel"), gpu).launch(
        (1,),
        _THREADS,
        *(params.device, step.control, step.tokens, step.positions, step.parents),
        *(step.depths, step.order, step.rows, step.ancestors),
        is_chained=True,
    )


def plan_block(
    params: RequestParams, draft_step: CudaPassArgs, mask_token: int, block_len: int, gpu: Gpu
) -> None:
    """The draft's pass over the anchor and block_len - 1 masks, whose rows are wanted."""
    if block_len > draft_step.max_tokens or block_len - 1 > draft_step.max_nodes:
        raise ValueError(f"a block of {block_len} does not fit the draft's step")
    load_kernel(plan_source("plan_block_kernel"), gpu).launch(
        (1,),
        _THREADS,
        *(params.device, draft_step.control, draft_step.tokens, draft_step.positions),
        *(draft_step.rows, mask_token, block_len),
        is_chained=True,
    )


def plan_context(step: CudaPassArgs, draft_step: CudaPassArgs, gpu: Gpu) -> None:
    """The draft's committed pass over the path that the target has just accepted."""
    load_kernel(plan_source("plan_context_kernel"), gpu).launch(
        (1,),
        _THREADS,
        *(step.control, step.tokens, step.path, draft_step.control),
        *(draft_step.tokens, draft_step.positions, draft_step.path),
        is_chained=True,
    )


def advance(step: CudaPassArgs, gpu: Gpu) -> None:
    """The path counts as committed; launched when every commit has read the old number."""
    load_kernel(plan_source("advance_kernel"), gpu).launch(
        (1,), _THREADS, step.control, is_chained=True
    )
