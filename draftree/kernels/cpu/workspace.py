"""Memory that all operations of one device share: the models' packed weights, activations of a
pass, and tables of rotary angles.

Passes of target and draft follow each other, so their activations can lie in the same place.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from draftree.kernels.cpu.arena import Arena, lazy_zeros
from draftree.kernels.cpu.rope import rope_table


def new_floats(num_floats: int) -> np.ndarray:
    return lazy_zeros(num_floats * 4).view(np.float32)


class Scratch:
    """A stack of float32 memory for activations: scopes give back what was taken inside them."""

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []
        self._used = 0

    def take(self, num_rows: int, width: int) -> np.ndarray:
        """float32 [num_rows, width], in the smallest block that has room for it."""
        blocks, used, size = self._blocks, self._used, num_rows * width
        fitting = [i for i in range(used, len(blocks)) if blocks[i].size >= size]
        if not fitting:
            fitting = [len(blocks)]
            blocks.append(new_floats(size))
        best = min(fitting, key=lambda i: blocks[i].size)
        blocks[used], blocks[best] = blocks[best], blocks[used]
        self._used += 1
        return blocks[used][:size].reshape(-1, width)

    @contextmanager
    def scope(self) -> Iterator[None]:
        before = self._used
        try:
            yield
        finally:
            self._used = before


class Workspace:
    def __init__(self) -> None:
        self.weights, self.scratch = Arena(), Scratch()
        self._tables: list[tuple[np.ndarray, np.ndarray]] = []  # frequencies, their table

    def new_rows(self, num_rows: int, width: int) -> np.ndarray:
        """Zeros, float32 [num_rows, width]."""
        rest = self.weights.take_rest(4 * num_rows * width)
        rows = new_floats(num_rows * width) if rest is None else rest.view(np.float32)
        return rows.reshape(num_rows, width)

    def rope_table(self, inv_freq: np.ndarray, num_positions: int) -> np.ndarray:
        """For so many positions at least; a draft usually turns as its target does."""
        for known, table in self._tables:
            if np.array_equal(known, inv_freq) and len(table) >= num_positions:
                return table
        table = rope_table(inv_freq, num_positions)
        self._tables.append((inv_freq, table))
        return table
