"""A whole round on a GPU as one CUDA graph: draft, tree, verify, accept, commit, in this order.

In: the recorded programs of a target and its draft. Nothing in a round waits for the host; it
learns from a ring of records what each round brought. Where the host builds the tree, the round
comes in three graphs, between which it does so, and masks or checks the choices for a grammar.
Graphs are made at first use, by number of nodes and way of choosing.
"""

from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from draftree.core import DraftTree, Request, TokenScores
from draftree.decode.decoder import DeviceRecord, Round
from draftree.decode.device_parts import (
    MAX_CANDIDATES,
    Choosing,
    DraftParts,
    HostExchange,
    draft_parts,
    read_tree,
    sampling_args,
    target_parts,
    token_scores,
)
from draftree.drafts.drafter import Drafter
from draftree.kernels.cuda.accept import RoundRing, accept
from draftree.kernels.cuda.edges import Edges
from draftree.kernels.cuda.graph import LaunchGraph, Timestamp
from draftree.kernels.cuda.lookup import DeviceText, find_match
from draftree.kernels.cuda.pass_args import PATH_LEN
from draftree.kernels.cuda.process import TreeMasks, process
from draftree.kernels.cuda.program import BUCKETS, bucket
from draftree.kernels.cuda.request import MAX_TOP_K, End, RequestParams, needs_threshold
from draftree.kernels.cuda.rows import gather_rows
from draftree.kernels.cuda.sampling import (
    choose,
    new_choices,
    new_sampling_workspace,
    rank,
)
from draftree.kernels.cuda.scores import ScoreRing, score
from draftree.kernels.cuda.tree import (
    advance,
    build_tree,
    plan_context,
    plan_plain,
    plan_tree,
)
from draftree.kernels.ops import Ops
from draftree.models.target import Target

if TYPE_CHECKING:
    import torch

_NUM_RECORDS, _NUM_SCORED = 64, 4  # more than are ever under way


