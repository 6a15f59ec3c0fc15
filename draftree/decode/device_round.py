"""A whole round on a GPU as one CUDA graph: draft, tree, verify, accept, commit, in this order.

In: the recorded programs of a target and its draft. Nothing in a round waits for the host; it
learns from a ring of records what each round brought. Where a grammar has to be asked, the round
comes in three graphs, between which the host builds the tree and says what may follow its nodes.
Graphs are made at first use, by number of nodes and way of choosing.
"""

from collections import deque
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from draftree.core import DraftTree, Request, TokenScores, TokenSource
from draftree.decode.decoder import Round
from draftree.decode.device_decoder import DeviceRecord
from draftree.drafts.drafter import Drafter, Proposal
from draftree.kernels.cpu.sampling import SamplingArgs
from draftree.kernels.cuda.accept import RoundRecord, RoundRing, accept
from draftree.kernels.cuda.graph import LaunchGraph, Timestamp
from draftree.kernels.cuda.ops import CudaOps
from draftree.kernels.cuda.pass_args import PATH_LEN
from draftree.kernels.cuda.process import TreeMasks, process
from draftree.kernels.cuda.program import Program, bucket
from draftree.kernels.cuda.request import MAX_TOP_K, End, RequestParams, needs_threshold
from draftree.kernels.cuda.rows import gather_rows
from draftree.kernels.cuda.sampling import (
    choose,
    new_candidates,
    new_choices,
    new_sampling_workspace,
    rank,
)
from draftree.kernels.cuda.scores import ScoreRing, score
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
    import numpy as np
    import torch

_NUM_RECORDS, _NUM_SCORED = 64, 4  # more than are ever under way
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


