"""Bars are judged on the figures of the right file."""

from draftree.bench.bar import BARS, CODER, SMOLLM2, judge_bars
from tests.bench import example


def words(records, kind, sha256=SMOLLM2):
    return [
        verdict.words
        for verdict in judge_bars(records)
        if (verdict.bar.kind, verdict.bar.sha256) == (kind, sha256)
    ]


def test_without_results_nothing_is_measured():
    verdicts = judge_bars([])
    assert len(verdicts) == len(BARS)
    assert {verdict.words for verdict in verdicts} == {"not measured"}


def test_ratios_above_their_bars():
    assert words([example.record("peers", example.peers(1.0))], "peers") == [
        "aim reached",  # 1.6 of 1.6
        "missed",  # 1.6 of 2.5
    ]
    assert words([example.record("peers", example.peers(0.8))], "peers")[0] == "bar passed"
    assert words([example.record("peers", example.peers(0.5))], "peers")[0] == "missed"


def test_figures_below_their_bars():
    for ratio, verdict in ((1.05, "aim reached"), (1.2, "bar passed"), (3.4, "missed")):
        records = [example.record("memory", example.memory(ratio))]
        assert words(records, "memory") == [verdict]


def test_perplexity_counts_in_both_directions():
    for excess, verdict in ((-0.0005, "aim reached"), (-0.004, "bar passed"), (-0.006, "missed")):
        assert words([example.record("parity", example.parity(excess))], "parity")[0] == verdict


def test_one_unexplained_disagreement_misses():
    assert words([example.record("parity", example.parity(gap=0.1))], "parity")[1] == "aim reached"
    assert words([example.record("parity", example.parity(gap=2.0))], "parity")[1] == "missed"


def test_a_result_counts_for_its_own_file_only():
    records = [example.record("peers", sha256=CODER)]
    assert words(records, "peers") == ["not measured"] * 2
    assert words(records, "peers", CODER)[0] == "aim reached"
