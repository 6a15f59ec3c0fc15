"""Draft trees: equal to the reference when seeding is off; seeded and looked-up nodes come
first.
"""

import json
from itertools import pairwise, product

import numpy as np
import pytest

from draftree.core import TokenSource
from draftree.decode.tree import build_tree
from draftree.drafts.drafter import Proposal
from tests.golden import golden

CASES = range(120)


def _block(log_probs: np.ndarray, tokens: np.ndarray, budget: int) -> tuple[Proposal, np.ndarray]:
    """The budget best columns of each position, best first, and which columns they are."""
    order = np.argsort(-log_probs, axis=1, kind="stable")[:, :budget]
    return (
        Proposal(
            np.take_along_axis(tokens, order, axis=1),
            np.take_along_axis(log_probs, order, axis=1),
        ),
        order,
    )


@pytest.mark.parametrize("case", CASES)
def test_reference_trees(case: int) -> None:
    arrays = np.load(golden("ddtree/ddtree.npz"))
    info = json.loads(golden("ddtree/ddtree_cases.json").read_text())[case]
    name, source = info["case"], info["input"]
    block, _ = _block(
        arrays[f"{source}.log_probs"],
        arrays[f"{source}.token_ids"].astype(np.int64),
        info["budget"],
    )
    tree = build_tree(7, block, info["budget"]).tree
    assert tree.tokens[0] == 7 and tree.num_nodes == info["nodes"] + 1
    assert list(tree.tokens[1:]) == arrays[f"{name}.tokens"].tolist()
    assert list(tree.parents) == arrays[f"{name}.parents"].tolist()
    assert list(tree.depths[1:]) == arrays[f"{name}.depths"].tolist()


@pytest.mark.parametrize("case", [1, 8, 40, 77, 119])
def test_reference_walk(case: int) -> None:
    """Following made-up target choices gives the reference's accepted nodes."""
    arrays = np.load(golden("ddtree/ddtree.npz"))
    info = json.loads(golden("ddtree/ddtree_cases.json").read_text())[case]
    name = info["case"]
    columns, parents = arrays[f"{name}.columns"], arrays[f"{name}.parents"]
    choices = arrays[f"{name}.posterior_columns"]
    children = {(parents[i + 1], columns[i]): i + 1 for i in range(len(columns))}
    path = [0]
    while (path[-1], choices[path[-1]]) in children:
        path.append(children[path[-1], choices[path[-1]]])
    assert path == arrays[f"{name}.accepted_nodes"].tolist()
    assert choices[path[-1]] == arrays[f"{name}.next_column"]


def _flat_block() -> Proposal:
    """First position very sure of one token, later ones nearly flat: best-first alone stays
    shallow.
    """
    log_probs = np.log(np.array([[0.9, 0.05, 0.05]] + [[0.34, 0.33, 0.33]] * 5))
    return Proposal(np.arange(18).reshape(6, 3), log_probs)


def test_one_candidate_a_position_is_a_chain() -> None:
    tree = build_tree(99, _flat_block(), 10, 1).tree
    assert tree.tokens == (99, 0, 3, 6, 9, 12, 15)
    assert tree.is_chain and set(tree.sources[1:]) == {TokenSource.CHAIN}


def test_the_whole_chain_can_be_seeded() -> None:
    tree = build_tree(99, _flat_block(), 10, seed_chain=True).tree
    assert tree.tokens[:7] == (99, 0, 3, 6, 9, 12, 15)
    assert tree.depths[:7] == tuple(range(7))
    assert set(tree.sources[1:7]) == {TokenSource.CHAIN}
    assert tree.num_nodes == 11 and TokenSource.SIBLING in tree.sources[7:]
    assert len({(p, t) for p, t in zip(tree.parents, tree.tokens, strict=True)}) == 11


def test_a_smaller_tree_is_the_beginning_of_a_larger_one() -> None:
    largest = build_tree(99, _flat_block(), 30)
    assert max(largest.tree.depths) < 6, "the first choices are not worth going to the end"
    assert {TokenSource.CHAIN, TokenSource.SIBLING} == set(largest.tree.sources[1:])
    for budget in range(3, 30):
        assert build_tree(99, _flat_block(), budget) == largest.select(range(budget + 1))


