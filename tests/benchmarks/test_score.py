"""Scores against a plain softmax."""

import numpy as np
import pytest

from benchmarks.score import score_logits


@pytest.mark.parametrize("num_rows", [1, 63, 65, 130])
def test_scores_are_those_of_a_softmax(num_rows):
    rng = np.random.default_rng(num_rows)
    logits = (5 * rng.standard_normal((num_rows, 77))).astype(np.float32)
    next_ids = rng.integers(0, 77, num_rows - 1).tolist()
    pairs = rng.integers(0, 77, (num_rows, 3, 2)).tolist()
    scores = score_logits(logits, next_ids, pairs)
    exact = logits.astype(np.float64)
    log_probs = exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))
    wanted = [log_probs[i, token] for i, token in enumerate(next_ids)]
    assert scores.log_probs == pytest.approx(wanted, abs=1e-5)
    order = np.argsort(-logits, axis=1)
    assert scores.best == order[:, 0].tolist()
    assert scores.second == order[:, 1].tolist()
    top = np.sort(logits, axis=1)
    assert scores.gaps == pytest.approx((top[:, -1] - top[:, -2]).tolist())
    assert scores.pair_gaps == [
        [float(logits[i, a] - logits[i, b]) for a, b in wanted] for i, wanted in enumerate(pairs)
    ]


def test_equal_logits_leave_the_lower_token_first():
    logits = np.zeros((1, 9), dtype=np.float32)
    logits[0, [3, 6]] = 2.0
    scores = score_logits(logits, [])
    assert (scores.best, scores.second, scores.gaps) == ([3], [6], [0.0])
    assert scores.log_probs == []