class _Way(NamedTuple):
    """How a request chooses, as far as it takes other kernels."""

    use_threshold: bool = False
    is_processed: bool = False  # there is a bias or a penalty
    has_scores: bool = False


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
        self._params = RequestParams(self._gpu, vocab_size)
        self._ring, self._scores = (
            RoundRing(_NUM_RECORDS, self._gpu),
            ScoreRing(_NUM_SCORED, self._gpu),
        )
        self._workspace = new_sampling_workspace(max_rows, vocab_size, self._gpu)
        self._chosen = new_choices(max_rows, self._gpu)
        if self._draft is not None:
            count = min(max(budget, 1), _MAX_CANDIDATES, vocab_size)
            block_len = self._draft.block_len
            self._candidates = new_candidates(block_len - 1, count, self._gpu)
            self._read_candidates = new_candidates(block_len - 1, count, self._gpu, for_host=True)
            rows = max(max_rows, block_len)
            self._draft_workspace = new_sampling_workspace(rows, vocab_size, self._gpu)
        self._masks: TreeMasks | None = None
        self._tree_sizes = sorted({bucket(1), bucket(budget + 1)})  # of passes the host sets up
        self._graphs: dict[Hashable, LaunchGraph] = {}
        self._under_way: deque[Timestamp] = deque()
        self._request, self._way, self._tree = Request((), 0), _Way(), DraftTree((), (), ())
        self._number, self._has_ended, self._is_constrained = 0, True, False
        self._last = self._proposed = Timestamp(self._gpu)

    @property
    def can_draft(self) -> bool:
        return self._draft is not None

    @staticmethod
    def can_serve(request: Request) -> bool:
        """Whether the device can make all of the request's choices."""
        return request.logprobs is None or request.logprobs <= MAX_TOP_K

    def begin(self, request: Request, anchor: int, drafted: int) -> None:
        """What is launched from now on is this request's, as soon as a stretch of it begins."""
        assert not self._under_way, "rounds of the last request are still under way"
        sampling, vocab_size = request.sampling, self._target.logits.shape[1]
        filters = SamplingArgs(
            *(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p),
            *(sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty),
        )
        if self._draft is not None:
            self._draft.ops.step.set_idle(drafted)
        self._ring.clear()
        self._request, self._number = request, 0
        self._way = _Way(
            needs_threshold(filters, vocab_size),
            bool(request.logit_bias) or filters.has_penalties,
            request.logprobs is not None,
        )
        self._params.start(
            filters,
            sampling.seed,
            anchor=anchor,
            tokens_left=0,
            max_ctx=self._target.ops.max_ctx,
            budget=self._budget,
            logit_bias=request.logit_bias,
            prompt_ids=request.prompt_ids,
            num_scores=self._num_scores,
        )

    def begin_stretch(
        self,
        max_tokens: int,
        committed: int,
        *,
        end_ids: Collection[int] = (),
        is_constrained: bool = False,
    ) -> None:
        """Go on, no further than to a stop token or one of end_ids. Nothing is under way."""
        assert not self._under_way, "rounds of the last stretch are still under way"
        self._is_constrained = is_constrained
        self._params.stop()
        self._target.ops.step.set_idle(committed)
        ways = (False, True) if self.can_draft else (False,)
        way, sizes = self._way, self._tree_sizes
        if is_constrained:
            if self._masks is None:
                rows, vocab_size = self._target.logits.shape
                self._masks = TreeMasks(rows, vocab_size, self._gpu)
            if self._draft is not None:
                self._prepare(("propose", way.is_processed), self._propose_to_host)
            for size in sizes:
                self._prepare(("verify", size), partial(self._verify, size))
                self._prepare(("accept", size, way), partial(self._accept, size))
        else:
            for use_draft in ways:
                self._prepare((use_draft, way), partial(self._round, use_draft))
        self._params.resume(max_tokens, {*self._request.stop_ids, *end_ids})
        self._has_ended, self._last = False, Timestamp(self._gpu)

    def launch(self, *, use_draft: bool) -> None:
        self._graphs[use_draft, self._way].run()
        self._under_way.append(Timestamp(self._gpu))

    def propose(self) -> None:
        self._graphs["propose", self._way.is_processed].run()
        self._proposed = Timestamp(self._gpu)

    def read_proposal(self) -> Proposal:
        self._proposed.wait_since(self._last)
        ids, log_probs = self._read_candidates
        return Proposal(ids.numpy(), log_probs.numpy())

    def verify(self, tree: DraftTree, committed: int) -> "np.ndarray":
        step, self._tree = self._target.ops.step, tree
        step.set_tree(tree.tokens, tree.parents, tree.depths, committed)
        step.set_rows(range(tree.num_nodes))
        self._graphs["verify", self._tree_size].run()
        assert self._masks is not None, "the stretch is constrained"
        return self._masks.rows

    def accept(self) -> None:
        assert self._masks is not None, "the stretch is constrained"
        self._masks.upload(self._tree.num_nodes)
        self._graphs["accept", self._tree_size, self._way].run()
        self._under_way.append(Timestamp(self._gpu))

    def read(self) -> DeviceRecord | None:
        """The oldest round under way; None if the request had ended."""
        end = self._under_way.popleft()
        ms = end.wait_since(self._last)
        self._last = end
        if self._has_ended:
            return None
        self._number += 1
        record = self._ring.read(self._number)
        assert record is not None, "a round left no record"
        self._has_ended = record.end is not End.RUNNING
        tree = self._tree if self._is_constrained else _read_tree(record)
        finished = Round(tree, record.path, record.bonus)
        scores = self._read_scores(len(record.path)) if self._way.has_scores else ()
        return DeviceRecord(finished, self._has_ended, ms, scores)

    @property
    def _num_scores(self) -> int:
        return min(max(self._request.logprobs or 0, 1), self._target.logits.shape[1])

    @property
    def _tree_size(self) -> int:
        """Rows of the passes over the host's tree."""
        return next(size for size in self._tree_sizes if size >= self._tree.num_nodes)

    def _read_scores(self, path_len: int) -> tuple[TokenScores, ...]:
        found = self._scores.read(self._number, path_len, self._num_scores)
        wanted = self._request.logprobs
        return tuple(
            TokenScores(own, tuple((t, value) for t, value in top if value > -inf)[:wanted])
            for own, top in found
        )

    def _prepare(self, key: Hashable, launch: Callable[[], None]) -> None:
        """The graph of a kind of round, or part of one; nothing is live now."""
        if key not in self._graphs:
            self._graphs[key] = LaunchGraph(launch, self._gpu)

    def _round(self, use_draft: bool) -> None:
        gpu, params, step = self._gpu, self._params, self._target.ops.step
        if use_draft:
            self._propose(self._candidates)
            build_tree(*self._candidates, params, step, gpu)
        else:
            plan_plain(params, step, gpu)
        size = bucket(self._budget + 1 if use_draft else 1)
        self._verify(size)
        self._finish(size, None, is_tree=use_draft)

    def _propose_to_host(self) -> None:
        self._propose(self._read_candidates)

    def _accept(self, size: int) -> None:
        self._finish(size, self._masks, is_tree=True)

    def _propose(self, candidates: "tuple[torch.Tensor, torch.Tensor]") -> None:
        """The draft's block, and its candidates."""
        draft, gpu, params, step = self._draft, self._gpu, self._params, self._target.ops.step
        assert draft is not None, "a round drafts only where there is a draft"
        draft_step = draft.ops.step
        plan_block(params, draft_step, draft.mask_token, draft.block_len, gpu)
        draft.block.launch(bucket(draft.block_len))
        draft.head.launch(bucket(draft.block_len - 1))
        logits = draft.logits[: draft.block_len - 1]
        if self._way.is_processed:
            process(logits, draft_step, params, gpu)
        rank(logits, step, draft_step, params, *candidates, self._draft_workspace, gpu)

    def _verify(self, size: int) -> None:
        self._target.body.launch(size)
        self._target.head.launch(size)

    def _finish(self, size: int, masks: TreeMasks | None, *, is_tree: bool) -> None:
        """What was verified becomes text: choose, accept, commit."""
        target, gpu, params, way = self._target, self._gpu, self._params, self._way
        step, workspace, logits = target.ops.step, self._workspace, target.logits[:size]
        is_processed, use_threshold = way.is_processed, way.use_threshold
        if is_processed or masks is not None:
            use = {"use_bias": is_processed, "use_counts": is_processed}
            process(logits, step, params, gpu, **use, masks=masks)
        choose(
            *(logits, step, params, self._chosen[:size], workspace, gpu),
            use_threshold=use_threshold,
        )
        bits = None if masks is None else masks.device
        accept(*(self._chosen, params, step, self._ring, gpu), use_counts=is_processed, masks=bits)
        if way.has_scores:
            score(logits, step, params, self._scores, workspace, gpu)
        if is_tree:
            target.commit.launch(size)
        if self._draft is not None:
            self._extend_context(self._draft)
        advance(step, gpu)

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
