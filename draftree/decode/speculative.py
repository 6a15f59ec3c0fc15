"""One round: draft, tree, verify, accept, commit. The only file that knows the order.

The text is that of plain decoding with the same sampler, whatever is drafted. With a fixed budget
every round drafts; with an automatic one, rounds that do not pay are plain steps, and drafting is
tried again after a while.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from draftree.core import DraftTree, RoundStats, TokenSource
from draftree.decode.accept import Accepted, accept
from draftree.decode.budget import Calibration, CostModel, best_budget, follow, path_probabilities
from draftree.decode.decoder import Emitted
from draftree.decode.draft import Drafter
from draftree.decode.ngram import NgramIndex
from draftree.decode.plain import take_plain_step
from draftree.decode.sampler import Sampler
from draftree.decode.tree import DraftBlock, RankedTree, build_tree
from draftree.decode.turns import Turns
from draftree.models.target import Target, Verified

_LOOKUP_LEN = 10
_NUM_CANDIDATES = 8  # a position, under an automatic budget
_RANKED, _FEWEST_CHOSEN = 1.5, 3.0  # nodes that are ranked then, for each that was chosen lately
_LONG_MATCH = 4  # a match this long joins a draft's tree


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    max_budget: int
    is_auto: bool
    use_ngram: bool
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Round:
    """One finished round, for whoever wants to watch."""

    tree: DraftTree
    path: tuple[int, ...]
    bonus: int
    path_log_probs: tuple[float, ...] = ()  # the draft's, of every node but the root, if known


class SpeculativeDecoder:
    def __init__(
        self,
        target: Target,
        sampler: Sampler,
        drafter: Drafter | None,
        options: SpeculationOptions,
        cost: CostModel | None = None,
        watch: Callable[[Round], None] | None = None,
        calibration: Calibration | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.stats = RoundStats()
        self._target, self._sampler, self._drafter = target, sampler, drafter
        self._options, self._watch = options, watch
        self._cost = cost or CostModel()
        # A grammar's tokens come true more often than others, which is no news of the draft.
        is_free = sampler.matcher is None
        self._calibration = (calibration if is_free else None) or Calibration()
        self._turns = (turns if is_free else None) or Turns()
        self._ngram = NgramIndex()
        self._anchor = -1
        self._expected = 0.0  # tokens a millisecond, of the round under way
        self._reach = 3.0  # running mean of how deep the text followed what was proposed
        self._num_chosen = 4.0  # nodes of the largest trees of late

    def start(self, anchor: int) -> None:
        """The prompt before the anchor is committed, and the drafter has seen its features."""
        self._anchor = anchor
        self._ngram.extend((*self._target.state.tokens, anchor))

    def finish(self) -> None:
        self._turns.end_request()

    def step(self, max_tokens: int) -> list[Emitted]:
        start = time.perf_counter()
        ranked, drafted_ms = self._draft(max_tokens)
        if ranked is None:
            return self._step_plainly(start)
        chosen = self._choose_nodes(ranked, is_weighed=drafted_ms > 0.0 or self._drafter is None)
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
        was_drafted = ranked.tree.num_nodes > 1
        emitted = self._emit(tree, accepted)
        tokens = [one.token for one in emitted]
        self.stats.count(tree.num_nodes, max(tree.depths), len(accepted.path) - 1)
        if was_drafted:
            if drafted_ms > 0.0 or self._drafter is None:
                self._cost.observe_draft((end - start) * 1000 - verify_ms)
                if self._options.is_auto:
                    round_ms = (end - start) * 1000
                    self._calibration.observe_rate(self._expected, len(emitted), round_ms)
                self._turns.observe_draft()
            self._learn(ranked, tokens)
        if self._watch:
            self._watch(Round(tree, accepted.path, accepted.bonus, chosen.path_log_probs))
        self._ngram.extend(tokens)
        self._anchor = accepted.bonus
        return emitted

    def _step_plainly(self, start: float) -> list[Emitted]:
        """A round without a draft; it began at start."""
        emitted, verified, pass_ms = take_plain_step(self._target, self._sampler, self._anchor)
        if self._drafter is not None and verified.features is not None:
            self._drafter.observe(verified.features[:1])
        self.stats.verify_ms += pass_ms
        self.stats.num_rounds += 1
        if self._watch:
            root = build_tree(self._anchor, None, 0).tree
            self._watch(Round(root, (0,), emitted.token))
        self._ngram.extend((emitted.token,))
        self._anchor = emitted.token
        step_ms = (time.perf_counter() - start) * 1000
        self.stats.accept_ms += step_ms - pass_ms
        if self._turns.observe_plain() or not self._cost.draft_ms:
            self._cost.observe_plain(step_ms)
            if not self._cost.draft_ms:
                self._cost.observe_verify(1, pass_ms)
        return [emitted]

    def _draft(self, max_tokens: int) -> tuple[RankedTree | None, float]:
        """Candidates in a tree as large as the options allow, none if there is to be no draft, and
        the milliseconds that the draft took.
        """
        state, options = self._target.state, self._options
        room = min(max_tokens - 1, state.max_ctx - state.committed - 1, options.max_budget)
        matcher = self._sampler.matcher
        forced = tuple(matcher.propose_forced())[: max(room, 0)] if matcher is not None else ()
        is_plain = room < 1
        if options.is_auto and not is_plain:  # until plain steps are known, there is no choice
            is_plain = not (self._cost.is_measured and self._turns.is_draft_next())
        if is_plain and not forced:
            return None, 0.0
        budget = num_candidates = options.max_budget
        if options.is_auto:
            room = min(room, int(self._reach) + 2)
            budget = min(budget, int(_RANKED * self._num_chosen) + 2)
            num_candidates = min(budget, _NUM_CANDIDATES)
        lookup: tuple[int, ...] = ()
        if options.use_ngram and not forced:
            lookup, match_len = self._ngram.propose(min(_LOOKUP_LEN, room))
            if self._drafter is not None and match_len < _LONG_MATCH:
                lookup = ()
        if options.is_auto and not is_plain and self._turns.begins_trial():
            self._calibration.forgive()
        block: DraftBlock | None = None
        drafted_ms = 0.0
        if self._drafter is not None and not is_plain:
            start = time.perf_counter()
            block = self._drafter.propose(self._anchor, self._sampler, num_candidates, room)
            if len(block.tokens) > room:
                block = DraftBlock(block.tokens[:room], block.log_probs[:room])
            drafted_ms = (time.perf_counter() - start) * 1000
            self.stats.draft_ms += drafted_ms
        count_valid = matcher.count_valid if matcher is not None else None
        tree = build_tree(
            self._anchor, block, budget, lookup=lookup, forced=forced, count_valid=count_valid
        )
        return tree, drafted_ms

    def _choose_nodes(self, ranked: RankedTree, is_weighed: bool) -> RankedTree:
        """All nodes under a fixed budget; those that pay under an automatic one.

        is_weighed: the round tells whether drafting pays; what a grammar forces always does.
        """
        if not self._options.is_auto or ranked.tree.num_nodes == 1:
            return ranked
        chances = path_probabilities(ranked, self._calibration)
        order = sorted(range(len(chances)), key=chances.__getitem__, reverse=True)
        choice = best_budget([chances[i] for i in order], self._cost)
        self._num_chosen = max(0.9 * self._num_chosen, choice.num_nodes, _FEWEST_CHOSEN)
        if is_weighed:
            self._expected = choice.rate / self._cost.slowness
            self._turns.observe_gain(self._expected * self._cost.plain_ms * self._calibration.trust)
        return ranked.select([0, *(i + 1 for i in sorted(order[: choice.num_nodes]))])

    def _verify(self, tree: DraftTree) -> tuple[Verified, float]:
        start = time.perf_counter()
        self._target.state.begin(tree, certain=tree.num_nodes == 1)
        verified = self._target.forward(rows=range(tree.num_nodes))
        verify_ms = (time.perf_counter() - start) * 1000
        self._cost.observe_verify(tree.num_nodes, verify_ms)
        self.stats.verify_ms += verify_ms
        return verified, verify_ms

    def _emit(self, tree: DraftTree, accepted: Accepted) -> list[Emitted]:
        """What the round wrote: the path after the root, and the bonus."""
        last = TokenSource.BONUS if tree.num_nodes > 1 else TokenSource.PLAIN
        emitted = [Emitted(tree.tokens[n], tree.sources[n]) for n in accepted.path[1:]]
        emitted.append(Emitted(accepted.bonus, last, is_last=self._sampler.is_complete))
        if accepted.scores:
            pairs = zip(emitted, accepted.scores, strict=True)
            emitted = [token._replace(scores=scores) for token, scores in pairs]
        return emitted

    def _commit(self, tree: DraftTree, accepted: Accepted, verified: Verified) -> None:
        path = accepted.path
        self._target.state.commit(path)
        if self._drafter is not None and verified.features is not None:
            are_first = path[-1] == len(path) - 1  # the first nodes need not be gathered
            rows = slice(len(path)) if are_first else list(path)
            self._drafter.observe(verified.features[rows])

    def _learn(self, ranked: RankedTree, tokens: list[int]) -> None:
        """How right the draft was, and how deep."""
        outcomes = follow(ranked, tokens)
        self._calibration.observe(outcomes)
        depth = sum([outcome.right is not None for outcome in outcomes])
        self._reach += 0.2 * (depth - self._reach)
