import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.kernels.cpu.conv import ConvState, record_conv
from draftree.kernels.cpu.gated_delta import (
    DeltaState,
    delta_scratch_len,
    record_delta_commit,
    record_gated_delta,
)
from draftree.kernels.cpu.norm import record_gated_norm
from draftree.kernels.cpu.pass_args import PassArgs
from draftree.kernels.cpu.program import Program
from tests.golden import golden
from tests.kernels.passes import make_tree, poison, pool, randn, set_rows, trees
from tests.kernels.reference.gated_delta import gated_delta_reference

MAX_ROWS, MAX_NODES = 40, 24


class Layer:
    """One delta-rule layer with fixed gates, and the programs that run and commit it."""

    def __init__(self, key_heads, value_heads, dim, num_threads=2):
        rng = np.random.default_rng(key_heads + value_heads + dim)
        self.step = PassArgs(MAX_ROWS, MAX_NODES)
        self.state = DeltaState(key_heads, value_heads, dim, MAX_NODES)
        widths = ((2 * key_heads + value_heads) * dim, value_heads, value_heads)
        self.inputs = [poison(MAX_ROWS, width) for width in widths]
        self.out = poison(MAX_ROWS, value_heads * dim)
        self.ssm_a, self.dt_bias = -np.exp(randn(rng, value_heads)), randn(rng, value_heads)
        size = delta_scratch_len(self.step, key_heads, value_heads, dim, num_threads)
        self.program, self.commit = Program(pool(num_threads)), Program(pool(num_threads))
        weights = (self.ssm_a, self.dt_bias, self.state, self.out, poison(size))
        record_gated_delta(self.program, self.step, *self.inputs, *weights)
        record_delta_commit(self.commit, self.step, self.state)

    def random_inputs(self, rng, count):
        return [randn(rng, count, a.shape[1]) for a in self.inputs]

    def chain(self, inputs):
        set_rows(self.step, len(inputs[0]))
        return self._run(inputs)

    def one_by_one(self, inputs):
        return [self.chain([a[i : i + 1] for a in inputs])[0] for i in range(len(inputs[0]))]

    def tree(self, tree, inputs):
        tree.load(self.step, 0)
        return self._run(inputs)

    def _run(self, inputs):
        count = len(inputs[0])
        for buffer, values in zip(self.inputs, inputs, strict=True):
            buffer[:] = np.nan
            buffer[:count] = values
        self.out[:] = np.nan
        self.program.run()
        assert np.isnan(self.out[count:]).all()
        return self.out[:count].copy()


@pytest.mark.parametrize("heads", [(1, 1), (2, 6), (4, 4)])
@pytest.mark.parametrize("dim", [32, 64, 80, 128])
def test_delta_rule_equals_reference(heads, dim):
    rng = np.random.default_rng(dim)
    layer = Layer(*heads, dim)
    inputs = layer.random_inputs(rng, 37)
    layer.state.state[:] = randn(rng, heads[1], dim, dim)
    tensors = [torch.from_numpy(a.copy()) for a in (*inputs, layer.ssm_a, layer.dt_bias)]
    before = torch.from_numpy(layer.state.state.copy())
    expected, after = gated_delta_reference(*tensors, before, heads[0])
    np.testing.assert_allclose(layer.chain(inputs), expected.flatten(1), atol=3e-6)
    np.testing.assert_allclose(layer.state.state, after, atol=1e-5)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_chunk_equals_token_by_token(num_threads):
    rng = np.random.default_rng(0)
    chunk, plain = Layer(2, 6, 64, num_threads), Layer(2, 6, 64, 1)
    inputs = chunk.random_inputs(rng, 33)
    np.testing.assert_array_equal(chunk.chain(inputs), plain.one_by_one(inputs))
    np.testing.assert_array_equal(chunk.state.state, plain.state.state)


