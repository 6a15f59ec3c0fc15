"""A whole round on a GPU as one CUDA graph: draft, tree, verify, accept, commit, in this order.

In: the recorded programs of a target and its draft. Nothing in a round waits for the host; it
learns from a ring of records what each round brought. Graphs are made at first use, by number of
nodes and way of choosing.
"""

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftree.core import DraftTree, Request, TokenSource
from draftree.decode.decoder import Round
from draftree.decode.device_decoder import DeviceRecord
from draftree.drafts.drafter import Drafter
from draftree.kernels.cpu.sampling import SamplingArgs
from draftree.kernels.cuda.accept import RoundRecord, RoundRing, accept
from draftree.kernels.cuda.graph import LaunchGraph, Timestamp
from draftree.kernels.cuda.ops import CudaOps
from draftree.kernels.cuda.pass_args import PATH_LEN
from draftree.kernels.cuda.program import Program, bucket
from draftree.kernels.cuda.request import MAX_STOPS, End, RequestParams, needs_threshold
from draftree.kernels.cuda.rows import gather_rows
from draftree.kernels.cuda.sampling import (
    choose,
    new_candidates,
    new_choices,
    new_sampling_workspace,
    rank,
)
from draftree.kernels.cuda.tree import (
    advance,
    build_tree,
    plan_block,
    plan_context,
    plan_plain,
)
from draftree.kernels.ops import Ops, narrow
from draftree.models.target import Target

if TYPE_CHECKING:
    import torch

_NUM_RECORDS = 64  # more than are ever under way
_MAX_CANDIDATES = 16  # of a position


@dataclass(frozen=True)
class _TargetParts:
    ops: CudaOps
    body: Program
    head: Program
    commit: Program
    logits: "torch.Tensor"  # float32 [max_nodes, vocab_size]
    features: "torch.Tensor | None"  # float32 [max_tokens, width]


@dataclass(frozen=True)
class _DraftParts:
    ops: CudaOps
    context: Program
    block: Program
    head: Program
    features: "torch.Tensor"  # what the context program reads, float32 [max_tokens, width]
    logits: "torch.Tensor"
    mask_token: int
    block_len: int


