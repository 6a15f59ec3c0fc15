"""How many rows a device's round verifies: as many as give most tokens a millisecond.

A smaller tree is the beginning of a larger one, so every round shows what smaller ones would have
given, and nothing of larger ones: who goes to a smaller size by mistake is slow to notice. So what
sizes give is averaged over many rounds, and now and then a neighbouring size is tried, mostly the
larger one. Decides for the next round but one: nothing waits.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Final

_FEW: Final = 3  # rounds of each size that are timed first
_TRY_EVERY: Final = 16  # rounds
_TRY_SMALLER: Final = 8  # of those tries one in so many
# Weights of the latest round in running means, at least: texts differ, times hardly do. What is
# seen rarely counts for more, up to a bound.
_TEXT_WEIGHT: Final = 0.02
_RARE_WEIGHT: Final = 0.08
_TIME_WEIGHT: Final = 0.4


class _Mean:
    """All alike at first, later ones count for more."""

    def __init__(self, least_weight: float, most_weight: float) -> None:
        self.value, self.count = 0.0, 0
        self._least_weight, self._most_weight = least_weight, most_weight
        self._number = 0

    def add(self, value: float, number: int) -> None:
        """number: of the round."""
        self.count += 1
        later = min((number - self._number) * self._least_weight, self._most_weight)
        self.value += max(1 / self.count, later) * (value - self.value)
        self._number = number


class TreeSizes:
    def __init__(self) -> None:
        self._ms: dict[int, _Mean] = defaultdict(partial(_Mean, _TIME_WEIGHT, _TIME_WEIGHT))
        # Tokens a round, more than the next smaller size gives.
        self._more: dict[int, _Mean] = defaultdict(partial(_Mean, _TEXT_WEIGHT, _RARE_WEIGHT))
        self._num_chosen = self._num_seen = 0

    def choose(self, sizes: Sequence[int]) -> int:
        """One of the sizes, which are in ascending order."""
        for size in reversed(sizes):
            if self._ms[size].count < _FEW:
                return size
        place = max(range(len(sizes)), key=lambda i: self._rate(sizes[: i + 1]))
        self._num_chosen += 1
        if self._num_chosen % _TRY_EVERY == 0:
            is_smaller = self._num_chosen // _TRY_EVERY % _TRY_SMALLER == 0
            place = max(place - 1, 0) if is_smaller else min(place + 1, len(sizes) - 1)
        return sizes[place]

    def observe(self, sizes: Sequence[int], size: int, path: Sequence[int], ms: float) -> None:
        """A round of that size. path: its nodes, the root first; with it as many tokens come."""
        self._num_seen += 1
        self._ms[size].add(ms, self._num_seen)
        before = 0
        for each in sizes:
            if each <= size:
                tokens = sum(node < each for node in path)
                self._more[each].add(tokens - before, self._num_seen)
                before = tokens

    def last_worth(self, sizes: Sequence[int], size: int) -> float:
        """How often one of the last nodes of that size is right."""
        smaller = max((each for each in sizes if each < size), default=0)
        return self._more[size].value / (size - smaller)

    def _rate(self, sizes: Sequence[int]) -> float:
        """Tokens a millisecond of the last of the sizes."""
        tokens = sum(self._more[size].value for size in sizes)
        return tokens / self._ms[sizes[-1]].value
