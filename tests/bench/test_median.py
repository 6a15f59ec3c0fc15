"""Medians, spread and ratios."""

import pytest

from draftree.bench.median import divide, rates, summarize
from draftree.errors import BenchError


def test_summary_keeps_the_order_of_samples():
    samples = summarize([3.0, 1.0, 2.0], "ms")
    assert samples.samples == (3.0, 1.0, 2.0)
    assert (samples.median, samples.low, samples.high) == (2.0, 1.0, 3.0)


def test_no_samples_are_refused():
    with pytest.raises(BenchError, match="at least one round"):
        summarize([], "ms")


def test_rates_are_tokens_per_second():
    assert rates(128, [1000.0, 2000.0, 500.0]).samples == (128.0, 64.0, 256.0)


def test_ratio_is_of_medians_and_its_spread_of_pairs():
    ratio = divide(summarize([2.0, 4.0, 9.0], "ms"), summarize([1.0, 2.0, 3.0], "ms"))
    assert (ratio.value, ratio.low, ratio.high) == (2.0, 2.0, 3.0)


def test_ratio_of_different_units_is_refused():
    with pytest.raises(BenchError, match="ms cannot be compared with tok/s"):
        divide(summarize([1.0], "ms"), summarize([1.0], "tok/s"))


def test_ratio_to_nothing_is_refused():
    with pytest.raises(BenchError, match="0 ms"):
        divide(summarize([1.0], "ms"), summarize([0.0], "ms"))