def test_budget_is_never_exceeded_and_siblings_differ() -> None:
    for budget in range(30):
        tree = build_tree(1, _flat_block(), budget).tree
        assert tree.num_nodes <= budget + 1
        edges = list(zip(tree.parents, tree.tokens, strict=True))
        assert len(set(edges)) == len(edges)
        assert all(parent < node for node, parent in enumerate(tree.parents))


def test_looked_up_text_shares_nodes_with_the_chain() -> None:
    tree = build_tree(99, _flat_block(), 12, lookup=(0, 3, 77)).tree
    assert tree.tokens[:4] == (99, 0, 3, 77)
    assert tree.sources[1:4] == (TokenSource.NGRAM,) * 3
    chain_node = tree.tokens.index(6)
    assert tree.parents[chain_node] == 2  # the chain goes on from the looked-up nodes it shares


def _edge_block(seed: int) -> Proposal:
    """Four positions of three candidates, each row of edges of its own."""
    rng = np.random.default_rng(seed)
    first = np.sort(rng.dirichlet(np.ones(3)))[::-1]
    log_probs = np.log(np.stack([first, *[np.full(3, 1 / 3)] * 3]))
    edges = np.log(rng.dirichlet(np.full(3, 0.5), (3, 3)) + 1e-9)
    return Proposal(np.arange(12).reshape(4, 3), log_probs, edges)


def _path_log_prob(block: Proposal, path: tuple[int, ...]) -> float:
    assert block.edges is not None
    total = float(block.log_probs[0, path[0]])
    return total + sum(float(block.edges[i, path[i], path[i + 1]]) for i in range(len(path) - 1))


@pytest.mark.parametrize("seed", range(8))
def test_edges_decide_what_follows_what(seed: int) -> None:
    """The most probable paths of all, by chances that depend on the parent."""
    block = _edge_block(seed)
    paths = [path for n in range(1, 5) for path in product(range(3), repeat=n)]
    chances = {path: _path_log_prob(block, path) for path in paths}
    best = sorted(paths, key=lambda path: -chances[path])
    for budget in (1, 5, 20):
        ranked = build_tree(99, block, budget)
        tree, found = ranked.tree, {}
        for node in range(1, tree.num_nodes):
            before = found.get(tree.parents[node], ())
            found[node] = (*before, tree.tokens[node] - 3 * len(before))
        assert sorted(found.values()) == sorted(best[:budget])
        expected = [chances[found[node]] for node in range(1, tree.num_nodes)]
        np.testing.assert_allclose(ranked.path_log_probs, expected, atol=1e-12)
        assert all(a >= b for a, b in pairwise(ranked.path_log_probs))


def test_the_chain_follows_the_edges() -> None:
    block = _edge_block(3)
    assert block.edges is not None
    ranks = [0]
    for edges in block.edges:
        ranks.append(int(edges[ranks[-1]].argmax()))
    tree = build_tree(99, block, 4, 1).tree
    assert tree.tokens[1:] == tuple(3 * i + rank for i, rank in enumerate(ranks))
    assert tree.is_chain and set(tree.sources[1:]) == {TokenSource.CHAIN}
    short = block.first(2)
    assert build_tree(99, short, 20).tree.num_nodes == 1 + 3 + 9
    assert len(short.tokens) == 2 and short.edges is not None and len(short.edges) == 1


def test_selection_keeps_order_and_parents() -> None:
    ranked = build_tree(99, _flat_block(), 10)
    chosen = ranked.select((0, 1, 2, 7))
    assert chosen.tree.tokens == tuple(ranked.tree.tokens[i] for i in (0, 1, 2, 7))
    assert chosen.tree.parents[:3] == (-1, 0, 1)
    assert chosen.path_log_probs == tuple(ranked.path_log_probs[i] for i in (0, 1, 6))
