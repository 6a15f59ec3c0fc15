"""The number of nodes follows measured cost."""

from draftree.decode.cost import CostModel, best_budget


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


def test_plain_steps_are_timed_before_anything_is_compared() -> None:
    """The first ones of a process are slow, and do not count."""
    cost = CostModel()
    cost.observe_verify(1, 3.0)  # a pass right after a draft is no plain step
    for ms in (9.0, 9.0, 9.0, 9.0, 2.0, 2.0, 2.0):
        cost.observe_plain(ms, 10)
        assert not cost.is_measured
    cost.observe_plain(2.0, 10)
    assert cost.is_measured and cost.plain_ms == 2.0
    cost.observe_plain(2.5, 10)
    assert 2.0 < cost.plain_ms < 2.2


def test_rounds_that_become_slow_say_nothing_about_plain_steps() -> None:
    """Where target and draft do not fit the cache together, only rounds with a draft are slow."""
    cost = CostModel()
    for _ in range(20):
        cost.observe_plain(2.0, 10)
    for _ in range(50):
        cost.observe_draft(1.0)
        cost.observe_verify(4, 3.0)
    for _ in range(50):
        cost.observe_draft(1.3)
        cost.observe_verify(4, 3.9)
    assert cost.plain_ms == 2.0
    assert 3.8 < cost.verify_ms(4) * cost.slowness < 4.0


def test_plain_steps_far_away_in_the_context_are_another_matter() -> None:
    cost = CostModel(num_unsteady=0, num_plain=1)
    cost.observe_plain(5.0, 1000)
    assert cost.is_measured
    assert all(cost.is_measured_near(position) for position in (0, 1000, 3000, 4000))
    assert not cost.is_measured_near(5000)
    cost.observe_plain(9.0, 60_000)
    assert cost.is_measured_near(40_000) and not cost.is_measured_near(1000)