@settings(max_examples=30, deadline=None)
@given(
    tree=trees(MAX_NODES),
    shape=st.sampled_from([(1, 2, 32), (2, 6, 64)]),
    num_threads=st.integers(1, 3),
)
def test_tree_and_commit_equal_token_by_token(tree, shape, num_threads):
    rng = np.random.default_rng(len(tree))
    layer = Layer(*shape, num_threads)
    prompt, inputs = layer.random_inputs(rng, 5), layer.random_inputs(rng, len(tree))
    layer.chain(prompt)
    committed = layer.state.state.copy()
    out = layer.tree(tree, inputs)
    np.testing.assert_array_equal(layer.state.state, committed)  # a rollback is doing nothing
    layer.commit.run()
    for node in {*tree.path[-1:], len(tree) - 1}:
        plain, branch = Layer(*shape), tree.branch(node)
        plain.one_by_one(prompt)
        steps = plain.one_by_one([a[branch] for a in inputs])
        np.testing.assert_array_equal(out[branch], steps)
        if node == tree.path[-1]:
            np.testing.assert_array_equal(layer.state.state, plain.state.state)


def test_two_trees_one_after_the_other():
    """What the first tree stored must not reach the commit of the second."""
    rng = np.random.default_rng(5)
    layer, plain = Layer(2, 6, 64), Layer(2, 6, 64)
    first, second = make_tree([0, 1, 2, 0, 4], 3), make_tree([0, 0, 2, 3], 4)
    inputs = [layer.random_inputs(rng, len(tree)) for tree in (first, second)]
    for tree, values in zip((first, second), inputs, strict=True):
        layer.tree(tree, values)
        layer.commit.run()
        plain.one_by_one([a[list(tree.path)] for a in values])
    np.testing.assert_array_equal(layer.state.state, plain.state.state)


def test_golden_layer():
    """Convolution, delta rule and gated norm of a real layer; value heads in the files' order."""
    import gguf

    data = np.load(golden("qwen35/layer0.npz"))
    file = gguf.GGUFReader(golden("qwen35/tiny-qwen35-A-mixed.gguf"))
    tensors = {
        t.name: np.array(t.data, dtype=np.float32) for t in file.tensors if "blk.0." in t.name
    }
    kh, vh, dim, count = 2, 6, 64, 33
    order = [k * (vh // kh) + t for t in range(vh // kh) for k in range(kh)]

    def by_head(name):
        return data[name].reshape(count, vh, -1)[:, order].reshape(count, -1).copy()

    qkv = data["layer0.in_proj_qkv"].copy()
    values = qkv[:, 2 * kh * dim :].reshape(count, vh, dim)
    qkv[:, 2 * kh * dim :] = values[:, order].reshape(count, -1)
    step, program = PassArgs(MAX_ROWS, MAX_NODES), Program(pool(2))
    conv, delta = ConvState(qkv.shape[1], 4, MAX_NODES), DeltaState(kh, vh, dim, MAX_NODES)
    mixed, out, normed = poison(*qkv.shape), poison(count, vh * dim), poison(count, vh * dim)
    record_conv(program, step, qkv, tensors["blk.0.ssm_conv1d.weight"], conv, mixed)
    record_gated_delta(
        *(program, step, mixed, by_head("layer0.in_proj_a"), by_head("layer0.in_proj_b")),
        *(tensors["blk.0.ssm_a"], tensors["blk.0.ssm_dt.bias"], delta, out),
        poison(delta_scratch_len(step, kh, vh, dim, 2)),
    )
    weight = tensors["blk.0.ssm_norm.weight"]
    gate = by_head("layer0.in_proj_z")
    record_gated_norm(program, step, out, gate, weight, 1e-6, vh, dim, normed)
    set_rows(step, count)
    program.run()
    np.testing.assert_allclose(out, by_head("layer0.core_attn_out"), atol=1e-5)
    np.testing.assert_allclose(normed, by_head("layer0.gated_norm_out"), atol=1e-4)
    state = data["state.layer0.recurrent"][order]
    np.testing.assert_allclose(delta.state, state, atol=1e-5)
    np.testing.assert_array_equal(
        conv.window[:, : 2 * kh * dim].T, data["state.layer0.conv"][: 2 * kh * dim, 1:]
    )
