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


MEASURED = {8: 1.37, 16: 1.46, 24: 1.61}  # milliseconds of SmolLM2's rounds on an H200


def draw_paths(rng: random.Random, count: int) -> list[list[int]]:
    """Of trees of 23 nodes, of which the first 15 are a chain: easy stretches of text, and hard
    ones.
    """
    is_easy, paths = False, []
    for _ in range(count):
        is_easy ^= rng.random() < 0.08
        depth = 0
        while depth < 15 and rng.random() > (0.09 if is_easy else 0.42):
            depth += 1
        beside = [rng.randrange(16, 24)] if depth < 15 and rng.random() < 0.35 else []
        paths.append([*range(depth + 1), *beside])
    return paths


def rate(paths: list[list[int]], size: int) -> float:
    """Tokens a millisecond with rounds of one size."""
    return sum(node < size for path in paths for node in path) / (len(paths) * MEASURED[size])


def automatic_rate(paths: list[list[int]], sizes: TreeSizes, rng: random.Random) -> float:
    num_tokens, total_ms = 0, 0.0
    for path in paths:
        size = sizes.choose(SIZES)
        kept, ms = [node for node in path if node < size], MEASURED[size] * rng.uniform(0.98, 1.02)
        sizes.observe(SIZES, size, kept, ms)
        num_tokens, total_ms = num_tokens + len(kept), total_ms + ms
    return num_tokens / total_ms


def test_hard_stretches_of_a_text_do_not_lead_astray() -> None:
    """Sizes are chosen by what a text gives for long; the best one is hardly left."""
    shares = []
    for seed in range(20):
        rng, sizes = random.Random(seed), TreeSizes()
        paths = draw_paths(rng, 600)
        automatic_rate(paths[:100], sizes, rng)
        best = max(rate(paths, size) for size in SIZES)
        shares.append(automatic_rate(paths, sizes, rng) / best)
    assert sum(shares) / len(shares) > 0.98 and min(shares) > 0.93


def test_without_a_clock_the_largest_is_used() -> None:
    sizes = TreeSizes()
    assert {sizes.choose(SIZES) for _ in range(100)} == {24}
