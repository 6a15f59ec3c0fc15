"""A whole round on the GPU as one CUDA graph: draft, tree, verify, accept, commit.

In: the recorded programs of a target and a draft. Nothing in a round waits for the host; it
learns from a ring of records what each round brought. Graphs are made at first use, by number of
nodes and way of choosing.
"""

from collections import deque
from dataclasses import dataclass

import torch

from draftree.kernels.cpu.sampling import Filters
from draftree.kernels.cuda.accept import RoundRecord, RoundRing, accept
from draftree.kernels.cuda.ops import CudaOps
from draftree.kernels.cuda.pass_args import PATH_LEN
from draftree.kernels.cuda.program import Program, bucket
from draftree.kernels.cuda.request import End, RequestWords, needs_border
from draftree.kernels.cuda.rows import gather_rows
from draftree.kernels.cuda.sampling import choose, new_sampling_workspace, rank
from draftree.kernels.cuda.tree import (
    advance,
    build_tree,
    plan_block,
    plan_context,
    plan_plain,
)

_NUM_RECORDS = 64  # more than are ever under way
_MAX_CANDIDATES = 16  # of a position


@dataclass(frozen=True)
class TargetParts:
    ops: CudaOps
    body: Program
    head: Program
    commit: Program
    logits: torch.Tensor  # float32 [max_nodes, vocab_size]
    features: torch.Tensor | None  # float32 [max_tokens, width]


@dataclass(frozen=True)
class DraftParts:
    ops: CudaOps
    context: Program
    block: Program
    head: Program
    features: torch.Tensor  # what the context program reads, float32 [max_tokens, width]
    logits: torch.Tensor
    mask_token: int
    block_len: int


@dataclass(frozen=True)
class RoundStart:
    """Where a request stands when its rounds begin."""

    filters: Filters
    seed: int
    anchor: int
    max_tokens: int
    stop_ids: frozenset[int]
    committed: int  # positions that the target has read
    drafted: int  # positions that the draft has read


class CudaRounds:
    """Rounds of one sequence. Those under way follow each other on the stream."""

    def __init__(self, target: TargetParts, draft: DraftParts | None, budget: int) -> None:
        self._target, self._draft, self._budget = target, draft, budget
        self._gpu, vocab_size = target.ops.gpu, target.logits.shape[1]
        place, max_rows = self._gpu.place, target.logits.shape[0]
        self._words, self._ring = RequestWords(self._gpu), RoundRing(_NUM_RECORDS, self._gpu)
        self._workspace = new_sampling_workspace(max_rows, vocab_size, self._gpu)
        self._chosen = torch.zeros(max_rows, dtype=torch.int32, device=place)
        if draft is not None:
            count = min(max(budget, 1), _MAX_CANDIDATES, vocab_size)
            shape = (draft.block_len - 1, count)
            self._ids = torch.zeros(shape, dtype=torch.int32, device=place)
            self._log_probs = torch.zeros(shape, device=place)
            rows = max(max_rows, draft.block_len)
            self._draft_workspace = new_sampling_workspace(rows, vocab_size, self._gpu)
        self._graphs: dict[tuple[bool, bool], torch.cuda.CUDAGraph] = {}
        self._under_way: deque[tuple[int, torch.cuda.Event | None]] = deque()
        self._number, self._has_ended, self._use_border = 0, True, False
        self._last: torch.cuda.Event | None = None

    @property
    def can_draft(self) -> bool:
        return self._draft is not None

    def begin(self, start: RoundStart) -> None:
        """Rounds launched from now on are this request's."""
        assert not self._under_way, "rounds of the last request are still under way"
        self._target.ops.step.set_idle(start.committed)
        if self._draft is not None:
            self._draft.ops.step.set_idle(start.drafted)
        self._ring.clear()
        self._use_border = needs_border(start.filters, self._target.logits.shape[1])
        for use_draft in (False, True) if self.can_draft else (False,):
            self._prepare(use_draft)
        self._words.start(
            start.filters,
            start.seed,
            anchor=start.anchor,
            tokens_left=start.max_tokens,
            max_ctx=self._target.ops.max_ctx,
            budget=self._budget,
            stop_ids=start.stop_ids,
        )
        self._number, self._has_ended = 0, False
        self._last = self._mark()

    def launch(self, *, use_draft: bool) -> None:
        if self._gpu.is_real:
            self._graphs[use_draft, self._use_border].replay()
        else:
            self._round(use_draft)
        self._number += 1
        self._under_way.append((self._number, self._mark()))

    def read(self) -> tuple[RoundRecord | None, float]:
        """The oldest round under way, and its milliseconds; None if the request had ended."""
        number, event = self._under_way.popleft()
        ms = 0.0
        if event is not None and self._last is not None:
            event.synchronize()
            ms = self._last.elapsed_time(event)
        self._last = event
        if self._has_ended:
            return None, ms
        record = self._ring.read(number)
        assert record is not None, "a round left no record"
        self._has_ended = record.end is not End.RUNNING
        return record, ms

    def _prepare(self, use_draft: bool) -> None:
        """The graph of a kind of round. A run over nothing first loads its kernels."""
        key = use_draft, self._use_border
        if not self._gpu.is_real or key in self._graphs:
            return
        self._words.stop()
        self._round(use_draft)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._round(use_draft)
        self._graphs[key] = graph

    def _round(self, use_draft: bool) -> None:
        target, gpu, words = self._target, self._gpu, self._words
        step, size = target.ops.step, 1
        if use_draft:
            self._propose()
            size = self._budget + 1
        else:
            plan_plain(words, step, gpu)
        size = bucket(size)
        target.body.launch(size)
        target.head.launch(size)
        logits, chosen = target.logits[:size], self._chosen[:size]
        choose(logits, step, words, chosen, self._workspace, gpu, use_border=self._use_border)
        accept(self._chosen, words, step, self._ring, gpu)
        if use_draft:
            target.commit.launch(size)
        if self._draft is not None:
            self._observe(self._draft)
        advance(step, gpu)

    def _propose(self) -> None:
        """The draft's block, its candidates, and the tree of the best of them."""
        draft, gpu, words = self._draft, self._gpu, self._words
        assert draft is not None, "a round drafts only where there is a draft"
        plan_block(words, draft.ops.step, draft.mask_token, draft.block_len, gpu)
        draft.block.launch(bucket(draft.block_len))
        draft.head.launch(bucket(draft.block_len - 1))
        logits, step = draft.logits[: draft.block_len - 1], self._target.ops.step
        candidates = self._ids, self._log_probs
        rank(logits, step, draft.ops.step, words, *candidates, self._draft_workspace, gpu)
        build_tree(*candidates, words, step, gpu)

    def _observe(self, draft: DraftParts) -> None:
        """The draft reads the features of the accepted path."""
        gpu, step, features = self._gpu, self._target.ops.step, self._target.features
        assert features is not None, "a draft's target captures features"
        size = bucket(draft.block_len)
        plan_context(step, draft.ops.step, gpu)
        live = step.word(PATH_LEN)
        gather_rows(features, step.path[:size], draft.features[:size], gpu, live=live)
        draft.context.launch(size)
        advance(draft.ops.step, gpu)

    def _mark(self) -> torch.cuda.Event | None:
        if not self._gpu.is_real:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
