"""Perplexity, noise and disagreements, on figures that can be checked by hand."""

from math import log

import pytest

from benchmarks.parity import (
    ParityOptions,
    compare_choices,
    compare_texts,
    hash_ids,
    measure_noise,
    measure_parity,
    pairs_to_ask,
    perplexity,
)
from benchmarks.score import Scores
from draftree.errors import BenchError


def test_perplexity_is_over_tokens_and_not_over_windows():
    windows = [Scores(log_probs=[-log(2)] * 3), Scores(log_probs=[-log(32)])]
    assert perplexity(windows) == pytest.approx(4.0)


def test_noise_is_how_far_gaps_move():
    exact = [Scores(pair_gaps=[[1.0, 2.0, 0.0]] * 200)]
    ours = [Scores(gaps=[1.0 + 0.001 * i for i in range(200)]), Scores(gaps=[9.0])]
    theirs = [Scores(gaps=[2.5] * 200), Scores(gaps=[9.0])]
    noise = measure_noise(ours, theirs, exact)
    assert noise.ours.median == pytest.approx(0.1)
    assert noise.ours.percentile_99 == pytest.approx(0.198)
    assert noise.ours.largest == pytest.approx(0.199)
    assert noise.llama.median == noise.llama.largest == pytest.approx(0.5)
    assert noise.limit == pytest.approx(0.698)


def test_exact_arithmetic_is_asked_about_both():
    ours, theirs = Scores(best=[1, 2], second=[3, 4]), Scores(best=[5, 2], second=[6, 7])
    assert pairs_to_ask(ours, theirs) == [[(1, 3), (5, 6), (1, 5)], [(2, 4), (2, 7), (2, 2)]]


def test_choices_that_differ_are_looked_at():
    ours = [Scores(best=[7, 7, 7]), Scores(best=[7, 8, 9]), Scores(best=[1])]
    theirs = [Scores(best=[7, 7, 7]), Scores(best=[7, 1, 2]), Scores(best=[2])]
    exact = [
        Scores(pair_gaps=[[0, 0, gap] for gap in gaps]) for gaps in ((0, 0, 0), (0, -0.2, 0.9))
    ]
    agreement = compare_choices(ours, theirs, exact, 0.5)
    assert (agreement.num_positions, agreement.num_equal, agreement.num_explained) == (6, 4, 1)
    first, second = agreement.disagreements
    assert (first.where, first.position, first.exact_gap) == ("window 1", 2, 0.2)
    assert (first.is_explained, second.is_explained) == (True, False)


def test_texts_count_up_to_their_first_difference():
    def ask_gap(ids, pair):
        assert (ids, pair) == ([1, 2, 5], (6, 9))
        return -0.3

    agreement = compare_texts(
        [[1, 2], [3]], [[5, 6, 7], [8, 8, 8]], [[5, 9, 9], [8, 8, 8]], 0.5, ask_gap
    )
    assert (agreement.num_positions, agreement.num_equal, agreement.num_explained) == (5, 4, 1)
    (found,) = agreement.disagreements
    assert (found.where, found.position, found.ours, found.theirs) == ("prompt 0", 1, 6, 9)


def test_the_exact_part_must_fit(tmp_path, say):
    with pytest.raises(BenchError, match="at least one window"):
        measure_parity(tmp_path, "hash", ParityOptions(2, "python", tmp_path, 512, 2), say)


def test_hash_depends_on_ids_and_windows():
    assert len({hash_ids(x) for x in ([[1, 2], [3]], [[1], [2, 3]], [[12], [3]])}) == 3
