"""How many nodes pay: measured cost of a pass by node count, and how far the draft's confidence can
be trusted.

In: what each round took and how deep it went. Out: for a ranked tree, the number of nodes with the
most expected tokens per second, 0 included.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import exp

EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
_MEMORY = 0.15  # weight of the newest time in the running mean
_PRIOR_SLOPE = 0.15  # cost of one more node, in passes of one, until there is a measurement
_PRIOR_ROUNDS = 4.0  # rounds that the prior counts for


class CostModel:
    """Milliseconds of a target pass by number of nodes (root included), and of a draft pass."""

    def __init__(self) -> None:
        self._verify_ms: dict[int, float] = {}
        self.draft_ms = 0.0

    @property
    def is_measured(self) -> bool:
        """Whether a pass of one node has been seen, which all else is compared with."""
        return 1 in self._verify_ms

    def measure(self, run: Callable[[int], float], max_nodes: int) -> None:
        """Time passes of a few sizes once; run(n) returns the milliseconds of a pass of n nodes."""
        sizes = [n for n in (1, 4, 8, 16, 32, 64) if n <= max_nodes]
        for size in (*sizes[:1], *sizes):
            self._verify_ms[size] = run(size)

    def observe_verify(self, num_nodes: int, ms: float) -> None:
        """Times are kept at the step's edge: cost is a staircase, not a slope."""
        edge = next(e for e in EDGES if e >= num_nodes)
        known = self._verify_ms.get(edge)
        if known is None:
            self._verify_ms[edge] = ms
        else:  # a pause of the machine is not a cost
            self._verify_ms[edge] = known + _MEMORY * (min(ms, 3 * known) - known)

    def observe_draft(self, ms: float) -> None:
        known = self.draft_ms
        self.draft_ms = known + _MEMORY * (min(ms, 3 * known) - known) if known else ms

    def verify_ms(self, num_nodes: int) -> float:
        """Interpolated between the sizes that were seen, extrapolated beyond them.

        A prior slope stands in until two sizes were seen; larger ones are tried as smaller ones
        turn out cheap, so nothing is run only to be timed.
        """
        points = sorted(self._verify_ms.items()) or [(1, 1.0)]
        if num_nodes <= points[0][0]:
            return points[0][1]
        if len(points) == 1:
            (edge, ms), slope = points[0], _PRIOR_SLOPE
            return ms * (1.0 + slope * (num_nodes - 1)) / (1.0 + slope * (edge - 1))
        segments = list(pairwise(points))
        (n0, t0), (n1, t1) = next((s for s in segments if num_nodes <= s[1][0]), segments[-1])
        return t0 + max(t1 - t0, 0.0) * (num_nodes - n0) / (n1 - n0)


class Calibration:
    """Draft confidence against what verification accepted, by depth."""

    def __init__(self, max_depth: int = 64) -> None:
        self._predicted = [_PRIOR_ROUNDS] * max_depth
        self._accepted = [_PRIOR_ROUNDS] * max_depth

    def observe(self, predicted: Sequence[float], num_accepted: int) -> None:
        """predicted[d]: conditional probability mass that the tree held at depth d + 1 below the
        accepted node.
        """
        for depth, mass in enumerate(predicted[: num_accepted + 1]):
            if depth >= len(self._predicted):
                break
            self._predicted[depth] = 0.98 * self._predicted[depth] + mass
            self._accepted[depth] = 0.98 * self._accepted[depth] + (depth < num_accepted)

    def ratio(self, depth: int) -> float:
        """Accepted over predicted for the step to `depth` (1 is the first)."""
        i = min(depth, len(self._predicted)) - 1
        return min(self._accepted[i] / max(self._predicted[i], 1e-6), 2.0)


def path_probabilities(
    parents: Sequence[int],
    depths: Sequence[int],
    path_log_probs: Sequence[float],
    calibration: Calibration,
) -> list[float]:
    """Calibrated probability that each node but the root is on the accepted path."""
    result = [1.0]
    raw = [0.0, *path_log_probs]
    for node in range(1, len(parents)):
        parent = parents[node]
        conditional = exp(min(raw[node] - raw[parent], 0.0)) * calibration.ratio(depths[node])
        result.append(result[parent] * min(conditional, 1.0))
    return result[1:]


def best_budget(probabilities: Sequence[float], cost: CostModel) -> int:
    """The number of nodes with the most expected tokens per millisecond; the draft's time is
    already spent.

    probabilities fall; the rate is looked at where a step of the staircase ends.
    """
    best_count, best_rate = 0, 1.0 / (cost.draft_ms + cost.verify_ms(1))
    expected = 1.0
    count = 0
    for edge in EDGES:
        while count < len(probabilities) and count + 1 < edge:
            expected += probabilities[count]
            count += 1
        if count:
            rate = expected / (cost.draft_ms + cost.verify_ms(count + 1))
            if rate > best_rate:
                best_count, best_rate = count, rate
        if count >= len(probabilities):
            break
    return best_count