class GpuRounds:
    """Rounds of one sequence. Those under way follow each other on the stream."""

    def __init__(
        self,
        target: Target,
        ops: Ops,
        drafter: Drafter | None,
        draft_ops: Ops | None,
        budget: int,
    ) -> None:
        self._target, self._budget = _target_parts(target, ops), budget
        self._draft = _draft_parts(drafter, draft_ops) if drafter is not None else None
        self._gpu, (max_rows, vocab_size) = self._target.ops.gpu, self._target.logits.shape
        self._params, self._ring = RequestParams(self._gpu), RoundRing(_NUM_RECORDS, self._gpu)
        self._workspace = new_sampling_workspace(max_rows, vocab_size, self._gpu)
        self._chosen = new_choices(max_rows, self._gpu)
        if self._draft is not None:
            count = min(max(budget, 1), _MAX_CANDIDATES, vocab_size)
            block_len = self._draft.block_len
            self._candidates = new_candidates(block_len - 1, count, self._gpu)
            rows = max(max_rows, block_len)
            self._draft_workspace = new_sampling_workspace(rows, vocab_size, self._gpu)
        self._graphs: dict[tuple[bool, bool], LaunchGraph] = {}
        self._under_way: deque[tuple[int, Timestamp]] = deque()
        self._number, self._has_ended, self._use_threshold = 0, True, False
        self._last = Timestamp(self._gpu)

    @property
    def can_draft(self) -> bool:
        return self._draft is not None

    @staticmethod
    def can_serve(request: Request) -> bool:
        """Whether the device can make all of the request's choices."""
        return not (
            request.sampling.has_penalties
            or request.logit_bias
            or request.logprobs is not None
            or request.grammar is not None
            or len(request.stop_ids) > MAX_STOPS
        )

    def begin(
        self, request: Request, anchor: int, max_tokens: int, committed: int, drafted: int
    ) -> None:
        """Rounds launched from now on are this request's."""
        assert not self._under_way, "rounds of the last request are still under way"
        sampling, vocab_size = request.sampling, self._target.logits.shape[1]
        filters = SamplingArgs(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        self._target.ops.step.set_idle(committed)
        if self._draft is not None:
            self._draft.ops.step.set_idle(drafted)
        self._ring.clear()
        self._use_threshold = needs_threshold(filters, vocab_size)
        for use_draft in (False, True) if self.can_draft else (False,):
            self._prepare(use_draft)
        self._params.start(
            filters,
            sampling.seed,
            anchor=anchor,
            tokens_left=max_tokens,
            max_ctx=self._target.ops.max_ctx,
            budget=self._budget,
            stop_ids=request.stop_ids,
        )
        self._number, self._has_ended = 0, False
        self._last = Timestamp(self._gpu)

    def launch(self, *, use_draft: bool) -> None:
        self._graphs[use_draft, self._use_threshold].run()
        self._number += 1
        self._under_way.append((self._number, Timestamp(self._gpu)))

    def read(self) -> DeviceRecord | None:
        """The oldest round under way; None if the request had ended."""
        number, end = self._under_way.popleft()
        ms = end.wait_since(self._last)
        self._last = end
        if self._has_ended:
            return None
        record = self._ring.read(number)
        assert record is not None, "a round left no record"
        self._has_ended = record.end is not End.RUNNING
        finished = Round(_read_tree(record), record.path, record.bonus)
        return DeviceRecord(finished, self._has_ended, ms)

    def _prepare(self, use_draft: bool) -> None:
        """The graph of a kind of round."""
        key = use_draft, self._use_threshold
        if key not in self._graphs:
            self._params.stop()
            self._graphs[key] = LaunchGraph(lambda: self._round(*key), self._gpu)

    def _round(self, use_draft: bool, use_threshold: bool) -> None:
        target, gpu, params = self._target, self._gpu, self._params
        step = target.ops.step
        if use_draft:
            self._propose()
        else:
            plan_plain(params, step, gpu)
        size = bucket(self._budget + 1 if use_draft else 1)
        target.body.launch(size)
        target.head.launch(size)
        logits, chosen = target.logits[:size], self._chosen[:size]
        choose(logits, step, params, chosen, self._workspace, gpu, use_threshold=use_threshold)
        accept(self._chosen, params, step, self._ring, gpu)
        if use_draft:
            target.commit.launch(size)
        if self._draft is not None:
            self._extend_context(self._draft)
        advance(step, gpu)

    def _propose(self) -> None:
        """The draft's block, its candidates, and the tree of the best of them."""
        draft, gpu, params, step = self._draft, self._gpu, self._params, self._target.ops.step
        assert draft is not None, "a round drafts only where there is a draft"
        draft_step = draft.ops.step
        plan_block(params, draft_step, draft.mask_token, draft.block_len, gpu)
        draft.block.launch(bucket(draft.block_len))
        draft.head.launch(bucket(draft.block_len - 1))
        logits = draft.logits[: draft.block_len - 1]
        rank(logits, step, draft_step, params, *self._candidates, self._draft_workspace, gpu)
        build_tree(*self._candidates, params, step, gpu)

    def _extend_context(self, draft: _DraftParts) -> None:
        """The draft reads the features of the accepted path."""
        gpu, step, draft_step = self._gpu, self._target.ops.step, draft.ops.step
        features = self._target.features
        assert features is not None, "a draft's target captures features"
        size = bucket(draft.block_len)
        plan_context(step, draft_step, gpu)
        live = step.word(PATH_LEN)
        rows = step.path[:size]
        gather_rows(features, rows, draft.features[:size], gpu, live=live)
        draft.context.launch(size)
        advance(draft_step, gpu)


def _target_parts(target: Target, ops: Ops) -> _TargetParts:
    made = target.programs()
    return _TargetParts(
        ops=narrow(ops, CudaOps),
        body=narrow(made.body, Program),
        head=narrow(made.head, Program),
        commit=narrow(made.commit, Program),
        logits=made.logits,
        features=made.features,
    )


def _draft_parts(drafter: Drafter, ops: Ops | None) -> _DraftParts:
    made = drafter.programs()
    return _DraftParts(
        ops=narrow(ops, CudaOps),
        context=narrow(made.context, Program),
        block=narrow(made.block, Program),
        head=narrow(made.head, Program),
        features=made.features,
        logits=made.logits,
        mask_token=made.mask_token,
        block_len=made.block_len,
    )


def _read_tree(record: RoundRecord) -> DraftTree:
    """A tree starts with the chain of first choices, so a node on it is numbered by its depth."""
    depths: list[int] = []
    sources: list[TokenSource] = []
    for node, parent in enumerate(record.parents):
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        is_chain = depths[node] == node
        sources.append(TokenSource.CHAIN if is_chain else TokenSource.SIBLING)
    sources[0] = TokenSource.BONUS
    return DraftTree(record.tokens, record.parents, tuple(depths), tuple(sources))
