"""The words of a pass, as kernels read them."""

from typing import Any

import numpy as np
import pytest

from draftree.kernels.cpu.pass_args import (
    COMMITTED,
    FIRST,
    IS_TREE,
    NUM_ROWS,
    NUM_TOKENS,
    PATH_LEN,
    PassArgs,
)

TREE = (5, 6, 7, 8, 9), (-1, 0, 0, 1, 3), (0, 1, 1, 2, 3)
WAYS = ([0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4])


@pytest.mark.parametrize("kind", [tuple, np.array])
def test_a_tree(kind: Any) -> None:
    step = PassArgs(8, 6)
    step.set_tree(*(kind(part) for part in TREE), 20)
    step.set_path(kind((0, 1, 3)))
    step.set_rows(kind((4, 2)))
    words = step.control[[NUM_TOKENS, COMMITTED, IS_TREE, PATH_LEN, NUM_ROWS]]
    assert words.tolist() == [5, 20, 1, 3, 2]
    found = (step.tokens[:5], step.parents[:5], step.depths[:5])
    assert tuple(tuple(part.tolist()) for part in found) == TREE
    assert step.positions[:5].tolist() == [20, 21, 21, 22, 23]
    assert tuple(step.ancestors[n, : len(way)].tolist() for n, way in enumerate(WAYS)) == WAYS
    assert step.path[:3].tolist() == [0, 1, 3] and step.rows[:2].tolist() == [4, 2]


@pytest.mark.parametrize("kind", [tuple, np.array])
def test_a_chain(kind: Any) -> None:
    step = PassArgs(8, 6)
    step.set_first(5)
    step.set_tree(*TREE, 20)
    step.set_chain(kind((3, 1, 2)), 7)
    assert step.control[[NUM_TOKENS, COMMITTED, IS_TREE, FIRST]].tolist() == [3, 7, 0, 5]
    assert step.tokens[:3].tolist() == [3, 1, 2] and step.positions[:3].tolist() == [7, 8, 9]
