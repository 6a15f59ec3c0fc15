"""Rotary positions: which frequencies, how many dims, which pairing."""

from dataclasses import dataclass

import numpy as np

from draftree.kernels.ops import Array, Ops


def inverse_frequencies(rotary_dim: int, base: float) -> np.ndarray:
    """float64 [rotary_dim / 2]."""
    return base ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)


@dataclass(frozen=True, slots=True)
class Rotary:
    """One table for all layers of a model. interleaved: pairs (2i, 2i+1), else (i, i + rotary_dim /
    2).
    """

    table: Array
    head_dim: int
    interleaved: bool

    def __call__(self, ops: Ops, x: Array) -> None:
        ops.rope(x, self.head_dim, self.table, interleaved=self.interleaved)
