"""One round on the host: draft, tree, verify, accept, commit, in this order.

The text is that of plain decoding with the same sampler, whatever is drafted. With a fixed budget
every round drafts; with an automatic one, rounds that do not pay are plain steps, and drafting is
tried again after a while.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from draftree.core import DraftTree, RoundStats, TokenSource
from draftree.decode.accept import Accepted, accept
from draftree.decode.controller import SpeculationController
from draftree.decode.decoder import Emitted, Round, plain_round
from draftree.decode.plain import choose_plainly, take_plain_step
from draftree.decode.sampler import Sampler
from draftree.decode.tree import RankedTree, build_tree
from draftree.drafts.drafter import Proposal, Proposer
from draftree.drafts.lookup import LookupIndex
from draftree.models.target import ForwardOutput, Target


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    max_budget: int
    is_auto: bool
    use_lookup: bool
    stop_ids: frozenset[int] = frozenset()
    width: int = 0  # candidates of a position in a tree; 0: any number


class SpeculativeDecoder:
    def __init__(
        self,
        target: Target,
        sampler: Sampler,
        drafter: Proposer | None,
        options: SpeculationOptions,
        controller: SpeculationController | None = None,
        watch: Callable[[Round], None] | None = None,
    ) -> None:
        self.stats = RoundStats()
        self._target, self._sampler, self._drafter = target, sampler, drafter
        self._options, self._watch = options, watch
        controller = controller or SpeculationController()
        if sampler.matcher is not None:
            # A grammar's tokens come true more often than others, which is no news of the draft.
            controller = SpeculationController(cost=controller.cost)
        controller.begin_request()
        self._controller = controller
        self._lookup = LookupIndex()
        self._anchor = -1

    @property
    def anchor(self) -> int:
        return self._anchor

    def start(self, anchor: int, written: Sequence[int] = ()) -> None:
        """The text before the anchor is committed, and the drafter has seen its features."""
        self._anchor = anchor
        for token in written:
            self._sampler.accept(token)
        self._extend_text((*self._target.state.tokens, anchor))

    def _extend_text(self, tokens: Sequence[int]) -> None:
        """For all who propose from what the text holds."""
        self._lookup.extend(tokens)
        if self._drafter is not None:
            self._drafter.extend_text(tokens)

    def pause(self) -> None:
        """A step leaves nothing under way."""

    def finish(self) -> None:
        self._controller.end_request()

    def step(self, max_tokens: int) -> list[Emitted]:
        start = time.perf_counter()
        ranked, drafted_ms = self._draft(max_tokens)
        if ranked is None:
            return self._step_plainly(start)
        was_drafted = ranked.tree.num_nodes > 1
        is_weighed = drafted_ms > 0.0 or self._drafter is None
        chosen = ranked
        if self._options.is_auto and was_drafted:
            chosen = self._controller.choose_nodes(ranked, is_weighed=is_weighed)
        tree = chosen.tree
        self.stats.tree_ms += (time.perf_counter() - start) * 1000 - drafted_ms
        position = self._target.state.committed
        verified, verify_ms = self._verify(tree)
        accept_start = time.perf_counter()
        accepted = accept(
            tree, verified.logits, self._sampler, position, max_tokens, self._options.stop_ids
        )
        commit_start = time.perf_counter()
        self._commit(tree, accepted, verified)
        end = time.perf_counter()
        self.stats.accept_ms += (commit_start - accept_start) * 1000
        self.stats.commit_ms += (end - commit_start) * 1000
        emitted = self._emit(tree, accepted)
        tokens = [one.token for one in emitted]
        self.stats.count(tree.num_nodes, max(tree.depths), len(accepted.path) - 1)
        if was_drafted:
            if is_weighed:
                self._controller.observe_draft(len(emitted), (end - start) * 1000, verify_ms)
            self._controller.observe_outcome(ranked, tokens)
        if self._watch:
            self._watch(Round(tree, accepted.path, accepted.bonus, chosen.path_log_probs))
        self._extend_text(tokens)
        self._anchor = accepted.bonus
        return emitted

    def _step_plainly(self, start: float) -> list[Emitted]:
        """A round without a draft; it began at start."""
        emitted, verified, pass_ms = take_plain_step(self._target, self._sampler, self._anchor)
        if self._drafter is not None and verified.features is not None:
            self._drafter.extend_context(verified.features[:1])
        self.stats.verify_ms += pass_ms
        self._end_plainly(emitted.token)
        step_ms = (time.perf_counter() - start) * 1000
        self.stats.accept_ms += step_ms - pass_ms
        self._controller.observe_plain(step_ms, pass_ms, self._target.state.committed)
        return [emitted]

    @property
    def can_follow(self) -> bool:
        return True

    def settle(self) -> list[Emitted]:
        return []

    def follow(self, logits: np.ndarray, position: int) -> Emitted:
        emitted = choose_plainly(self._sampler, logits, position)
        self.stats.num_batched += 1
        self._end_plainly(emitted.token)
        return emitted

    def _end_plainly(self, token: int) -> None:
        """A round wrote one token, and nothing was drafted."""
        self.stats.num_rounds += 1
        if self._watch:
            self._watch(plain_round(self._anchor, token))
        self._extend_text((token,))
        self._anchor = token

    def _draft(self, max_tokens: int) -> tuple[RankedTree | None, float]:
        """Candidates in a tree as large as the options allow, none if there is to be no draft, and
        the milliseconds that the draft took.
        """
        state, options = self._target.state, self._options
        room = min(max_tokens - 1, state.max_ctx - state.committed - 1, options.max_budget)
        matcher = self._sampler.matcher
        forced = tuple(matcher.propose_forced())[: max(room, 0)] if matcher is not None else ()
        is_plain = room < 1
        if options.is_auto and not is_plain:
            is_plain = not self._controller.is_draft_next(state.committed)
        if is_plain and not forced:
            return None, 0.0
        budget = num_candidates = options.max_budget
        if options.is_auto:
            room, budget, num_candidates = self._controller.limit(room, budget)
            budget = min(budget + len(forced), options.max_budget)
        lookup: tuple[int, ...] = ()
        if options.use_lookup and not forced:
            has_draft = self._drafter is not None
            lookup = self._lookup.propose_branch(room, has_draft=has_draft)
        if options.is_auto and not is_plain:
            self._controller.begin_draft()
        block: Proposal | None = None
        drafted_ms = 0.0
        if self._drafter is not None and not is_plain:
            start = time.perf_counter()
            block = self._drafter.propose(self._anchor, self._sampler, num_candidates, room)
            if len(block.tokens) > room:
                block = block.first(room)
            drafted_ms = (time.perf_counter() - start) * 1000
            self.stats.draft_ms += drafted_ms
        count_valid = matcher.count_valid if matcher is not None else None
        tree = build_tree(
            *(self._anchor, block, budget, options.width),
            seed_chain=options.is_auto,
            lookup=lookup,
            forced=forced,
            count_valid=count_valid,
        )
        return tree, drafted_ms

    def _verify(self, tree: DraftTree) -> tuple[ForwardOutput, float]:
        start = time.perf_counter()
        self._target.state.begin(tree, is_committed=tree.num_nodes == 1)
        verified = self._target.forward(rows=range(tree.num_nodes))
        verify_ms = (time.perf_counter() - start) * 1000
        self._controller.observe_verify(tree.num_nodes, verify_ms)
        self.stats.verify_ms += verify_ms
        return verified, verify_ms

    def _emit(self, tree: DraftTree, accepted: Accepted) -> list[Emitted]:
        """What the round wrote: the path after the root, and the bonus."""
        last = TokenSource.BONUS if tree.num_nodes > 1 else TokenSource.PLAIN
        end = tree.find_child(accepted.path[-1], accepted.bonus)  # a guess that ends the reply
        last = last if end is None else tree.sources[end]
        emitted = [Emitted(tree.tokens[n], tree.sources[n]) for n in accepted.path[1:]]
        emitted.append(Emitted(accepted.bonus, last, is_last=self._sampler.is_complete))
        if accepted.scores:
            pairs = zip(emitted, accepted.scores, strict=True)
            emitted = [token._replace(scores=scores) for token, scores in pairs]
        return emitted

    def _commit(self, tree: DraftTree, accepted: Accepted, verified: ForwardOutput) -> None:
        path = accepted.path
        self._target.state.commit(path)
        if self._drafter is not None and verified.features is not None:
            are_first = path[-1] == len(path) - 1  # the first nodes need not be gathered
            rows = slice(len(path)) if are_first else list(path)
            self._drafter.extend_context(verified.features[rows])
