"""commit(path) equals running the path token by token, rollback equals never having begun; bit for
bit.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.core import DraftTree
from draftree.errors import CapacityError
from draftree.models.target import Target
from draftree.state.sequence import common_len
from tests.tiny import (
    ARCHITECTURES,
    MAX_CTX,
    open_target,
    run_chain,
    same_state,
    tiny_path,
    tiny_target,
)


@st.composite
def random_trees(draw: st.DrawFn, max_nodes: int = 24) -> tuple[list[int], list[int], list[int]]:
    """Tokens, parents with parents[i] < i, and a path from the root."""
    count = draw(st.integers(1, max_nodes))
    parents = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, count)]
    tokens = draw(st.lists(st.integers(0, 255), min_size=count, max_size=count))
    path = [0]
    while True:
        children = [i for i, parent in enumerate(parents) if parent == path[-1]]
        if not children or draw(st.integers(0, 4)) == 0:
            return tokens, parents, path
        path.append(draw(st.sampled_from(children)))


def _tree(tokens: list[int], parents: list[int]) -> DraftTree:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return DraftTree(tuple(tokens), tuple(parents), tuple(depths))


def _probe(target: Target) -> np.ndarray:
    """Logits of a token after the committed text; changes nothing."""
    target.state.begin(DraftTree.chain((3,)))
    logits = target.forward((0,)).logits.copy()
    target.state.rollback()
    return logits


@pytest.mark.parametrize("name", [*ARCHITECTURES, "qwen35-q4"])
@settings(max_examples=12, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 255), min_size=0, max_size=40),
    tree=random_trees(),
    again=random_trees(max_nodes=8),
)
def test_commit_and_rollback(
    name: str,
    prompt: list[int],
    tree: tuple[list[int], list[int], list[int]],
    again: tuple[list[int], list[int], list[int]],
) -> None:
    target = tiny_target(name, exact=name != "qwen35-q4")
    state = target.state
    state.reset()
    if prompt:
        run_chain(target, prompt)
    before, probe_before = state.snapshot(), _probe(target)

    for tokens, parents, path in (tree, again):
        nodes = _tree(tokens, parents)
        state.begin(nodes)
        target.forward(range(nodes.num_nodes))
        state.rollback()
        assert same_state(state.snapshot(), before)
        assert np.array_equal(_probe(target), probe_before)

        state.begin(nodes)
        tree_logits = target.forward(range(nodes.num_nodes)).logits.copy()
        state.commit(path)
        committed, probe_committed = state.snapshot(), _probe(target)

        state.restore(before)
        one_by_one = run_chain(target, [tokens[node] for node in path], chunk_len=1)
        assert np.array_equal(tree_logits[path], one_by_one)
        assert same_state(state.snapshot(), committed)
        assert np.array_equal(_probe(target), probe_committed)
        before, probe_before = state.snapshot(), _probe(target)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_chunks_and_threads_do_not_change_a_bit(name: str) -> None:
    tokens = np.random.default_rng(1).integers(0, 256, 50).tolist()
    target = tiny_target(name)
    target.state.reset()
    whole = run_chain(target, tokens, 64)
    snapshot = target.state.snapshot()
    for chunk_len in (1, 7, 16):
        target.state.reset()
        assert np.array_equal(run_chain(target, tokens, chunk_len), whole)
        assert same_state(target.state.snapshot(), snapshot)
    for num_threads in (1, 3):
        other = open_target(tiny_path(name), num_threads=num_threads)
        assert np.array_equal(run_chain(other, tokens, 64), whole)


@pytest.mark.parametrize("kv_dtype", [np.float16, np.int8])
@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_a_smaller_cache_keeps_the_contract(name: str, kv_dtype: type[np.number]) -> None:
    target = open_target(tiny_path(name), kv_dtype=kv_dtype)
    tokens = np.random.default_rng(2).integers(0, 256, 30).tolist()
    whole = run_chain(target, tokens, 64)
    target.state.reset()
    assert np.array_equal(run_chain(target, tokens, 1), whole)


def test_misuse_is_refused() -> None:
    target = tiny_target("llama")
    state = target.state
    state.reset()
    chain = DraftTree.chain((1, 2))
    with pytest.raises(AssertionError):
        state.commit((0,))
    state.begin(chain)
    with pytest.raises(AssertionError):
        state.begin(chain)
    with pytest.raises(AssertionError):
        state.commit((0, 0))
    with pytest.raises(AssertionError):
        state.commit((1,))
    state.rollback()
    with pytest.raises(CapacityError):
        state.begin(DraftTree.chain((1,) * (MAX_CTX + 1)), is_committed=True)
    assert state.committed == 0


@pytest.mark.parametrize(
    "other, expected",
    [
        *(([], 0), ([7], 0), ([1, 2, 3], 3), ([1, 2, 9, 4], 2)),
        *(([1, 2, 3, 4], 4), ([1, 2, 3, 4, 5], 4)),
    ],
)
def test_what_two_sequences_begin_with(other: list[int], expected: int) -> None:
    tokens = (1, 2, 3, 4)
    pairs = [(tokens, other), (list(tokens), tuple(other)), (np.array(tokens), np.array(other))]
    for a, b in (*pairs, *(pair[::-1] for pair in pairs)):
        assert common_len(a, b) == expected
