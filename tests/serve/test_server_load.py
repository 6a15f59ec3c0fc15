"""A short load with slow readers and clients that leave; `python -m tests.serve.load` is longer."""

import pytest

from tests.serve import load

OUTCOMES = {"whole", "slow, whole", "left while reading", "left while waiting"}


def test_a_crowd_for_a_few_seconds():
    """Every reply is right. Who waits how long hangs on the machine, and is looked at below."""
    figures = load.measure(num_streams=28, seconds=2)
    assert figures["faults"] == [] and figures["server"]["engine_failures_total"] == 0, figures
    assert OUTCOMES >= set(figures["outcomes"]) >= {"whole"}
    assert {"429", "503"} >= set(figures["refusals"]) >= {"429"}
    assert figures["retry_after_s"][0] >= 1


@pytest.mark.long
def test_a_crowd_for_long():
    figures = load.measure(num_streams=200, seconds=120)
    assert load.find_faults(figures) == [], figures
    assert set(figures["outcomes"]) == OUTCOMES and set(figures["refusals"]) == {"429", "503"}


@pytest.mark.parametrize(
    "change",
    [
        {"faults": ["'b' instead of 'a'"]},
        {"rss_mb": {"growth": 20.0}},
        {"wait_s": {"longest_of_median": 9.0}},
        {"served": {"most_of_least": 4.0}},
        {"server": {"engine_failures_total": 1}},
    ],
)
def test_faults_are_found(change):
    good = {
        "faults": [],
        "rss_mb": {"growth": 1.0},
        "wait_s": {"longest_of_median": 1.5},
        "served": {"most_of_least": 1.2},
        "server": {"engine_failures_total": 0},
    }
    assert load.find_faults(good) == []
    assert len(load.find_faults({**good, **change})) == 1
