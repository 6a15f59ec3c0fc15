"""What rounds on a GPU are made of: the recorded programs of a target and its draft, and trees as
their records tell them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from draftree.core import DraftTree, SamplingParams, TokenScores, TokenSource
from draftree.drafts.drafter import Drafter
from draftree.kernels.cpu.sampling import SamplingArgs
from draftree.kernels.cuda.accept import RoundRecord
from draftree.kernels.cuda.compile import Gpu
from draftree.kernels.cuda.ops import CudaOps
from draftree.kernels.cuda.program import Program
from draftree.kernels.cuda.sampling import new_candidates, new_choices
from draftree.kernels.cuda.tree import TreeBuffer
from draftree.kernels.ops import Ops, narrow
from draftree.models.target import Target

if TYPE_CHECKING:
    import torch


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
    logits: "torch.Tensor"
    mask_token: int
    block_len: int


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
    return DraftParts(
        ops=narrow(ops, CudaOps),
        context=narrow(made.context, Program),
        block=narrow(made.block, Program),
        head=narrow(made.head, Program),
        features=made.features,
        logits=made.logits,
        mask_token=made.mask_token,
        block_len=made.block_len,
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
    """With what each node's depth says of its source."""
    depths: list[int] = []
    sources: list[TokenSource] = []
    for node, parent in enumerate(record.parents):
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        is_chain = depths[node] - record.num_shared == node - record.num_looked
        sources.append(TokenSource.CHAIN if is_chain else TokenSource.SIBLING)
    sources[1 : 1 + record.num_looked] = [TokenSource.NGRAM] * record.num_looked
    sources[0] = TokenSource.BONUS
    return DraftTree(record.tokens, record.parents, tuple(depths), tuple(sources))
