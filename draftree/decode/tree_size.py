"""How many rows a device's round verifies: as many as give most tokens a millisecond.

A smaller tree is the beginning of a larger one, so every round shows what smaller ones would have
given. Now and then a neighbouring size is tried. Decides for the next round but one: nothing waits.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Final

_FEW: Final = 3  # rounds of each size that are timed first
_TRY_EVERY: Final = 24  # rounds
# Weights of the latest round in running means, at least: texts differ, times hardly do.
_TEXT_WEIGHT: Final = 0.08
_TIME_WEIGHT: Final = 0.4


class _Mean:
    """All alike at first, later ones count for more."""

    def __init__(self, least_weight: float) -> None:
        self.value, self.count = 0.0, 0
        self._least_weight = least_weight

    def add(self, value: float) -> None:
        self.count += 1
        self.value += max(1 / self.count, self._least_weight) * (value - self.value)


class TreeSizes:
    def __init__(self) -> None:
        self._ms: dict[int, _Mean] = defaultdict(partial(_Mean, _TIME_WEIGHT))
        # Tokens a round, more than the next smaller size gives.
        self._more: dict[int, _Mean] = defaultdict(partial(_Mean, _TEXT_WEIGHT))
        self._num_chosen = 0

    def choose(self, sizes: Sequence[int]) -> int:
        """One of the sizes, which are in ascending order."""
        for size in reversed(sizes):
            if self._ms[size].count < _FEW:
                return size
        place = max(range(len(sizes)), key=lambda i: self._rate(sizes[: i + 1]))
        self._num_chosen += 1
        if self._num_chosen % _TRY_EVERY == 0:
            is_upward = place == 0 or self._num_chosen // _TRY_EVERY % 2 == 1
            place = min(place + 1, len(sizes) - 1) if is_upward else place - 1
        return sizes[place]

    def observe(self, sizes: Sequence[int], size: int, path: Sequence[int], ms: float) -> None:
        """A round of that size. path: its nodes, the root first; with it as many tokens come."""
        self._ms[size].add(ms)
        before = 0
        for each in sizes:
            if each <= size:
                tokens = sum(node < each for node in path)
                self._more[each].add(tokens - before)
                before = tokens

    def _rate(self, sizes: Sequence[int]) -> float:
        """Tokens a millisecond of the last of the sizes."""
        tokens = sum(self._more[size].value for size in sizes)
        return tokens / self._ms[sizes[-1]].value
