"""Convolution and delta rule on the GPU: against references, and bit for bit against themselves."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from draftree.kernels.cuda.compile import Gpu
from draftree.kernels.cuda.conv import Convolution
from draftree.kernels.cuda.gated_delta import (
    MOST_ROWS,
    DeltaArena,
    block_cols,
    gated_delta,
    num_slots,
    num_threads,
    shared_bytes,
)
from tests.kernels import test_gated_delta as cpu
from tests.kernels.delta_layers import MAX_NODES, Layers, assert_same, relative_error
from tests.kernels.emulator import emulated_gpu
from tests.kernels.passes import Tree, make_tree


@pytest.mark.parametrize("shape", [(1, 1, 16), (2, 6, 32), (1, 2, 64), (1, 2, 128)])
def test_a_chain_equals_reference_and_cpu(any_gpu, shape):
    rng = np.random.default_rng(0)
    layers, other = Layers(any_gpu, *shape), cpu.Layer(*shape)
    other.ssm_a[:], other.dt_bias[:] = layers.decay, layers.bias
    inputs, (before, window) = layers.random_inputs(rng, 11), layers.random_start(rng)
    layers.restore(before, window)
    other.state.state[:] = before
    convolved, last = layers.convolved(inputs, window)
    expected, after = layers.reference(convolved, before)
    out = layers.chain(inputs)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_allclose(layers.snapshot(), after, atol=1e-5)
    np.testing.assert_allclose(out, other.chain(convolved), atol=1e-5)
    np.testing.assert_allclose(layers.snapshot(), other.state.state, atol=1e-5)
    np.testing.assert_array_equal(layers.window(), last)


@pytest.mark.parametrize("taps", [2, 4, 5])
def test_chains_of_many_lengths_equal_the_reference(any_gpu, taps):
    """One after the other, so that both windows are read and written; the long one is prefill."""
    rng = np.random.default_rng(taps)
    layers = Layers(any_gpu, 2, 4, 16, taps=taps)
    state, window = layers.random_start(rng)
    layers.restore(state, window)
    for count in (1, 2, 3, 1, 8, 24, 64, 70, 1, 1, 130, 2, 5):
        inputs = layers.random_inputs(rng, count)
        convolved, window = layers.convolved(inputs, window)
        expected, after = layers.reference(convolved, layers.snapshot())
        run, error = (layers.chain, 2e-6) if count <= MOST_ROWS else (layers.long_chain, 1e-3)
        assert relative_error(run(inputs), expected) < error
        assert relative_error(layers.snapshot(), after) < error
        np.testing.assert_array_equal(layers.window(), window)


def test_extreme_gates_and_empty_rows(any_gpu):
    layers = Layers(any_gpu, 1, 2, 16)
    inputs = layers.random_inputs(np.random.default_rng(1), 6)
    inputs[0][:2] = 0.0  # neither query nor key has a direction
    inputs[1][:] = np.array([-200.0, 200.0, 0.0, 80.0, -80.0, 3.0])[:, None]
    inputs[2][:] = np.array([200.0, -200.0, 100.0, -100.0, 0.0, 1.0])[:, None]
    convolved, _ = layers.convolved(inputs, layers.window())
    expected, after = layers.reference(convolved, np.zeros((2, 16, 16), np.float32))
    np.testing.assert_allclose(layers.chain(inputs), expected, atol=2e-6)
    np.testing.assert_allclose(layers.snapshot(), after, atol=2e-6)


@pytest.mark.parametrize("shape", [(1, 2, 16), (1, 1, 128)])
def test_a_chunk_equals_token_by_token(any_gpu, shape):
    chunk, plain = Layers(any_gpu, *shape), Layers(any_gpu, *shape)
    inputs = chunk.random_inputs(np.random.default_rng(2), 9)
    np.testing.assert_array_equal(chunk.chain(inputs, num_rows=16), plain.one_by_one(inputs))
    assert_same(chunk, plain)


def full_binary(num_nodes: int) -> Tree:
    return make_tree([(node - 1) // 2 for node in range(1, num_nodes)], num_nodes - 1)


def caterpillar(num_nodes: int) -> Tree:
    """A chain, with a leaf at every node of it."""
    return make_tree([max(0, node - 2) for node in range(1, num_nodes)], num_nodes - 2)


def random_tree(seed: int, num_nodes: int) -> Tree:
    rng = np.random.default_rng(seed)
    parents = [int(rng.integers(max(0, node - 6), node)) for node in range(1, num_nodes)]
    return make_tree(parents, int(rng.integers(num_nodes)))


FORKED = [0, 0, 1, 1, 2, 2, 3, 4, 5, 6]  # every node below the root has a child of its own
TREES = {
    "root": make_tree([], 0),
    "chain": make_tree(list(range(11)), 7),
    "leaves": make_tree([0] * 7, 3),
    "forked": make_tree(FORKED, 10),
    "caterpillar": caterpillar(15),
    "random": random_tree(0, 20),
    "broom": make_tree([0, 1, 2, 3, 3, 3, 6, 7, 0, 9], 8),
}


def assert_tree_equals_chains(gpu: Gpu, tree: Tree, shape: tuple[int, int, int]) -> None:
    """Every node equals its path alone, and the commit leaves what the path would have left."""
    rng = np.random.default_rng(len(tree))
    layers = Layers(gpu, *shape, max_nodes=max(MAX_NODES, len(tree)))
    inputs, start = layers.random_inputs(rng, len(tree)), layers.random_start(rng)
    layers.restore(*start)
    out = layers.tree(tree, inputs)
    np.testing.assert_array_equal(layers.snapshot(), start[0])  # a rollback is doing nothing
    np.testing.assert_array_equal(layers.window(), start[1])
    layers.commit(tree)
    ends = set(range(len(tree))) - set(tree.parents) | {tree.path[-1]}
    for node in ends:
        plain, branch = Layers(gpu, *shape), tree.branch(node)
        plain.restore(*start)
        np.testing.assert_array_equal(out[branch], plain.chain([a[branch] for a in inputs]))
        if node == tree.path[-1]:
            assert_same(layers, plain)


@pytest.mark.parametrize("name", TREES)
def test_tree_and_commit_equal_chains(any_gpu, name):
    assert_tree_equals_chains(any_gpu, TREES[name], (1, 2, 16))


def test_tree_of_large_heads(any_gpu):
    assert_tree_equals_chains(any_gpu, TREES["forked"], (1, 2, 128))


@pytest.mark.parametrize("tree", [full_binary(64), random_tree(1, 64)], ids=["binary", "random"])
def test_the_largest_trees(any_gpu, tree):
    assert_tree_equals_chains(any_gpu, tree, (1, 1, 16))


def test_slots_suffice_and_are_needed():
    """The worst tree of a size: a root above two of the worst trees of half the size."""

    def worst(num_slots: int) -> int:
        return 2 if num_slots == 0 else 1 + 2 * worst(num_slots - 1)

    assert [num_slots(n) for n in (1, 4, 5, 10, 11, 22, 23, 46, 47, 64)] == [
        *(0, 0, 1, 1, 2, 2, 3, 3, 4, 4),
    ]
    for slots in range(1, 5):
        assert num_slots(worst(slots)) == slots > num_slots(worst(slots) - 1)


def worst_tree(num_slots: int) -> list[int]:
    """Parents of the tree that needs so many slots with the fewest nodes."""
    if num_slots == 0:
        return [-1, 0]
    half = worst_tree(num_slots - 1)
    first, second = ([0 if p < 0 else p + shift for p in half] for shift in (1, 1 + len(half)))
    return [-1, *first, *second]


@pytest.mark.parametrize("slots", [2, 4])
def test_the_trees_that_need_most_slots(any_gpu, slots):
    parents = worst_tree(slots)
    assert num_slots(len(parents)) == slots
    assert_tree_equals_chains(any_gpu, make_tree(parents[1:], len(parents) - 1), (1, 1, 16))


def test_a_result_is_batch_invariant(any_gpu):
    """The same chain of nodes in another place of another tree, launched for more rows."""
    layers = Layers(any_gpu, 1, 2, 32)
    rng = np.random.default_rng(4)
    inputs, mixed = layers.random_inputs(rng, 4), layers.random_inputs(rng, 11)
    alone = layers.tree(make_tree([0, 1, 2], 3), inputs)
    crowded, path = make_tree([0, 0, 1, 2, 2, 5, 3, 6, 6, 1], 9), [0, 2, 5, 6]
    for to, values in zip(mixed, inputs, strict=True):
        to[path] = values
    out = layers.tree(crowded, mixed, num_rows=24)
    np.testing.assert_array_equal(out[path], alone)


def test_commit_advances_all_layers(any_gpu):
    shape, tree = (2, 4, 16), random_tree(3, 18)
    layers = Layers(any_gpu, *shape, num_layers=3)
    rng = np.random.default_rng(5)
    inputs = [layers.random_inputs(rng, len(tree)) for _ in layers.states]
    for layer, values in enumerate(inputs):
        layers.tree(tree, values, layer=layer)
    layers.commit(tree)
    for layer, values in enumerate(inputs):
        plain = Layers(any_gpu, *shape, num_layers=3)
        for node in tree.path:
            plain.chain([a[node : node + 1] for a in values], layer=layer)
        assert_same(layers, plain, layer, layer)


PASSES = [
    *(1, make_tree(list(range(19)), 18), make_tree([0, 0, 2, 3], 4), 1, 2, random_tree(4, 24), 3),
    *(8, make_tree([0], 0), make_tree([], 0), 70, random_tree(5, 24), 1, 1, 1, 65, 2, 24),
]


def test_many_passes_one_after_the_other(any_gpu):
    """What one left must not reach beyond the next; long paths are committed in parts."""
    layers, plain = Layers(any_gpu, 1, 2, 16), Layers(any_gpu, 1, 2, 16)
    rng = np.random.default_rng(6)
    for count in PASSES:
        is_tree = isinstance(count, Tree)
        path = list(count.path) if is_tree else list(range(count))
        inputs = layers.random_inputs(rng, len(count) if is_tree else count)
        kept = [a[path] for a in inputs]
        if is_tree:
            out = layers.tree(count, inputs)
            layers.commit(count)
        else:
            out = (layers.chain if count <= MOST_ROWS else layers.long_chain)(inputs)
        run = plain.one_by_one if len(path) <= MOST_ROWS else plain.long_chain
        np.testing.assert_array_equal(run(kept), out[path])
        assert_same(layers, plain)


def test_a_pass_that_is_repeated_reads_the_same(any_gpu):
    """Blocks of a committed pass must not see what others of them write: nor does a second pass."""
    layers, rng = Layers(any_gpu, 1, 2, 16), np.random.default_rng(12)
    for count in (2, 1):
        layers.chain(layers.random_inputs(rng, 3))
        inputs, state = layers.random_inputs(rng, count), layers.snapshot()
        committed = layers.committed
        first, window = layers.chain(inputs), layers.window()
        layers.states[0].restore((torch.from_numpy(state),))
        layers.committed = committed
        np.testing.assert_array_equal(layers.chain(inputs), first)
        np.testing.assert_array_equal(layers.window(), window)


def test_nothing_live_and_empty_paths_change_nothing(any_gpu):
    layers, tree = Layers(any_gpu, 1, 2, 16), TREES["forked"]
    rng = np.random.default_rng(7)
    layers.chain(layers.random_inputs(rng, 3))
    before, window = layers.snapshot(), layers.window()
    layers.tree(tree, layers.random_inputs(rng, len(tree)))
    layers.step.set_path(np.array([], np.int64))
    layers.commit(Tree((), ()))
    np.testing.assert_array_equal(layers.snapshot(), before)
    np.testing.assert_array_equal(layers.window(), window)
    conv_state = layers.convs[0]
    parts = *layers.states[0].parts, conv_state.windows, conv_state.second_at, conv_state.stash
    copies = [part.clone() for part in parts]
    layers.step.set_path(np.array([0, 1]))
    layers.step.control[0] = 0  # a path is left over, but no rows
    for is_tree in (0, 1):
        layers.step.control[2] = is_tree
        layers.run(gated_delta, layers.random_inputs(rng, 0), 8)
        layers.commit(tree)
    for part, same in zip(parts, copies, strict=True):
        assert torch.equal(part, same)


@pytest.mark.parametrize("lengths", [(3, 5, 1), (1, 1, 2), (1, 66, 3), (70, 1, 4)])
def test_snapshot_and_restore(any_gpu, lengths):
    layers = Layers(any_gpu, 1, 2, 16)
    rng = np.random.default_rng(8)
    for count in lengths[:2]:
        run = layers.chain if count <= MOST_ROWS else layers.long_chain
        run(layers.random_inputs(rng, count))
    at, start = layers.committed, (layers.snapshot(), layers.window())
    last = [layers.random_inputs(rng, lengths[2]), layers.random_inputs(rng, 1)]
    expected = [layers.chain(inputs) for inputs in last]
    after = layers.snapshot(), layers.window()
    layers.chain(layers.random_inputs(rng, 3))
    layers.restore(*start)
    layers.committed = at
    for inputs, out in zip(last, expected, strict=True):
        np.testing.assert_array_equal(layers.chain(inputs), out)
    np.testing.assert_equal((layers.snapshot(), layers.window()), after)
    layers.states[0].restore(())
    layers.convs[0].restore(())
    assert not layers.snapshot().any()
    assert not layers.convs[0].snapshot(0)[0].any()


def test_what_does_not_fit_is_refused(any_gpu):
    layers = Layers(any_gpu, 1, 2, 16)
    inputs = layers.random_inputs(np.random.default_rng(0), 65)
    with pytest.raises(ValueError, match="65 rows"):
        layers.run(gated_delta, inputs, 65)
    with pytest.raises(ValueError, match="one size"):
        layers.arena.new(1, 4, 16)
    with pytest.raises(ValueError, match="do not fit"):
        layers.arena.new(1, 2, 48)
    with pytest.raises(ValueError, match="65 nodes"):
        DeltaArena(65, any_gpu)
    with pytest.raises(ValueError, match="different numbers"):
        x, *rows = (
            torch.zeros((n, width)) for n, width in zip((2, 2, 1), layers.widths, strict=True)
        )
        gates = torch.zeros(2), torch.zeros(2)
        qkv = Convolution(x, layers.weights[0], layers.convs[0])
        out = torch.zeros(2, 32)
        gated_delta(qkv, *rows, *gates, layers.states[0], layers.step, out, any_gpu)
    with pytest.raises(ValueError, match="does not fit the state"):
        Convolution(x, layers.weights[0][:, 1:], layers.convs[0]).check()


def test_chips_with_less_room_give_the_same_bits():
    """Fewer columns a block."""
    large = emulated_gpu()
    small = replace(large, shared_per_block=34_000)
    tree, results = TREES["forked"], []
    assert [block_cols(len(tree), 128, 4, chip) for chip in (large, small)] == [64, 8]
    for chip in (large, small):
        layers, rng = Layers(chip, 1, 1, 128), np.random.default_rng(11)
        out = layers.tree(tree, layers.random_inputs(rng, len(tree)))
        layers.commit(tree)
        results.append((out, layers.snapshot(), layers.window()))
    np.testing.assert_equal(*results)


@pytest.mark.parametrize("shared", [101376, 166912, 232448])
def test_blocks_fit_every_chip(shared):
    chip = Gpu(0, 90, 100, shared + 1024, shared)
    static = 2048  # what the kernels declare themselves
    for dim in (16, 32, 64, 128):
        for rows in (1, 8, 24, 48, MOST_ROWS):
            cols = block_cols(rows, dim, 4, chip)
            assert shared_bytes(rows, dim, cols, 4) + static <= shared
            assert num_threads(dim, cols) % 32 == 0
    assert block_cols(MOST_ROWS, 128, 4, chip) == {101376: 8, 166912: 32, 232448: 64}[shared]
