"""How far a draft's confidence can be trusted: what it predicted against what the target chose.

In: ranked trees and the tokens that the rounds brought. Out: calibrated probabilities of nodes.
"""

from collections.abc import Sequence
from math import exp
from typing import NamedTuple

from draftree.decode.tree import NodeKind, RankedTree

_PRIOR_ROUNDS = 2.0  # rounds that the prior counts for
_FORGIVEN = 0.3  # what is left of earlier rounds when drafting is tried again
_LOOKED_WEIGHT = 0.1  # of the latest round that looked something up
_PRIOR_TOKENS, _FADE = 20.0, 0.97  # tokens that were as expected, to begin with; older ones fade


class Outcome(NamedTuple):
    """One step of a walk: the probability that the draft gave to each kind, and which was right."""

    masses: list[float]
    right: NodeKind | None


class Calibration:
    """Draft confidence against what the target chose, by depth and kind of node."""

    def __init__(self, max_depth: int = 64) -> None:
        self._predicted = [[_PRIOR_ROUNDS] * max_depth for _ in NodeKind]
        self._accepted = [[_PRIOR_ROUNDS] * max_depth for _ in NodeKind]
        self._ratios = [[1.0] * max_depth for _ in NodeKind]  # accepted over predicted
        self._written = self._expected = _PRIOR_TOKENS  # tokens of drafted rounds

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """What happened at depth 1, 2, … until the walk left the tree."""
        for depth, (masses, right) in enumerate(outcomes[: len(self._ratios[0])]):
            for kind, mass in enumerate(masses):
                if mass > 0.0:
                    predicted = 0.98 * self._predicted[kind][depth] + min(mass, 1.0)
                    accepted = 0.98 * self._accepted[kind][depth] + (right == kind)
                    self._predicted[kind][depth], self._accepted[kind][depth] = predicted, accepted
                    self._ratios[kind][depth] = accepted / max(predicted, 1e-6)

    def observe_rate(self, expected: float, num_tokens: int, ms: float) -> None:
        """A drafted round wrote so many tokens in so many milliseconds; expected: tokens each."""
        self._written = _FADE * self._written + num_tokens
        self._expected = _FADE * self._expected + expected * ms

    def forgive(self) -> None:
        """Drafting is tried again after a while: what was seen before counts for less."""
        self._written = (self._written + _PRIOR_TOKENS) / 2
        self._expected = (self._expected + _PRIOR_TOKENS) / 2
        for counts in (*self._predicted, *self._accepted):
            counts[:] = [_FORGIVEN * count for count in counts]

    @property
    def trust(self) -> float:
        """Tokens that drafted rounds gave over those that their time should have given."""
        return self._written / self._expected

    def ratio(self, depth: int, kind: NodeKind) -> float:
        """Accepted over predicted for the step to `depth` (1 is the first)."""
        ratios = self._ratios[kind]
        return ratios[min(depth, len(ratios)) - 1]


class LookedDepth:
    """How many looked-up tokens are worth nodes of a device's tree, in place of the draft's: by how
    often they were right at each depth.
    """

    def __init__(self, max_depth: int = 10) -> None:
        self._shares = [1.0] * max_depth

    def observe(self, num_looked: int, num_accepted: int) -> None:
        """A round had so many of them. If all were right, the next one would have been, for all we
        know.
        """
        num_right = num_accepted + (num_accepted == num_looked)
        for depth, share in enumerate(self._shares):
            if num_accepted < num_looked or depth < num_right:
                self._shares[depth] = share + _LOOKED_WEIGHT * ((depth < num_right) - share)

    def limit(self, worth: float) -> int:
        """worth: how often a node of the draft that has to go is right. At least one is looked up,
        to see whether more would do.
        """
        below = (depth for depth, share in enumerate(self._shares) if share < worth)
        return max(next(below, len(self._shares)), 1)


def path_probabilities(ranked: RankedTree, calibration: Calibration) -> list[float]:
    """Calibrated probability that each node but the root is on the accepted path."""
    tree, log_probs = ranked.tree, (0.0, *ranked.path_log_probs)
    result = [1.0]
    for node, kind in enumerate(ranked.kinds, 1):
        parent = tree.parents[node]
        conditional = exp(min(log_probs[node] - log_probs[parent], 0.0))
        trusted = conditional * calibration.ratio(tree.depths[node], kind)
        result.append(result[parent] * min(trusted, 1.0))
    return result[1:]


def follow(ranked: RankedTree, tokens: Sequence[int]) -> list[Outcome]:
    """Walk all that was proposed along the round's tokens, whether or not it was verified.

    So a draft is judged even in a round that verifies none of its nodes.
    """
    tree, log_probs = ranked.tree, (0.0, *ranked.path_log_probs)
    outcomes: list[Outcome] = []
    walked = {0: 0}  # nodes on the way, each with its depth; all others are passed over
    for node, kind in enumerate(ranked.kinds, 1):
        parent = tree.parents[node]
        depth = walked.get(parent, len(tokens))
        if depth == len(tokens):
            continue
        if depth == len(outcomes):
            outcomes.append(Outcome([0.0] * len(NodeKind), None))
        masses = outcomes[depth].masses
        masses[kind] += exp(log_probs[node] - log_probs[parent])
        if tree.tokens[node] == tokens[depth]:
            outcomes[depth] = Outcome(masses, kind)
            walked[node] = depth + 1
    return outcomes
