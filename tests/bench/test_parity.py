"""Perplexity, noise and disagreements, on figures that can be checked by hand."""

from math import log

import pytest

from draftree.bench.fault import BenchError
from draftree.bench.parity import (
    ParityOptions,
    compare_choices,
    compare_texts,
    measure_noise,
    measure_parity,
    perplexity,
)
from draftree.bench.score import Scores


def test_perplexity_is_over_tokens_and_not_over_windows():
    windows = [Scores(log_probs=[-log(2)] * 3), Scores(log_probs=[-log(32)])]
    assert perplexity(windows) == pytest.approx(4.0)


def test_noise_is_how_far_gaps_move():
    exact = [Scores(gaps=[1.0] * 200)]
    rounded = [Scores(pair_gaps=[1.0 + 0.001 * i for i in range(200)]), Scores()]
    noise = measure_noise(exact, rounded)
    assert noise.median == pytest.approx(0.1)
    assert noise.percentile_99 == pytest.approx(0.198)
    assert noise.largest == pytest.approx(0.199)


def test_choices_that_differ_are_looked_at():
    asked = []

    def ask_gaps(ids, pairs):
        asked.append((ids, pairs))
        return [0.0, -0.2, 0.9]

    windows = [[1, 2, 3], [4, 5, 6]]
    ours = [Scores(best=[7, 7, 7]), Scores(best=[7, 8, 9])]
    theirs = [Scores(best=[7, 7, 7]), Scores(best=[7, 1, 2])]
    agreement = compare_choices(windows, ours, theirs, 0.5, ask_gaps)
    assert asked == [([4, 5, 6], [(7, 7), (8, 1), (9, 2)])]
    assert (agreement.num_positions, agreement.num_equal, agreement.num_explained) == (6, 4, 1)
    first, second = agreement.disagreements
    assert (first.where, first.position, first.exact_gap) == ("window 1", 2, 0.2)
    assert (first.is_explained, second.is_explained) == (True, False)


def test_texts_count_up_to_their_first_difference():
    def ask_gaps(ids, pairs):
        assert ids == [1, 2, 5]
        assert pairs == [(0, 0), (0, 0), (6, 9)]
        return [0.0, 0.0, 0.3]

    agreement = compare_texts(
        [[1, 2], [3]], [[5, 6, 7], [8, 8, 8]], [[5, 9, 9], [8, 8, 8]], 0.5, ask_gaps
    )
    assert (agreement.num_positions, agreement.num_equal, agreement.num_explained) == (5, 4, 1)
    (found,) = agreement.disagreements
    assert (found.where, found.position, found.ours, found.theirs) == ("prompt 0", 1, 6, 9)


def test_the_exact_part_must_fit(tiny_path, say):
    with pytest.raises(BenchError, match="at least one window"):
        measure_parity(tiny_path, ParityOptions(2, "python", 512, 2), say)