class GpuRounds:
    """Rounds of one sequence, which follow each other on the stream. A request is decoded in
    segments, mostly a single one: free, with whole rounds in a row, or one in which the host
    builds the trees, and checks or masks the choices.
    """

    def __init__(
        self,
        target: Target,
        ops: Ops,
        drafter: Drafter | None,
        draft_ops: Ops | None,
        budget: int,
        *,
        is_auto: bool = False,
        width: int = 0,
    ) -> None:
        """is_auto: rounds may be of any size up to the budget. width: most candidates of a position
        in a tree, 0 for any number.
        """
        self._width = width
        self._target, self._budget = target_parts(target, ops), budget
        self._draft = draft_parts(drafter, draft_ops) if drafter is not None else None
        self._gpu, (max_rows, vocab_size) = self._target.ops.gpu, self._target.logits.shape
        self._params = RequestParams(self._gpu, vocab_size)
        self._ring = RoundRing(_NUM_RECORDS, self._gpu)
        self._scores = ScoreRing(_NUM_SCORED, self._gpu)
        self._workspace = new_sampling_workspace(max_rows, vocab_size, self._gpu)
        self._chosen = new_choices(max_rows, self._gpu)
        self._edges: Edges | None = None
        if self._draft is not None:
            self._candidates, self._edges = self._draft.new_candidates(budget)
            self._text = DeviceText(self._target.ops.max_ctx, self._gpu)
            rows, num_tokens = max(max_rows, self._draft.block_len), self._draft.logits.shape[1]
            self._draft_workspace = new_sampling_workspace(rows, num_tokens, self._gpu)
        self._host = HostExchange(max_rows, min(MAX_CANDIDATES, vocab_size), self._gpu)
        self._masks = TreeMasks(max_rows, vocab_size, self._gpu)
        self._tree_sizes = sorted({bucket(1), bucket(budget + 1)})  # of passes the host sets up
        largest = bucket(budget + 1)
        self.sizes = tuple(n for n in BUCKETS if 1 < n < largest and is_auto) + (largest,)
        self._graphs: dict[Hashable, LaunchGraph] = {}
        self._under_way: deque[Timestamp] = deque()
        self._request, self._way, self._tree = (Request((), 0), Choosing(), DraftTree((), (), ()))
        self._number, self._has_ended = 0, True
        self._has_trees = self._has_filters = False
        self._last = self._proposed = self._verified = Timestamp(self._gpu)

    @property
    def can_draft(self) -> bool:
        return self._draft is not None

    @staticmethod
    def can_serve(request: Request) -> bool:
        """Whether the device can make all of the request's choices."""
        return request.logprobs is None or request.logprobs <= MAX_TOP_K

    def begin(
        self,
        request: Request,
        anchor: int,
        drafted: int,
        text: Sequence[int] = (),
        written: Sequence[int] = (),
    ) -> None:
        """What is launched from now on is this request's, as soon as a segment of it begins.
        drafted: how many positions the draft has read. text: the tokens up to the anchor, if trees
        of free segments are to have what is looked up in them. written: of the reply so far.
        """
        assert not self._under_way, "rounds of the last request are still under way"
        filters, vocab_size = sampling_args(request.sampling), self._target.logits.shape[1]
        if self._draft is not None:
            self._draft.ops.step.set_idle(drafted)
        self._ring.clear()
        self._request, self._number = request, 0
        self._has_filters = filters.temperature > 0 and filters[1:4] != (0, 1.0, 0.0)
        self._way = Choosing(
            needs_threshold(filters, vocab_size),
            bool(request.logit_bias) or filters.has_penalties,
            request.logprobs is not None,
            self._draft is not None and len(text) > 0,
        )
        if self._way.use_lookup:  # an array: numbers of a long text take milliseconds one by one
            self._text.start(cast("Sequence[int]", np.asarray(text, np.int32)))
        self._params.start(
            filters,
            request.sampling.seed,
            anchor=anchor,
            tokens_left=0,
            max_ctx=self._target.ops.max_ctx,
            budget=self._budget,
            logit_bias=request.logit_bias,
            prompt_ids=request.prompt_ids,
            written=written,
            num_scores=self._num_scores,
        )

    def begin_segment(
        self,
        max_tokens: int,
        committed: int,
        *,
        end_ids: Collection[int] = (),
        has_trees: bool = False,
    ) -> None:
        """Go on for at most so many tokens, to a stop token or one of end_ids. Nothing is under
        way. committed: how many positions the target has read.
        """
        assert not self._under_way, "rounds of the last segment are still under way"
        self._has_trees = has_trees
        self._params.stop()
        self._target.ops.step.set_idle(committed)
        way = self._way
        if has_trees:
            if self.can_draft:
                self._prepare(("propose", way.is_processed), self._propose_to_host)
            for size in self._tree_sizes:
                for name, launch in self._tree_parts(size).items():
                    self._prepare((name, size, way, self.needs_masks), launch)
        else:
            for size in (1, *(self.sizes if self.can_draft and self._budget else ())):
                self._prepare((size, way), partial(self._round, size))
        self._params.resume(max_tokens, {*self._request.stop_ids, *end_ids})
        self._has_ended, self._last = False, Timestamp(self._gpu)

    def launch(self, size: int, max_looked: int | None = None) -> None:
        """Queue a round of a free segment: of one of the sizes, or 1, which drafts nothing."""
        if max_looked is not None:
            self._params.set_looked_limit(max_looked)
        self._graphs[size, self._way].run()
        self._under_way.append(Timestamp(self._gpu))

    def propose(self) -> None:
        """Queue the draft of a round whose tree the host builds."""
        self._graphs["propose", self._way.is_processed].run()
        self._proposed = Timestamp(self._gpu)

    def read_proposal(self) -> tuple[list[int], list[int]]:
        """Wait for that draft: tokens and parents of a tree that is larger than the budget."""
        self._proposed.wait_since(self._last)
        return self._host.drafted.read()

    def verify(self, tree: DraftTree) -> None:
        """Queue the target's pass over it."""
        self._tree = tree
        self._host.given.write(tree.tokens, tree.parents)
        self._host.ends.zero_()
        self._run_part("verify")
        self._verified = Timestamp(self._gpu)

    @property
    def needs_masks(self) -> bool:
        """Whether the host must say what may follow each node; else it checks the choices."""
        has_grammar = self._request.grammar is not None
        return has_grammar and (self._way.has_scores or self._has_filters)

    @property
    def masks(self) -> np.ndarray:
        """Rows to fill, one for each node: a bit for each token that may follow it, and a last word
        that is 1 if the reply is complete with the node. uint32 [nodes, words + 1].
        """
        return self._masks.rows

    def read_choices(self) -> tuple[np.ndarray, np.ndarray]:
        """Wait for the pass: the token after each node, as if there were no grammar, and for each
        node whether the path must not go on to it. The host changes both.
        """
        self._verified.wait_since(self._last)
        return self._host.chosen.numpy(), self._host.ends.numpy()

    def read_best(self, node: int) -> list[int]:
        """The largest of the node's row, the very largest first, as if there were no grammar."""
        self._run_part("rank")
        Timestamp(self._gpu).wait_since(self._last)
        return self._host.best[node].tolist()

    def choose_again(self, node: int) -> int:
        """What the node's row of the masks allows; the choices of the other nodes are lost."""
        self._masks.upload(node + 1, node)
        self._run_part("choose")
        Timestamp(self._gpu).wait_since(self._last)
        return int(self._host.chosen[node])

    def accept(self) -> None:
        """Queue the rest of the round, by the masks or choices as they are now."""
        if self.needs_masks:
            self._masks.upload(self._tree.num_nodes)
        self._run_part("accept")
        self._under_way.append(Timestamp(self._gpu))

    def read(self) -> DeviceRecord | None:
        """Wait for the oldest round under way; None if it was launched after the end."""
        end = self._under_way.popleft()
        ms = end.wait_since(self._last)
        self._last = end
        if self._has_ended:
            return None
        self._number += 1
        record = self._ring.read(self._number)
        assert record is not None, "a round left no record"
        self._has_ended = record.end is not End.RUNNING
        tree = self._tree if self._has_trees else read_tree(record)
        scores = self._read_scores(len(record.path)) if self._way.has_scores else ()
        return DeviceRecord(Round(tree, record.path, record.bonus), self._has_ended, ms, scores)

    @property
    def _num_scores(self) -> int:
        return min(max(self._request.logprobs or 0, 1), self._target.logits.shape[1])

    def _run_part(self, name: str) -> None:
        size = next(size for size in self._tree_sizes if size >= self._tree.num_nodes)
        self._graphs[name, size, self._way, self.needs_masks].run()

    def _read_scores(self, path_len: int) -> tuple[TokenScores, ...]:
        found = self._scores.read(self._number, path_len, self._num_scores)
        return token_scores(found, self._request.logprobs)

    def _prepare(self, key: Hashable, launch: Callable[[], None]) -> None:
        """The graph of a kind of round, or part of one; nothing is live now."""
        if self._gpu.rehearsal.is_on:
            launch()
        elif key not in self._graphs:
            is_persistent = self._target.ops.is_persistent
            self._graphs[key] = LaunchGraph(launch, self._gpu, is_persistent=is_persistent)

    def _round(self, size: int) -> None:
        gpu, params, step = self._gpu, self._params, self._target.ops.step
        if size > 1:
            text = self._text if self._way.use_lookup else None
            self._propose()
            if text is not None:
                find_match(text, step, params, gpu)
            args = *self._candidates, params, step, gpu, text
            build_tree(*args, max_nodes=size, edges=self._edges, width=self._width)
        else:
            plan_plain(params, step, gpu)
        self._verify(size)
        self._choose(size, self._chosen, use_bias=self._way.is_processed)
        self._keep(size, self._chosen, is_tree=size > 1)

    def _propose_to_host(self) -> None:
        self._propose()
        args = *self._candidates, self._params, self._target.ops.step, self._gpu
        build_tree(*args, drafted=self._host.drafted, edges=self._edges, width=self._width)

    def _tree_parts(self, size: int) -> dict[str, Callable[[], None]]:
        """The parts of a round over the host's tree. With masks, the choice waits for them; else it
        follows the pass, and is made again if the host asks for it.
        """
        masks, use_bias = self._masks, self._way.is_processed
        step, logits = self._target.ops.step, self._target.logits[:size]
        chosen, host, gpu, params = self._chosen, self._host, self._gpu, self._params

        def verify() -> None:
            plan_tree(host.given, params, step, gpu)
            self._verify(size)

        def verify_and_choose() -> None:
            verify()
            self._choose(size, host.chosen, use_bias=use_bias)

        def choose_and_keep() -> None:
            self._choose(size, chosen, use_bias=use_bias, masks=masks)
            self._keep(size, chosen, is_tree=True, ends=masks.device)

        if self.needs_masks:
            return {"verify": verify, "accept": choose_and_keep}
        args = *(logits, step, step, params, host.best[:size], host.scores[:size]), self._workspace
        return {
            "verify": verify_and_choose,
            "rank": partial(rank, *args, gpu, by_node=True),
            "choose": partial(self._choose, size, host.chosen, use_bias=False, masks=masks),
            "accept": partial(self._keep, size, host.chosen, is_tree=True, ends=host.ends[:, None]),
        }

    def _propose(self) -> None:
        """The draft's block, and its candidates."""
        draft, step = self._draft, self._target.ops.step
        assert draft is not None, "a round drafts only where there is a draft"
        found = self._candidates, self._edges
        workspace, is_processed = self._draft_workspace, self._way.is_processed
        draft.propose(found, step, self._params, workspace, is_processed=is_processed)

    def _verify(self, size: int) -> None:
        self._target.body.launch(size)
        self._target.head.launch(size)

    def _choose(
        self, size: int, chosen: "torch.Tensor", *, use_bias: bool, masks: TreeMasks | None = None
    ) -> None:
        """The token after each node. use_bias: with penalties, too."""
        gpu, params, step = self._gpu, self._params, self._target.ops.step
        logits, way = self._target.logits[:size], self._way
        if use_bias or masks is not None:
            process(logits, step, params, gpu, use_bias=use_bias, use_counts=use_bias, masks=masks)
        choose(
            *(logits, step, params, chosen[:size], self._workspace, gpu),
            use_threshold=way.use_threshold,
        )

    def _keep(
        self,
        size: int,
        chosen: "torch.Tensor",
        *,
        is_tree: bool,
        ends: "torch.Tensor | None" = None,
    ) -> None:
        """What was chosen becomes text: accept, commit."""
        target, gpu, params, way = self._target, self._gpu, self._params, self._way
        step = target.ops.step
        text = self._text if way.use_lookup else None
        accept(
            *(chosen, params, step, self._ring, gpu),
            use_counts=way.is_processed,
            ends=ends,
            text=text,
        )
        if way.has_scores:
            score(target.logits[:size], step, params, self._scores, self._workspace, gpu)
        if is_tree:
            target.commit.launch(size)
        if self._draft is not None:
            self._extend_context(self._draft)
        advance(step, gpu)

    def _extend_context(self, draft: DraftParts) -> None:
        """The draft reads the features of the accepted path."""
        gpu, step, draft_step = self._gpu, self._target.ops.step, draft.ops.step
        features = self._target.features
        assert features is not None, "a draft's target captures features"
        size = bucket(draft.block_len)
        plan_context(step, draft_step, gpu)
        rows, live = step.path[:size], step.word(PATH_LEN)
        gather_rows(features, rows, draft.features[:size], gpu, live=live)
        draft.context.launch(size)
        advance(draft_step, gpu)
