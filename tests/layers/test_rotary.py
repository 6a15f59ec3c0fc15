"""Rotary frequencies."""

import numpy as np

from draftree.layers.rotary import inverse_frequencies


def test_frequencies_fall_from_one_by_a_constant_factor() -> None:
    frequencies = inverse_frequencies(64, 10000.0)
    assert frequencies.shape == (32,) and frequencies[0] == 1.0
    ratios = frequencies[1:] / frequencies[:-1]
    assert np.allclose(ratios, 10000.0 ** (-2 / 64), rtol=1e-12)
