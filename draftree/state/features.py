"""A ring of the target's hidden states for the newest positions, which a draft reads as its
context.
"""

import numpy as np

from draftree.kernels.ops import Array


class FeatureRing:
    """Rows for positions start … end-1; older ones are overwritten. The rows are the device's."""

    def __init__(self, rows: Array) -> None:
        self._rows = rows  # float32 [capacity, width]
        self.end = 0
        self.start = 0

    @property
    def capacity(self) -> int:
        return len(self._rows)

    def append(self, rows: Array) -> None:
        """Rows of the positions that were just committed, in order: float32 [count, width]."""
        capacity = self.capacity
        kept = rows[-capacity:]
        first = self.end + len(rows) - len(kept)
        self._rows[(first + np.arange(len(kept))) % capacity] = kept
        self.end += len(rows)
        self.start = max(self.start, self.end - capacity)

    def read(self, first: int, last: int) -> Array:
        """Rows of positions first … last-1: float32 [count, width]."""
        assert self.start <= first <= last <= self.end
        return self._rows[np.arange(first, last) % self.capacity]

    def reset(self, position: int = 0) -> None:
        """Empty, the next row being that of `position`."""
        self.start = self.end = position
