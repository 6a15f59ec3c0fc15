"""The gated delta rule on the GPU: against the reference, and bit for bit against itself."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from draftree.kernels.cuda.compile import Gpu
from draftree.kernels.cuda.gated_delta import (
    MOST_ROWS,
    DeltaArena,
    block_cols,
    delta_commit,
    gated_delta,
    num_slots,
    num_threads,
    shared_bytes,
)
from draftree.kernels.cuda.gated_delta_prefill import (
    chunk_shared_bytes,
    gated_delta_prefill,
    plan_pass,
)
from draftree.kernels.cuda.step import CudaStep
from draftree.kernels.reference.gated_delta import gated_delta_reference
from tests.kernels import test_gated_delta as cpu
from tests.kernels.emulator import emulated_gpu
from tests.kernels.passes import Tree, make_tree, randn

MAX_NODES = 24


class Layers:
    """Some delta-rule layers of one size, and a step to run them with."""

    def __init__(self, gpu, key_heads, value_heads, dim, *, num_layers=1, max_nodes=MAX_NODES):
        rng = np.random.default_rng(key_heads + value_heads + dim)
        self.gpu, self.step = gpu, CudaStep(512, max_nodes, gpu)
        self.arena = DeltaArena(max_nodes, gpu)
        self.states = [self.arena.new(key_heads, value_heads, dim) for _ in range(num_layers)]
        self.widths = ((2 * key_heads + value_heads) * dim, value_heads, value_heads)
        self.decay, self.bias = -np.exp(randn(rng, value_heads)), randn(rng, value_heads)

    def random_inputs(self, rng, count):
        return [randn(rng, count, width) for width in self.widths]

    def chain(self, inputs, *, num_rows=None, layer=0):
        self.step.set_chain(np.zeros(len(inputs[0])), 0)
        return self.run(gated_delta, inputs, num_rows or len(inputs[0]), layer)

    def one_by_one(self, inputs, *, layer=0):
        rows = [[a[i : i + 1] for a in inputs] for i in range(len(inputs[0]))]
        return np.concatenate([self.chain(row, layer=layer) for row in rows])

    def tree(self, tree, inputs, *, num_rows=None, layer=0):
        tree.load(self.step, 0)
        return self.run(gated_delta, inputs, num_rows or len(tree), layer)

    def commit(self):
        delta_commit(self.arena, self.step, self.gpu)

    def run(self, operation, inputs, num_rows, layer=0):
        """Rows that are not live are NaN; all arrays are columns of wider ones."""
        count, state = len(inputs[0]), self.states[layer]
        wide = [self._wide(num_rows, a.shape[1], 8) for a in inputs]
        for to, values in zip(wide, inputs, strict=True):
            to[:count] = torch.from_numpy(values)
        out = self._wide(num_rows, state.value_heads * state.head_dim, 4)
        weights = [torch.from_numpy(a).to(self.gpu.place) for a in (self.decay, self.bias)]
        operation(*wide, *weights, state, self.step, out, self.gpu)
        assert out[count:].isnan().all()
        return out[:count].cpu().numpy()

    def _wide(self, num_rows, width, more):
        padded = -(-width // 4) * 4 + more
        return torch.full((num_rows, padded), torch.nan, device=self.gpu.place)[:, 4 : 4 + width]

    def snapshot(self, layer=0):
        return self.states[layer].snapshot(0)[0]

    def reference(self, inputs, before):
        tensors = [torch.from_numpy(a).double() for a in (*inputs, self.decay, self.bias)]
        out, after = gated_delta_reference(
            *tensors, torch.from_numpy(before).double(), self.states[0].key_heads
        )
        return out.flatten(1).numpy(), after.numpy()


def relative_error(value, expected):
    return np.linalg.norm(value - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("shape", [(1, 1, 16), (2, 6, 32), (1, 2, 64), (1, 2, 128)])
def test_a_chain_equals_reference_and_cpu(any_gpu, shape):
    rng = np.random.default_rng(0)
    layers, other = Layers(any_gpu, *shape), cpu.Layer(*shape)
    other.ssm_a[:], other.dt_bias[:] = layers.decay, layers.bias
    inputs = layers.random_inputs(rng, 11)
    before = randn(rng, shape[1], shape[2], shape[2])
    layers.states[0].restore((before,))
    other.state.state[:] = before
    expected, after = layers.reference(inputs, before)
    out = layers.chain(inputs)
    np.testing.assert_allclose(out, expected, atol=5e-6)
    np.testing.assert_allclose(layers.snapshot(), after, atol=1e-5)
    np.testing.assert_allclose(out, other.chain(inputs), atol=5e-6)
    np.testing.assert_allclose(layers.snapshot(), other.state.state, atol=1e-5)


def test_extreme_gates_and_empty_rows(any_gpu):
    layers = Layers(any_gpu, 1, 2, 16)
    inputs = layers.random_inputs(np.random.default_rng(1), 6)
    inputs[0][2] = 0.0  # neither query nor key has a direction
    inputs[1][:] = np.array([-200.0, 200.0, 0.0, 80.0, -80.0, 3.0])[:, None]
    inputs[2][:] = np.array([200.0, -200.0, 100.0, -100.0, 0.0, 1.0])[:, None]
    before = np.zeros((2, 16, 16), np.float32)
    expected, after = layers.reference(inputs, before)
    np.testing.assert_allclose(layers.chain(inputs), expected, atol=1e-6)
    np.testing.assert_allclose(layers.snapshot(), after, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 2, 16), (1, 1, 128)])
def test_a_chunk_equals_token_by_token(any_gpu, shape):
    chunk, plain = Layers(any_gpu, *shape), Layers(any_gpu, *shape)
    inputs = chunk.random_inputs(np.random.default_rng(2), 9)
    np.testing.assert_array_equal(chunk.chain(inputs, num_rows=16), plain.one_by_one(inputs))
    np.testing.assert_array_equal(chunk.snapshot(), plain.snapshot())


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
    inputs = layers.random_inputs(rng, len(tree))
    before = randn(rng, shape[1], shape[2], shape[2])
    layers.states[0].restore((before,))
    out = layers.tree(tree, inputs)
    np.testing.assert_array_equal(layers.snapshot(), before)  # a rollback is doing nothing
    layers.commit()
    ends = set(range(len(tree))) - set(tree.parents) | {tree.path[-1]}
    for node in ends:
        plain, branch = Layers(gpu, *shape), tree.branch(node)
        plain.states[0].restore((before,))
        np.testing.assert_array_equal(out[branch], plain.chain([a[branch] for a in inputs]))
        if node == tree.path[-1]:
            np.testing.assert_array_equal(layers.snapshot(), plain.snapshot())


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


def test_a_result_does_not_depend_on_company(any_gpu):
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
    layers.commit()
    for layer, values in enumerate(inputs):
        plain = Layers(any_gpu, *shape)
        plain.one_by_one([a[list(tree.path)] for a in values])
        np.testing.assert_array_equal(layers.snapshot(layer), plain.snapshot())


def test_two_trees_one_after_the_other(any_gpu):
    """What the first tree kept must not reach the commit of the second; long paths go in parts."""
    layers, plain = Layers(any_gpu, 1, 2, 16), Layers(any_gpu, 1, 2, 16)
    rng = np.random.default_rng(6)
    for tree in (make_tree(list(range(19)), 18), make_tree([0, 0, 2, 3], 4)):
        inputs = layers.random_inputs(rng, len(tree))
        layers.tree(tree, inputs)
        layers.commit()
        plain.one_by_one([a[list(tree.path)] for a in inputs])
    np.testing.assert_array_equal(layers.snapshot(), plain.snapshot())


def test_nothing_live_and_empty_paths_change_nothing(any_gpu):
    layers = Layers(any_gpu, 1, 2, 16)
    rng = np.random.default_rng(7)
    layers.chain(layers.random_inputs(rng, 3))
    before = layers.snapshot()
    layers.tree(TREES["forked"], layers.random_inputs(rng, len(TREES["forked"])))
    layers.step.set_path(np.array([], np.int64))
    layers.commit()
    np.testing.assert_array_equal(layers.snapshot(), before)
    parts = [part.clone() for part in layers.states[0].parts]
    layers.step.set_path(np.array([0, 1]))
    layers.step.control[0] = 0  # a path is left over, but no rows
    layers.commit()
    for is_tree in (0, 1):
        layers.step.control[2] = is_tree
        layers.run(gated_delta, layers.random_inputs(rng, 0), 8)
    for part, same in zip(layers.states[0].parts, parts, strict=True):
        assert torch.equal(part, same)


def test_snapshot_and_restore(any_gpu):
    layers = Layers(any_gpu, 1, 2, 16)
    rng = np.random.default_rng(8)
    first, second = layers.random_inputs(rng, 3), layers.random_inputs(rng, 3)
    layers.chain(first)
    (copy,) = layers.states[0].snapshot(3)
    out, after = layers.chain(second), layers.snapshot()
    layers.states[0].restore((copy,))
    np.testing.assert_array_equal(layers.chain(second), out)
    np.testing.assert_array_equal(layers.snapshot(), after)
    layers.states[0].restore(())
    assert not layers.snapshot().any()


PREFILLS = [
    # key heads, value heads, head_dim, rows, factor of the decays
    (1, 2, 16, 65, 1.0),
    (2, 4, 32, 200, 0.01),
    (1, 1, 64, 128, 1.0),
    (1, 1, 64, 200, 20.0),
    (1, 1, 128, 65, 0.02),
]


@pytest.mark.parametrize("case", PREFILLS, ids=str)
def test_prefill_equals_reference(any_gpu, case):
    *shape, count, rate = case
    rng = np.random.default_rng(count)
    layers = Layers(any_gpu, *shape)
    layers.decay *= rate
    inputs, before = layers.random_inputs(rng, count), randn(rng, shape[1], shape[2], shape[2])
    inputs[0][3] = 0.0
    layers.states[0].restore((before,))
    expected, after = layers.reference(inputs, before)
    out = layers.run(gated_delta_prefill, inputs, count)
    assert relative_error(out, expected) < 1e-3
    assert relative_error(layers.snapshot(), after) < 1e-3
    first = layers.snapshot()
    layers.states[0].restore((before,))
    np.testing.assert_array_equal(layers.run(gated_delta_prefill, inputs, count), out)
    np.testing.assert_array_equal(layers.snapshot(), first)


def test_prefill_of_similar_keys_and_full_gates(any_gpu):
    """Corrections that undo each other: the hardest case for the solved form."""
    layers = Layers(any_gpu, 1, 1, 32)
    rng = np.random.default_rng(9)
    inputs, before = layers.random_inputs(rng, 130), randn(rng, 1, 32, 32) * 1e4
    inputs[0][:, 32:64] = 1.0 + 0.3 * inputs[0][:, 32:64]
    inputs[0][:, 64:] *= 1e5  # values beyond what 16-bit floats can hold
    inputs[1][:], inputs[2][:] = -20.0, 8.0
    layers.states[0].restore((before,))
    expected, after = layers.reference(inputs, before)
    out = layers.run(gated_delta_prefill, inputs, 130)
    assert relative_error(out, expected) < 2e-3
    assert relative_error(layers.snapshot(), after) < 2e-3


def test_prefill_goes_slab_by_slab(any_gpu, monkeypatch):
    monkeypatch.setattr("draftree.kernels.cuda.gated_delta_prefill._SLAB_ROWS", 64)
    layers, whole = Layers(any_gpu, 1, 1, 16), Layers(any_gpu, 1, 1, 16)
    inputs = layers.random_inputs(np.random.default_rng(10), 130)
    out = layers.run(gated_delta_prefill, inputs, 130)
    monkeypatch.undo()
    np.testing.assert_array_equal(out, whole.run(gated_delta_prefill, inputs, 130))
    np.testing.assert_array_equal(layers.snapshot(), whole.snapshot())


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
        operands = [
            torch.zeros((n, width)) for n, width in zip((2, 2, 1), layers.widths, strict=True)
        ]
        gates = torch.zeros(2), torch.zeros(2)
        gated_delta(*operands, *gates, layers.states[0], layers.step, torch.zeros(2, 32), any_gpu)


def test_chips_with_less_room_give_the_same_bits():
    """Fewer columns a block, fewer chunks read ahead."""
    large = emulated_gpu()
    small = replace(large, shared_per_block=24_000)
    tree, results = TREES["forked"], []
    assert [block_cols(len(tree), 128, chip) for chip in (large, small)] == [64, 8]
    for chip in (large, small):
        layers, rng = Layers(chip, 1, 1, 128), np.random.default_rng(11)
        out = layers.tree(tree, layers.random_inputs(rng, len(tree)))
        layers.commit()
        results.append((out, layers.snapshot()))
    np.testing.assert_equal(*results)
    small = replace(large, shared_per_block=60_000)
    assert [plan_pass(64, chip).num_stages for chip in (large, small)] == [2, 1]
    results = []
    for chip in (large, small):
        layers, rng = Layers(chip, 1, 1, 64), np.random.default_rng(12)
        out = layers.run(gated_delta_prefill, layers.random_inputs(rng, 150), 150)
        results.append((out, layers.snapshot()))
    np.testing.assert_equal(*results)


@pytest.mark.parametrize("shared", [101376, 166912, 232448])
def test_blocks_fit_every_chip(shared):
    chip = Gpu(0, 90, 100, shared + 1024, shared)
    static = 2048  # what the kernels declare themselves
    for dim in (16, 32, 64, 128):
        assert chunk_shared_bytes(dim) + 1024 <= shared
        assert plan_pass(dim, chip).shared_bytes + 256 <= shared
        for rows in (1, 8, 24, 48, MOST_ROWS):
            cols = block_cols(rows, dim, chip)
            assert shared_bytes(rows, dim, cols) + static <= shared
            assert num_threads(dim, cols) % 32 == 0
    assert block_cols(MOST_ROWS, 128, chip) == {101376: 8, 166912: 32, 232448: 64}[shared]
