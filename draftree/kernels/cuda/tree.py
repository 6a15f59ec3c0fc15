"""Passes that a round sets up on the device itself: the draft tree, a plain step, the draft's own.

What a pass runs over is written into a `CudaPassArgs`; the anchor and the limits are read from the
request's params. Once the request has ended, every pass is one over nothing. One small block each.
"""

from collections.abc import Sequence

import numpy as np
import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.edges import Edges
from draftree.kernels.cuda.lookup import DeviceText
from draftree.kernels.cuda.pass_args import CudaPassArgs
from draftree.kernels.cuda.request import MAX_LOOKED, PARAM_MACROS, RequestParams

MAX_NODES = 64
MAX_CANDIDATES = 64
_THREADS = 64
# Of shared memory, for a tree that grows, without edges and with them.
_GROWTH_BYTES = 20 * 1024, 24 * 1024
_MACROS = (
    *PARAM_MACROS,
    ("MAX_NODES", MAX_NODES),
    ("MAX_CANDIDATES", MAX_CANDIDATES),
    ("MAX_LOOKED", MAX_LOOKED),
)


class TreeBuffer:
    """A tree's tokens and parents in pinned memory, between the host and kernels."""

    def __init__(self, gpu: Gpu) -> None:
        length = 1 + 2 * MAX_NODES
        self.words = torch.zeros(length, dtype=torch.int32, pin_memory=gpu.is_real)
        self._words: np.ndarray = self.words.numpy()

    def read(self) -> tuple[list[int], list[int]]:
        """Tokens and parents; of no nodes if the request had ended."""
        num_nodes, *words = self._words.tolist()
        return words[:num_nodes], words[MAX_NODES : MAX_NODES + num_nodes]

    def write(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        num_nodes = len(tokens)
        rest = (0,) * (MAX_NODES - num_nodes)
        self._words[: 1 + MAX_NODES + num_nodes] = (num_nodes, *tokens, *rest, *parents)


def tree_source(name: str = "tree_kernel", *, has_edges: bool = False) -> KernelSource:
    own = ("HAS_EDGES", int(has_edges)), ("GROWTH_BYTES", _GROWTH_BYTES[has_edges])
    return KernelSource(name, ("bits", "request", "tree"), (*_MACROS, *own))


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
    drafted: TreeBuffer | None = None,
    edges: Edges | None = None,
    width: int = 0,
) -> None:
    """The tree of decode/tree.py, as deep as the request still may go. text: what `find_match` has
    found in it is the first branch. max_nodes: with the root; the request has a budget, too.
    drafted: gets the tree instead of the step, as large as trees can be, for the host to choose
    from. edges: what counts instead of log_probs. width: candidates of a position, 0 for all.
    """
    num_positions, num_candidates = ids.shape
    if num_positions >= MAX_NODES or num_candidates > MAX_CANDIDATES or step.max_nodes > MAX_NODES:
        raise ValueError(f"a block of {tuple(ids.shape)} is too large for a tree on the device")
    if ids.shape != log_probs.shape or not (ids.is_contiguous() and log_probs.is_contiguous()):
        raise ValueError("candidates must be contiguous and of one shape")
    if edges is not None and edges.log_probs.shape != (*ids.shape, num_candidates):
        raise ValueError("edges are not those of the candidates")
    limit = min(step.max_nodes, max_nodes) if drafted is None else MAX_NODES
    has_edges = edges is not None
    load_kernel(tree_source(has_edges=has_edges), gpu).launch(
        (1,),
        _THREADS,
        *(ids, *((log_probs, None) if edges is None else edges), params.device),
        *((None, None) if text is None else (text.match, text.tokens)),
        None if drafted is None else drafted.words,
        *(step.control, step.tokens, step.positions),
        *(step.parents, step.depths, step.order, step.rows, step.ancestors),
        *(num_positions, num_candidates, width or num_candidates, limit, step.max_nodes),
        shared_bytes=_GROWTH_BYTES[has_edges],
        is_chained=True,
    )


def plan_tree(tree: TreeBuffer, params: RequestParams, step: CudaPassArgs, gpu: Gpu) -> None:
    """A speculative pass over a tree of the host, which fits the step and the request."""
    load_kernel(tree_source("plan_tree_kernel"), gpu).launch(
        (1,),
        _THREADS,
        *(tree.words, params.device, step.control, step.tokens, step.positions, step.parents),
        *(step.depths, step.order, step.rows, step.ancestors, step.max_nodes),
        shared_bytes=_GROWTH_BYTES[False],
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
