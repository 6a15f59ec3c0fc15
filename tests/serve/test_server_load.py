"""A short load with slow readers and clients that leave; `python -m tests.serve.load` is longer."""

import pytest

from tests.serve import load


def test_a_crowd_for_a_few_seconds():
    figures = load.measure(num_streams=50, seconds=5)
    assert load.find_faults(figures) == [], figures
    outcomes = figures["outcomes"]
    assert set(outcomes) == {"whole", "slow, whole", "left while reading", "left while waiting"}
    assert min(outcomes.values()) >= 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_streams", "seconds", "model"), [(200, 120, None), (40, 60, "smollm2-135m")]
)
def test_a_crowd_for_long(num_streams, seconds, model, smollm2_path):
    figures = load.measure(num_streams, seconds, model)
    assert load.find_faults(figures, 8.0 if model is None else 64.0) == [], figures


@pytest.mark.parametrize(
    "change",
    [
        {"faults": ["'b' instead of 'a'"]},
        {"rss_growth_mb": 20.0},
        {"wait_s": {"longest_of_median": 9.0}},
        {"served": {"most_of_least": 4.0}},
    ],
)
def test_faults_are_found(change):
    good = {
        "faults": [],
        "rss_growth_mb": 1.0,
        "wait_s": {"longest_of_median": 1.5},
        "served": {"most_of_least": 1.2},
    }
    assert load.find_faults(good) == []
    assert len(load.find_faults({**good, **change})) == 1
