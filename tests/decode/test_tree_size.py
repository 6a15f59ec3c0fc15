"""Sizes of a device's rounds: the best one is found, kept, and left when another one is better."""

import random
from collections import Counter

import pytest

from draftree.decode.tree_size import TreeSizes

SIZES = (8, 16, 24)
FLAT = {8: 10.0, 16: 10.2, 24: 10.4}  # milliseconds of a round
STEEP = {8: 10.0, 16: 25.0, 24: 40.0}


def write(
    sizes: TreeSizes, ms: dict[int, float], deepest: int, rounds: int, seed: int = 0
) -> Counter[int]:
    """Rounds of late, where up to `deepest` nodes in a row are right, any of 24 at random."""
    rng, chosen = random.Random(seed), Counter()
    for number in range(rounds):
        size = sizes.choose(SIZES)
        nodes = [0, *sorted(rng.sample(range(1, 24), rng.randint(0, deepest)))]
        path = [node for node in nodes if node < size]
        sizes.observe(SIZES, size, path, ms[size] * rng.uniform(0.98, 1.02))
        chosen[size] += number >= rounds // 2
    return chosen


def test_all_sizes_are_timed_first_the_largest_before_others() -> None:
    sizes, seen = TreeSizes(), []
    for _ in range(9):
        seen.append(sizes.choose(SIZES))
        sizes.observe(SIZES, seen[-1], [0], 10.0)
    assert seen == [24] * 3 + [16] * 3 + [8] * 3


@pytest.mark.parametrize(("ms", "best"), [(FLAT, 24), (STEEP, 8)])
def test_the_size_that_pays_is_used(ms: dict[int, float], best: int) -> None:
    chosen = write(TreeSizes(), ms, 12, 400)
    assert chosen[best] > 0.9 * chosen.total()


def test_a_change_is_followed_in_both_directions() -> None:
    """Where a draft is right more often, or passes cost more at depth."""
    sizes = TreeSizes()
    assert write(sizes, FLAT, 12, 200)[24] > 80
    assert write(sizes, STEEP, 12, 600, seed=1)[8] > 240
    assert write(sizes, FLAT, 12, 900, seed=2)[24] > 350


def test_without_a_clock_the_largest_is_used() -> None:
    sizes = TreeSizes()
    assert {sizes.choose(SIZES) for _ in range(100)} == {24}
