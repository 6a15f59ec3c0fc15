"""The speculation controller: whether the next round drafts, and how many nodes it verifies.

Draft as long as it gains, with plain steps in between to compare with, and after pauses again, to
see whether it gains now. One controller for rounds of the host and of a device; a device cannot
tell in advance what a tree is worth, so there the gain is the one that was measured, and
tree_size.py says how many rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from draftree.decode.calibration import Calibration, LookedDepth, follow, path_probabilities
from draftree.decode.cost import CostModel, best_budget
from draftree.decode.tree import RankedTree
from draftree.decode.tree_size import TreeSizes

PRIOR_GAIN, PRIOR_SAMPLED_GAIN = 1.2, 1.05  # where noise decides, less can be guessed
_GAIN_WEIGHT = 0.06  # of the running mean of the gain: rounds differ by half of it
_TRIAL_MARGIN = 0.05  # by how much a trial begins above what would end it
_CLEAR_GAIN = 1.2
_NUM_CANDIDATES = 8  # a position, under an automatic budget
_RANKED, _FEWEST_CHOSEN = 1.5, 3.0  # nodes that are ranked then, for each that was chosen lately


@dataclass(frozen=True, slots=True)
class Schedule:
    """How many rounds of which kind. Drafting ends below stop_gain."""

    stop_gain: float
    first_pause: int  # plain steps; twice as many after each trial that failed, up to the longest
    longest_pause: int
    clear_run: int  # drafted rounds before plain steps to compare with, where the gain is clear
    unclear_run: int
    num_compared: int  # those plain steps, the first cold ones of which are slower
    num_cold: int

    def new_cost(self) -> CostModel:
        is_steady = self.num_cold == 0
        return CostModel(0, self.num_compared) if is_steady else CostModel()


# On the host each change costs, since the draft has had the caches: drafting ends a little below no
# gain. On a device plain rounds are as fast as ever.
HOST_SCHEDULE = Schedule(0.95, 32, 256, 128, 48, num_compared=7, num_cold=4)
DEVICE_SCHEDULE = Schedule(1.0, 8, 256, 512, 512, num_compared=3, num_cold=0)


class Limits(NamedTuple):
    """What a draft is asked for."""

    num_positions: int
    budget: int
    num_candidates: int


class SpeculationController:
    """Outlives a request: the next one is likely to be like it."""

    def __init__(
        self,
        schedule: Schedule = HOST_SCHEDULE,
        cost: CostModel | None = None,
        prior_gain: float = PRIOR_GAIN,
    ) -> None:
        self.cost = cost or schedule.new_cost()
        self.sizes, self.looked = TreeSizes(), LookedDepth()  # of a device's rounds
        self._schedule = schedule
        self._calibration = Calibration()
        self._prior_gain = self._gain = prior_gain
        self._pause = schedule.first_pause  # when drafting ends the next time
        self._pause_left = 0  # plain steps of a pause that are still to come
        self._num_to_compare = 0  # the same, of those that are taken to compare
        self._num_drafted = 0  # rounds since a plain step was timed
        self._plain_run = 0  # plain steps since the last draft
        self._is_trial = False  # the next draft is the first one after a pause
        self.begin_request()

    def begin_request(self) -> None:
        self._expected = 0.0  # tokens a millisecond, of the round under way
        self._reach = 3.0  # running mean of how deep the text followed what was proposed
        self._num_chosen = 4.0  # nodes of the largest trees of late

    def end_request(self) -> None:
        """A pause goes on in the next one."""
        self._gain = (4 * self._gain + self._prior_gain) / 5

    def is_draft_next(self, position: int) -> bool:
        """Asked once a round; until plain steps are known, there is no choice."""
        if not self.cost.is_measured:
            return False
        schedule = self._schedule
        if self._pause_left == 0 and self._gain < schedule.stop_gain:
            self._gain, self._is_trial = schedule.stop_gain + _TRIAL_MARGIN, True
            self._pause_left = self._pause
            self._pause = min(2 * self._pause, schedule.longest_pause)
        if self._pause_left > 0:
            self._pause_left -= 1
            return False
        run = schedule.clear_run if self._gain > _CLEAR_GAIN else schedule.unclear_run
        is_run_over = self._num_drafted >= run
        if is_run_over:
            self._num_drafted = 0
            self._pause = schedule.first_pause  # a whole run of drafts is no trial that failed
        if self._num_to_compare == 0 and (is_run_over or not self.cost.is_measured_near(position)):
            self._num_to_compare = schedule.num_compared
        if self._num_to_compare > 0:
            self._num_to_compare -= 1
            return False
        return True

    def limit(self, room: int, max_budget: int) -> Limits:
        """How much is worth ranking. room: positions that are left."""
        budget = min(max_budget, int(_RANKED * self._num_chosen) + 2)
        return Limits(min(room, int(self._reach) + 2), budget, min(budget, _NUM_CANDIDATES))

    def begin_draft(self) -> None:
        """After a pause, what was seen before counts for less."""
        if self._is_trial:
            self._is_trial = False
            self._calibration.forgive()

    def choose_nodes(self, ranked: RankedTree, *, is_weighed: bool) -> RankedTree:
        """Those that pay. is_weighed: the round tells whether drafting pays; what a grammar forces
        always does.
        """
        chances = path_probabilities(ranked, self._calibration)
        order = sorted(range(len(chances)), key=chances.__getitem__, reverse=True)
        choice = best_budget([chances[i] for i in order], self.cost)
        self._num_chosen = max(0.9 * self._num_chosen, choice.num_nodes, _FEWEST_CHOSEN)
        if is_weighed:
            self._expected = choice.rate / self.cost.slowness
            self._observe_gain(self._expected * self.cost.plain_ms * self._calibration.trust)
        return ranked.select([0, *(i + 1 for i in sorted(order[: choice.num_nodes]))])

    def observe_plain(self, step_ms: float, pass_ms: float, position: int) -> None:
        """A plain step, and the target's pass in it; they count once they have the caches to
        themselves.
        """
        self._plain_run += 1
        is_warm = self._plain_run > self._schedule.num_cold
        if is_warm:
            self._num_drafted = 0
        if is_warm or not self.cost.draft_ms:
            self.cost.observe_plain(step_ms, position)
            if not self.cost.draft_ms:
                self.cost.observe_verify(1, pass_ms)

    def observe_verify(self, num_nodes: int, ms: float) -> None:
        self.cost.observe_verify(num_nodes, ms)

    def observe_draft(self, num_tokens: int, round_ms: float, verify_ms: float) -> None:
        """A round with a tree that was drafted, not only forced."""
        self._count_drafted()
        self.cost.observe_draft(round_ms - verify_ms)
        self._calibration.observe_rate(self._expected, num_tokens, round_ms)

    def observe_outcome(self, ranked: RankedTree, tokens: Sequence[int]) -> None:
        """How right the draft was, and how deep."""
        outcomes = follow(ranked, tokens)
        self._calibration.observe(outcomes)
        depth = sum([outcome.right is not None for outcome in outcomes])
        self._reach += 0.2 * (depth - self._reach)

    def observe_device_draft(self, num_tokens: int, round_ms: float) -> None:
        """A whole round of a device."""
        self._count_drafted()
        self._observe_gain(num_tokens * self.cost.plain_ms / round_ms)

    def _count_drafted(self) -> None:
        self._num_drafted += 1
        self._plain_run = 0

    def _observe_gain(self, gain: float) -> None:
        """A drafted round gives so many tokens for one of plain steps."""
        self._gain += _GAIN_WEIGHT * (gain - self._gain)


class ControllerPair(NamedTuple):
    """Greedy and sampled requests are judged apart, by one cost."""

    greedy: SpeculationController
    sampled: SpeculationController

    @classmethod
    def new(cls, schedule: Schedule) -> "ControllerPair":
        cost = schedule.new_cost()
        return cls(
            SpeculationController(schedule, cost),
            SpeculationController(schedule, cost, PRIOR_SAMPLED_GAIN),
        )
