"""What follows each candidate of a draft, where a candidate's score depends on the one before it.

In: the candidates of each position as `rank` left them, tables with a row for each token, what the
draft made of its block. Out: for every parent its children, best first, as `Sampler.rank_edges` and
decode/tree.py have them. Knows nothing of trees.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.layout import unit_format
from draftree.kernels.cuda.pass_args import CudaPassArgs
from draftree.kernels.cuda.request import PARAM_MACROS, RequestParams
from draftree.kernels.cuda.sampling import MAX_CANDIDATES
from draftree.kernels.quant.formats import QuantType

_THREADS = 256
_VECTOR = 16  # bytes that a kernel reads at once


@dataclass(frozen=True)
class PairTables:
    """Rows by token in one format, and rows of the block's positions for what lies between."""

    qtype: QuantType
    before: torch.Tensor  # uint8 [rows, row_bytes]
    after: torch.Tensor
    row_of: torch.Tensor | None  # int32, by token; the last stands for tokens after it
    hidden: torch.Tensor  # float32 [positions, width]


class Edges(NamedTuple):
    """[positions, parents, candidates], best first; at the first position there is one parent."""

    log_probs: torch.Tensor  # float32
    picks: torch.Tensor  # uint8, the columns of `rank`


def new_edges(num_positions: int, num_candidates: int, gpu: Gpu) -> Edges:
    shape = num_positions, num_candidates, num_candidates
    size = num_positions * num_candidates**2
    log_probs = torch.zeros(size + _VECTOR, device=gpu.place)
    picks = torch.zeros(size + _VECTOR, dtype=torch.uint8, device=gpu.place)
    return Edges(log_probs[:size].view(shape), picks[:size].view(shape))


def edges_source(qtype: QuantType) -> KernelSource:
    own = ("SOURCE", qtype.value), ("MAX_CANDIDATES", MAX_CANDIDATES)
    files = ("bits", "request", "format", "raw", "edges")
    return KernelSource("edges_kernel", files, (*PARAM_MACROS, *unit_format(qtype).macros, *own))


def score_edges(
    ids: torch.Tensor,  # int32 [positions, candidates], best first
    log_probs: torch.Tensor,  # float32 [positions, candidates]
    tables: PairTables,
    edges: Edges,
    params: RequestParams,
    draft_step: CudaPassArgs,
    gpu: Gpu,
    later_logits: float,
) -> None:
    """Fills edges, for the live rows of the draft. later_logits: as `rank` has it."""
    num_positions, count = ids.shape
    width, row_of = tables.hidden.shape[1], tables.row_of
    row_bytes = width // tables.qtype.block_len * tables.qtype.block_bytes
    if edges.log_probs.shape != (num_positions, count, count) or count > MAX_CANDIDATES:
        raise ValueError(f"{count} candidates do not fit edges of {tuple(edges.log_probs.shape)}")
    if tables.before.shape[1] != row_bytes or tables.after.shape[1] != row_bytes:
        raise ValueError(f"rows of tables do not have {width} values")
    if len(tables.hidden) < num_positions or tables.hidden.stride(1) != 1:
        raise ValueError(f"expected rows for {num_positions} positions")
    load_kernel(edges_source(tables.qtype), gpu).launch(
        (num_positions, count),
        _THREADS,
        *(ids, log_probs, params.device, draft_step.control, tables.hidden),
        *(tables.before, tables.after, row_of, edges.log_probs, edges.picks),
        *(0 if row_of is None else len(row_of), len(tables.before), len(tables.after)),
        *(width, tables.hidden.stride(0), count, later_logits),
        shared_bytes=4 * width,
        is_chained=True,
    )
