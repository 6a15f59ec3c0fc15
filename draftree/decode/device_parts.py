"""What rounds on a GPU are made of: the recorded programs of a target and its draft, and trees as
their records tell them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from draftree.core import DraftTree, SamplingParams, TokenScores, TokenSource
from draftree.decode.sampler import LATER_WEIGHTS
from draftree.drafts.drafter import Drafter
from draftree.kernels.cpu.sampling import SamplingArgs
from draftree.kernels.cuda.accept import RoundRecord
from draftree.kernels.cuda.compile import Gpu
from draftree.kernels.cuda.edges import Edges, PairTables, new_edges, score_edges
from draftree.kernels.cuda.ops import CudaOps
from draftree.kernels.cuda.pass_args import CudaPassArgs
from draftree.kernels.cuda.process import process
from draftree.kernels.cuda.program import Program, bucket
from draftree.kernels.cuda.request import RequestParams
from draftree.kernels.cuda.sampling import (
    SamplingWorkspace,
    new_candidates,
    new_choices,
    rank,
)
from draftree.kernels.cuda.tree import TreeBuffer, plan_block
from draftree.kernels.ops import Ops, narrow
from draftree.models.target import Target

if TYPE_CHECKING:
    import torch

    Candidates = tuple[torch.Tensor, torch.Tensor]

MAX_CANDIDATES = 16  # of a position, where nothing else says how many


class Choosing(NamedTuple):
    """How a request chooses, as far as it takes other kernels."""

    use_threshold: bool = False
    is_processed: bool = False  # there is a bias or a penalty
    has_scores: bool = False
    use_lookup: bool = False


@dataclass(frozen=True)
class TargetParts:
    ops: CudaOps
    body: Program
    head: Program
    commit: Program
    logits: "torch.Tensor"  # float32 [max_nodes, vocab_size]
    features: "torch.Tensor | None"  # float32 [max_tokens, width]


@dataclass(frozen=True)
class DraftParts:
    ops: CudaOps
    context: Program
    block: Program
    head: Program
    features: "torch.Tensor"  # what the context program reads, float32 [max_tokens, width]
    logits: "torch.Tensor"  # float32 [max_nodes, num_tokens], of tokens that may be proposed
    mask_token: int
    block_len: int
    pairs: PairTables | None = None  # where scores depend on the candidate before
    num_pairs: int = 0  # candidates of a position that are then scored

    def new_candidates(self, budget: int) -> "tuple[Candidates, Edges | None]":
        """What the draft proposes: so many at each position."""
        num_positions, gpu = self.block_len - 1, self.ops.gpu
        if self.pairs is None:
            count = min(max(budget, 1), MAX_CANDIDATES, self.logits.shape[1])
            return new_candidates(num_positions, count, gpu), None
        count = min(self.num_pairs, self.logits.shape[1])
        candidates = new_candidates(num_positions, count, gpu)
        return candidates, new_edges(num_positions, count, gpu)

    def propose(
        self,
        found: "tuple[Candidates, Edges | None]",
        step: CudaPassArgs,
        params: RequestParams,
        workspace: SamplingWorkspace,
        *,
        is_processed: bool,
    ) -> None:
        """Launch the block, and rank its candidates. step: the target's."""
        (candidates, edges), own, gpu = found, self.ops.step, self.ops.gpu
        num_positions = self.block_len - 1
        plan_block(params, own, self.mask_token, self.block_len, gpu)
        self.block.launch(bucket(self.block_len))
        self.head.launch(bucket(num_positions))
        logits = self.logits[:num_positions]
        if is_processed:
            process(logits, own, params, gpu, use_counts=True, has_nodes=False)
        later = LATER_WEIGHTS
        rank(logits, step, own, params, *candidates, workspace, gpu, later_weights=later)
        if self.pairs is not None and edges is not None:
            score_edges(*candidates, self.pairs, edges, params, own, gpu, later.logits)


class HostExchange:
    """What the host and rounds over its trees write for each other, in pinned memory: a draft and
    the tree made of it, the choice after each node, whether paths must not go on to it, and the
    best tokens after it.
    """

    def __init__(self, max_rows: int, num_best: int, gpu: Gpu) -> None:
        self.drafted, self.given = TreeBuffer(gpu), TreeBuffer(gpu)
        self.chosen = new_choices(max_rows, gpu, for_host=True)
        self.ends = new_choices(max_rows, gpu, for_host=True)
        self.best = new_choices(max_rows * num_best, gpu, for_host=True).view(-1, num_best)
        self.scores = new_candidates(max_rows, num_best, gpu)[1]  # of the best, on the device


def target_parts(target: Target, ops: Ops) -> TargetParts:
    made = target.programs()
    return TargetParts(
        ops=narrow(ops, CudaOps),
        body=narrow(made.body, Program),
        head=narrow(made.head, Program),
        commit=narrow(made.commit, Program),
        logits=made.logits,
        features=made.features,
    )


def draft_parts(drafter: Drafter, ops: Ops | None) -> DraftParts:
    made = drafter.programs()
    assert made is not None, "the host runs the rounds of such a draft"
    own, pairs, tables, num_tokens = narrow(ops, CudaOps), made.pairs, None, None
    if pairs is not None:
        before, after = pairs.before, pairs.after
        raw = (before.raw, before.qtype), (after.raw, after.qtype)
        tables = own.weights.pair_tables(*raw, before.row_of, pairs.hidden)
        num_tokens = pairs.num_tokens
    return DraftParts(
        ops=own,
        context=narrow(made.context, Program),
        block=narrow(made.block, Program),
        head=narrow(made.head, Program),
        features=made.features,
        logits=made.logits[:, :num_tokens],
        mask_token=made.mask_token,
        block_len=made.block_len,
        pairs=tables,
        num_pairs=0 if pairs is None else pairs.num_candidates,
    )


def sampling_args(sampling: SamplingParams) -> SamplingArgs:
    return SamplingArgs(
        *(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p),
        *(sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty),
    )


def token_scores(
    found: Sequence[tuple[float, Sequence[tuple[int, float]]]], wanted: int | None
) -> tuple[TokenScores, ...]:
    """Of each token its own score, and the best ones, as many as are wanted."""
    return tuple(
        TokenScores(own, tuple((t, value) for t, value in top if value > -inf)[:wanted])
        for own, top in found
    )


def read_tree(record: RoundRecord) -> DraftTree:
    """With each node's source: the first child that was not looked up is the draft's first."""
    depths: list[int] = []
    sources: list[TokenSource] = []
    tip = record.num_shared  # the last of the draft's first choices after each other
    for node, parent in enumerate(record.parents):
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        is_chain = node > record.num_looked and parent == tip
        tip = node if is_chain else tip
        sources.append(TokenSource.CHAIN if is_chain else TokenSource.SIBLING)
    sources[1 : 1 + record.num_looked] = [TokenSource.NGRAM] * record.num_looked
    sources[0] = TokenSource.BONUS
    return DraftTree(record.tokens, record.parents, tuple(depths), tuple(sources))
