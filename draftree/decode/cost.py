"""How many nodes pay: measured cost of a pass by node count.

In: what each round took. Out: for nodes with falling probabilities, the number of them with the
most expected tokens per second, 0 included.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
# Weights of a new time in the running means, of one size, of the machine's speed (most of what
# changes is common to all sizes), and of plain steps.
_WEIGHT, _SPEED_WEIGHT, _PLAIN_WEIGHT = 0.08, 0.15, 0.3
_NEAR = 0.35  # what differs by more than this share is no matter of speed
_FAR_RISE, _FAR_FALL = 0.04, 0.5  # then: a pause of the machine, or something known badly
_MOST = 3.0  # times what is known; more is a pause for certain
_MANY = 100.0  # times that something was seen, if it is seen all the time
_NEAR_POSITIONS = 2048  # that make no difference to what a plain step takes
_PRIOR_SLOPE = 0.15  # cost of one more node, in passes of one, until there is a measurement
# Passes that a guess counts for, how those that were seen fade with each later one, and how many,
# of those of the best known size, make a size known.
_GUESS_WEIGHT, _STALE, _KNOWN = 0.5, 0.95, 0.1


class CostModel:
    """Milliseconds of a target pass by number of nodes (with root), and of all else in a round.

    A machine is faster now and slower then, for all of them alike. So what is seen of any one tells
    of the others: times are kept as on a machine of constant speed, and the speed apart. Steps
    without a draft are another matter.
    """

    def __init__(self, num_unsteady: int = 4, num_plain: int = 8) -> None:
        """num_plain: plain steps that make their time known, the first num_unsteady of which do not
        count.
        """
        self._num_unsteady, self._enough_plain = num_unsteady, num_plain
        self._slowness = 1.0
        self._edges: list[int] = []  # sizes that were seen, rising
        self._times: list[float] = []
        self._weights: list[float] = []  # how often each was seen, and how lately
        self._smooth: list[float] | None = None
        self.draft_ms = 0.0
        self.plain_ms = 0.0  # of a plain step as a whole, as they are now
        self._num_plain = 0
        self._plain_position = 0  # of the sequence when it was timed

    @property
    def is_measured(self) -> bool:
        """Whether plain steps have been seen, which all else is compared with."""
        return self._num_plain >= self._enough_plain

    def is_measured_near(self, position: int) -> bool:
        """Passes take longer as the context grows, which makes little difference up to a point."""
        distance = abs(position - self._plain_position)
        return distance <= _NEAR_POSITIONS + min(position, self._plain_position)

    @property
    def slowness(self) -> float:
        """Milliseconds that now pass for one of those that are kept."""
        return self._slowness

    def _blend(self, known: float, ms: float, seen: float = _MANY) -> float:
        """The known time, moved towards a new one: the more, the less the time was seen before.
        Pauses of the machine count little.
        """
        if not known:
            return ms / self._slowness
        weight = 1.0 / (1.0 + seen)
        excess = min(ms / (known * self._slowness), _MOST) - 1.0
        if abs(excess) > _NEAR:
            return known * (1.0 + max(weight, _FAR_FALL if excess < 0 else _FAR_RISE) * excess)
        self._slowness *= 1.0 + _SPEED_WEIGHT * excess
        return known * (1.0 + max(weight, _WEIGHT) * excess)

    def observe_verify(self, num_nodes: int, ms: float) -> None:
        """Times are kept at the step's edge: cost is a staircase, not a slope."""
        edge = EDGES[bisect_left(EDGES, num_nodes)]
        place = bisect_left(self._edges, edge)
        if place == len(self._edges) or self._edges[place] != edge:
            self._edges.insert(place, edge)
            self._times.insert(place, 0.0)
            self._weights.insert(place, 0.0)
        self._times[place] = self._blend(self._times[place], ms, self._weights[place])
        self._weights = [_STALE * weight for weight in self._weights]
        self._weights[place] += 1.0
        self._smooth = None

    def observe_plain(self, ms: float, position: int) -> None:
        """A step without a draft, with the caches to itself. It says nothing about rounds with a
        draft, nor they about it: where target and draft do not fit the cache together, only they
        are slow.
        """
        self._num_plain += 1
        self._plain_position = position
        if self._num_plain <= self._num_unsteady:
            return
        excess = min(ms / self.plain_ms, _MOST) - 1.0 if self.plain_ms else 0.0
        weight = _PLAIN_WEIGHT
        if abs(excess) > _NEAR:
            weight = _FAR_FALL if excess < 0 else _FAR_RISE
        self.plain_ms = (self.plain_ms or ms) * (1.0 + weight * excess)

    def observe_draft(self, ms: float) -> None:
        self.draft_ms = self._blend(self.draft_ms, ms)

    def verify_ms(self, num_nodes: int) -> float:
        """Interpolated between the sizes that were seen, extrapolated beyond them.

        A prior slope stands in until two sizes were seen; larger ones are tried as smaller ones
        turn out cheap, so nothing is run only to be timed.
        """
        edges = self._edges
        if not edges:
            return _line_ms((1,), (1.0,), 0, 0, num_nodes)
        if self._smooth is None:
            self._smooth = self._smoothed()
        if num_nodes <= edges[0]:
            return self._smooth[0]
        last = min(bisect_left(edges, num_nodes), len(edges) - 1)
        return _line_ms(edges, self._smooth, max(last - 1, 0), last, num_nodes)

    def _smoothed(self) -> list[float]:
        """The times; where one is hardly known, drawn towards what better known ones say. It may
        have met a pause of the machine, and as a high time it would never be tried again.
        """
        edges, times, weights = self._edges, list(self._times), self._weights
        enough = _KNOWN * max(weights)
        known = [i for i, weight in enumerate(weights) if weight >= enough]
        for i, weight in enumerate(weights):
            if weight < enough:
                above = bisect_left(known, i)
                pair = known[max(above - 1, 0) : above + 1]
                if above == len(known):
                    pair = known[-2:]
                guess = _line_ms(edges, self._times, pair[0], pair[-1], edges[i])
                times[i] = (weight * times[i] + _GUESS_WEIGHT * guess) / (weight + _GUESS_WEIGHT)
        return times


def _line_ms(edges: Sequence[int], times: Sequence[float], a: int, b: int, num_nodes: int) -> float:
    """On the line through two sizes, a and b of those known, which does not fall; through one, if
    they are the same, with the prior slope.
    """
    if a == b:
        more = 1.0 + _PRIOR_SLOPE * (num_nodes - 1)
        return times[a] * more / (1.0 + _PRIOR_SLOPE * (edges[a] - 1))
    rise = max(times[b] - times[a], 0.0)
    return times[a] + rise * (num_nodes - edges[a]) / (edges[b] - edges[a])


class Choice(NamedTuple):
    """How many nodes to verify, and the tokens per millisecond that are expected of it."""

    num_nodes: int
    rate: float


def best_budget(probabilities: Sequence[float], cost: CostModel) -> Choice:
    """The number of nodes with the most expected tokens per millisecond, the draft's time included.

    probabilities fall; the rate is looked at where a step of the staircase ends.
    """
    draft_ms = cost.draft_ms
    best_count, best_rate = 0, 1.0 / (draft_ms + cost.verify_ms(1))
    expected = 1.0
    count = 0
    for edge in EDGES:
        while count < len(probabilities) and count + 1 < edge:
            expected += probabilities[count]
            count += 1
        rate = expected / (draft_ms + cost.verify_ms(count + 1))
        if rate > best_rate:
            best_count, best_rate = count, rate
        if count >= len(probabilities):
            break
    return Choice(best_count, best_rate)
