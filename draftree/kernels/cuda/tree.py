"""Passes that a round sets up on the device itself: the draft tree, a plain step, the draft's own.

What a pass runs over is written into a `CudaStep`; the anchor and the limits are read from the
request's words. Once the request has ended, every pass is one over nothing. One small block each.
"""

import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.pass_args import CudaStep
from draftree.kernels.cuda.request import WORD_MACROS, RequestWords

MAX_NODES = 64
MAX_CANDIDATES = 64
_THREADS = 64
_MACROS = (*WORD_MACROS, ("MAX_NODES", MAX_NODES), ("MAX_CANDIDATES", MAX_CANDIDATES))


def tree_source() -> KernelSource:
    return KernelSource("tree_kernel", ("bits", "request", "tree"), _MACROS)


def plan_source(name: str) -> KernelSource:
    return KernelSource(name, ("bits", "request", "plan"), WORD_MACROS)


def build_tree(
    ids: torch.Tensor,  # int32 [positions, candidates], best first, no token twice in a row
    log_probs: torch.Tensor,  # float32 [positions, candidates]
    words: RequestWords,
    step: CudaStep,
    gpu: Gpu,
) -> None:
    """The tree of decode/tree.py, without lookup, as deep as the request still may go."""
    num_positions, num_candidates = ids.shape
    if num_positions >= MAX_NODES or num_candidates > MAX_CANDIDATES or step.max_nodes > MAX_NODES:
        raise ValueError(f"a block of {tuple(ids.shape)} is too large for a tree on the device")
    if ids.shape != log_probs.shape or not (ids.is_contiguous() and log_probs.is_contiguous()):
        raise ValueError("candidates must be contiguous and of one shape")
    load_kernel(tree_source(), gpu).launch(
        (1,),
        _THREADS,
        *(ids, log_probs, words.device, step.control, step.tokens, step.positions),
        *(step.parents, step.depths, step.order, step.rows, step.ancestors),
        *(num_positions, num_candidates, step.max_nodes),
        is_chained=True,
    )


def plan_plain(words: RequestWords, step: CudaStep, gpu: Gpu) -> None:
    """A certain pass over the anchor."""
    load_kernel(plan_source("plan_plain_kernel"), gpu).launch(
        (1,),
        _THREADS,
        *(words.device, step.control, step.tokens, step.positions, step.parents),
        *(step.depths, step.order, step.rows, step.ancestors),
        is_chained=True,
    )


def plan_block(
    words: RequestWords, draft_step: CudaStep, mask_token: int, block_len: int, gpu: Gpu
) -> None:
    """The draft's pass over the anchor and block_len - 1 masks, whose rows are wanted."""
    if block_len > draft_step.max_tokens or block_len - 1 > draft_step.max_nodes:
        raise ValueError(f"a block of {block_len} does not fit the draft's step")
    load_kernel(plan_source("plan_block_kernel"), gpu).launch(
        (1,),
        _THREADS,
        *(words.device, draft_step.control, draft_step.tokens, draft_step.positions),
        *(draft_step.rows, mask_token, block_len),
        is_chained=True,
    )


def plan_context(step: CudaStep, draft_step: CudaStep, gpu: Gpu) -> None:
    """The draft's certain pass over the path that the target has just accepted."""
    load_kernel(plan_source("plan_context_kernel"), gpu).launch(
        (1,),
        _THREADS,
        *(step.control, step.tokens, step.path, draft_step.control),
        *(draft_step.tokens, draft_step.positions, draft_step.path),
        is_chained=True,
    )


def advance(step: CudaStep, gpu: Gpu) -> None:
    """The path counts as committed; launched when every commit has read the old number."""
    load_kernel(plan_source("advance_kernel"), gpu).launch(
        (1,), _THREADS, step.control, is_chained=True
    )
