"""Rotary positions: which frequencies. How heads are rotated by them, `kernels.ops.Rope` says."""

import numpy as np


def inverse_frequencies(rotary_dim: int, base: float) -> np.ndarray:
    """float64 [rotary_dim / 2]."""
    return base ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
