"""A draft's confidence is worth what the target made of it."""

import math

import numpy as np
import pytest

from draftree.decode.calibration import Calibration, LookedDepth, follow, path_probabilities
from draftree.decode.tree import NodeKind, build_tree
from draftree.drafts.drafter import Proposal


def test_calibration_finds_overconfidence() -> None:
    """The first step is right as often as the draft says, the second far less."""
    rng = np.random.default_rng(0)
    calibration = Calibration(4)
    ranked = build_tree(1, Proposal(np.array([[2], [3]]), np.log([[0.9], [0.9]])), 2)
    for _ in range(400):
        text = [2 if rng.random() < 0.9 else 7, 3 if rng.random() < 0.3 else 7]
        calibration.observe(follow(ranked, text))
    assert 0.9 < calibration.ratio(1, NodeKind.FIRST) < 1.1
    assert 0.2 < calibration.ratio(2, NodeKind.FIRST) < 0.45
    assert calibration.ratio(1, NodeKind.OTHER) == 1.0  # nothing was offered, nothing is learnt
    first, second = path_probabilities(ranked, calibration)
    assert 0.8 < first < 1.0 and 0.2 < second < 0.4


def test_first_choices_siblings_and_lookups_are_judged_apart() -> None:
    block = Proposal(np.array([[2, 5]]), np.log([[0.5, 0.3]]))
    ranked = build_tree(1, block, 4, lookup=(9,))
    assert ranked.kinds == (NodeKind.LOOKUP, NodeKind.FIRST, NodeKind.OTHER)
    calibration = Calibration(4)
    for _ in range(100):
        calibration.observe(follow(ranked, [2]))
    assert calibration.ratio(1, NodeKind.FIRST) > 1.7
    assert calibration.ratio(1, NodeKind.OTHER) < 0.5
    assert calibration.ratio(1, NodeKind.LOOKUP) < 0.3


@pytest.mark.parametrize("seed", range(30))
def test_a_walk_sees_all_children_of_the_nodes_on_its_way(seed: int) -> None:
    """Compared with looking for each node's children anew."""
    rng = np.random.default_rng(seed)
    probs = -np.sort(-rng.dirichlet(np.full(4, 0.5), 5), axis=1)
    block = Proposal(np.array([rng.permutation(5)[:4] for _ in range(5)]), np.log(probs + 1e-9))
    ranked = build_tree(9, block, 20, lookup=rng.integers(0, 5, seed % 4).tolist())
    tree, logs, text = ranked.tree, (0.0, *ranked.path_log_probs), rng.integers(0, 5, 4).tolist()
    node, expected = 0, []
    for token in text:
        children = [n for n, parent in enumerate(tree.parents) if parent == node]
        if not children:
            break
        masses = [0.0, 0.0, 0.0]
        for child in children:
            masses[ranked.kinds[child - 1]] += math.exp(logs[child] - logs[node])
        right = next((child for child in children if tree.tokens[child] == token), 0)
        expected.append((masses, ranked.kinds[right - 1] if right else None))
        if not right:
            break
        node = right
    assert [tuple(outcome) for outcome in follow(ranked, text)] == expected


def test_rounds_that_give_less_than_expected_are_trusted_less() -> None:
    calibration = Calibration()
    assert calibration.trust == 1.0
    for _ in range(100):
        calibration.observe_rate(0.5, num_tokens=3, ms=10.0)  # five were expected
    assert abs(calibration.trust - 0.6) < 0.05


def test_looked_up_text_takes_as_many_nodes_as_it_is_right() -> None:
    """Against what the draft's last nodes give; it comes back when it is right again."""
    looked, worth = LookedDepth(), 0.1
    assert looked.limit(worth) == 10
    for _ in range(60):
        looked.observe(looked.limit(worth), min(looked.limit(worth), 2))  # never the third one
    assert looked.limit(worth) in (2, 3)
    for _ in range(60):
        looked.observe(looked.limit(worth), 0)
    assert looked.limit(worth) == 1
    for _ in range(12):
        limit = looked.limit(worth)
        looked.observe(limit, limit)
    assert looked.limit(worth) == 10
    for number in range(400):
        limit = looked.limit(worth)
        looked.observe(limit, limit if number % 3 == 0 else 0)
    assert looked.limit(worth) == 10 and looked.limit(0.7) == 1
