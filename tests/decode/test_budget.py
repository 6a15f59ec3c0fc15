"""The budget follows measured cost and calibrated acceptance."""

import math

import numpy as np
import pytest

from draftree.decode.budget import (
    Calibration,
    CostModel,
    best_budget,
    follow,
    path_probabilities,
)
from draftree.decode.tree import DraftBlock, NodeKind, build_tree


def _cost(verify: dict[int, float], draft_ms: float = 0.0) -> CostModel:
    cost = CostModel()
    for _ in range(20):
        for nodes, ms in verify.items():
            cost.observe_verify(nodes, ms)
    cost.draft_ms = draft_ms
    return cost


def test_nothing_is_drafted_when_nodes_cost_as_much_as_tokens() -> None:
    linear = _cost({n: float(n) for n in (1, 2, 4, 8, 16)})
    assert best_budget([0.9, 0.8, 0.7, 0.6], linear).num_nodes == 0


def test_everything_is_drafted_when_nodes_are_free() -> None:
    flat = _cost({1: 10.0, 16: 10.0})
    assert best_budget([0.5] * 7, flat).num_nodes == 7


def test_the_staircase_decides() -> None:
    """Four nodes cost as much as one; the fifth doubles the pass."""
    stairs = _cost({1: 10.0, 2: 10.0, 3: 10.0, 4: 10.0, 6: 20.0, 8: 20.0})
    assert best_budget([0.5, 0.4, 0.3, 0.2, 0.2, 0.2, 0.2], stairs).num_nodes == 3


def test_a_draft_that_is_already_paid_makes_deeper_trees_worth_while() -> None:
    verify = {1: 10.0, 8: 18.0}
    chances = [0.9, 0.3, 0.1, 0.05, 0.05, 0.02, 0.01]
    late = best_budget(chances, _cost(verify, 10.0))
    assert late.num_nodes >= best_budget(chances, _cost(verify, 0.1)).num_nodes


def test_one_slow_pass_does_not_move_the_cost_far() -> None:
    cost = _cost({1: 10.0, 8: 20.0})
    cost.observe_verify(8, 2000.0)
    assert cost.verify_ms(8) < 30.0


def test_a_size_that_was_slow_once_is_tried_again() -> None:
    """A pause of the machine, or the first pass of a size, must not rule a size out for good."""
    chances = [0.8, 0.7, 0.6, 0.1, 0.1, 0.1, 0.1]
    cost = CostModel()
    cost.observe_draft(1.0)
    for _ in range(20):
        cost.observe_verify(1, 2.5)
    cost.observe_verify(4, 10.0)
    sizes = []
    for _ in range(100):
        count = best_budget(chances, cost).num_nodes
        sizes.append(count)
        cost.observe_verify(count + 1, 2.5 + 0.35 * count)
    assert sizes[-10:] == [3] * 10


def test_calibration_finds_overconfidence() -> None:
    """The first step is right as often as the draft says, the second far less."""
    rng = np.random.default_rng(0)
    calibration = Calibration(4)
    ranked = build_tree(1, DraftBlock(np.array([[2], [3]]), np.log([[0.9], [0.9]])), 2)
    for _ in range(400):
        text = [2 if rng.random() < 0.9 else 7, 3 if rng.random() < 0.3 else 7]
        calibration.observe(follow(ranked, text))
    assert 0.9 < calibration.ratio(1, NodeKind.FIRST) < 1.1
    assert 0.2 < calibration.ratio(2, NodeKind.FIRST) < 0.45
    assert calibration.ratio(1, NodeKind.OTHER) == 1.0  # nothing was offered, nothing is learnt
    first, second = path_probabilities(ranked, calibration)
    assert 0.8 < first < 1.0 and 0.2 < second < 0.4


def test_first_choices_siblings_and_lookups_are_judged_apart() -> None:
    block = DraftBlock(np.array([[2, 5]]), np.log([[0.5, 0.3]]))
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
    block = DraftBlock(np.array([rng.permutation(5)[:4] for _ in range(5)]), np.log(probs + 1e-9))
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


def test_plain_steps_are_timed_before_anything_is_compared() -> None:
    """The first ones of a process are slow, and do not count."""
    cost = CostModel()
    cost.observe_verify(1, 3.0)  # a pass right after a draft is no plain step
    for ms in (9.0, 9.0, 9.0, 9.0, 2.0, 2.0, 2.0):
        cost.observe_plain(ms)
        assert not cost.is_measured
    cost.observe_plain(2.0)
    assert cost.is_measured and cost.plain_ms == 2.0
    cost.observe_plain(2.5)
    assert 2.0 < cost.plain_ms < 2.2


def test_rounds_that_become_slow_say_nothing_about_plain_steps() -> None:
    """Where target and draft do not fit the cache together, only rounds with a draft are slow."""
    cost = CostModel()
    for _ in range(20):
        cost.observe_plain(2.0)
    for _ in range(50):
        cost.observe_draft(1.0)
        cost.observe_verify(4, 3.0)
    for _ in range(50):
        cost.observe_draft(1.3)
        cost.observe_verify(4, 3.9)
    assert cost.plain_ms == 2.0
    assert 3.8 < cost.verify_ms(4) * cost.slowness < 4.0


def test_rounds_that_give_less_than_expected_are_trusted_less() -> None:
    calibration = Calibration()
    assert calibration.trust == 1.0
    for _ in range(100):
        calibration.observe_rate(0.5, num_tokens=3, ms=10.0)  # five were expected
    assert abs(calibration.trust - 0.6) < 0.05
