import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.kernels.cpu.conv import ConvState, record_conv, record_conv_commit
from draftree.kernels.cpu.pass_args import PassArgs
from draftree.kernels.cpu.program import Program
from tests.kernels.passes import poison, pool, randn, set_rows, trees
from tests.kernels.reference.conv import conv_reference

MAX_ROWS, MAX_NODES = 32, 24


class Layer:
    """A convolution with its state, and the programs that run and commit it."""

    def __init__(self, weight, num_threads=2):
        channels, kernel_len = weight.shape
        self.step = PassArgs(MAX_ROWS, MAX_NODES)
        self.state = ConvState(channels, kernel_len, MAX_NODES)
        self.x, self.out = poison(MAX_ROWS, channels), poison(MAX_ROWS, channels)
        self.program, self.commit = Program(pool(num_threads)), Program(pool(num_threads))
        record_conv(self.program, self.step, self.x, weight, self.state, self.out)
        record_conv_commit(self.commit, self.step, self.state)
        self.committed = 0

    def chain(self, x):
        set_rows(self.step, len(x), self.committed)
        self.committed += len(x)
        return self._run(x)

    def tree(self, tree, x):
        tree.load(self.step, self.committed)
        return self._run(x)

    def _run(self, x):
        self.x[:], self.out[:] = np.nan, np.nan
        self.x[: len(x)] = x
        self.program.run()
        assert np.isnan(self.out[len(x) :]).all()
        return self.out[: len(x)].copy()


@pytest.mark.parametrize(("channels", "kernel_len"), [(16, 4), (80, 4), (640, 4), (96, 2), (64, 5)])
def test_conv_equals_reference(channels, kernel_len):
    rng = np.random.default_rng(channels)
    weight, x = randn(rng, channels, kernel_len), randn(rng, 40, channels)
    layer = Layer(weight)
    out = np.concatenate([layer.chain(x[:31]), layer.chain(x[31:33]), layer.chain(x[33:])])
    window = torch.zeros(kernel_len - 1, channels)
    expected, after = conv_reference(torch.from_numpy(x), torch.from_numpy(weight), window)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_array_equal(layer.state.window, after)


@settings(max_examples=30, deadline=None)
@given(tree=trees(MAX_NODES), before=st.integers(0, 9), num_threads=st.integers(1, 3))
def test_tree_and_commit_equal_token_by_token(tree, before, num_threads):
    rng = np.random.default_rng(len(tree))
    weight, prompt, x = randn(rng, 80, 4), randn(rng, before, 80), randn(rng, len(tree), 80)
    layer = Layer(weight, num_threads)
    if before:
        layer.chain(prompt)
    window = layer.state.window.copy()
    out = layer.tree(tree, x)
    np.testing.assert_array_equal(layer.state.window, window)  # a rollback is doing nothing
    layer.commit.run()
    for node in {*tree.path, len(tree) - 1}:
        plain, branch = Layer(weight), tree.branch(node)
        for row in prompt:
            plain.chain(row[None])
        steps = [plain.chain(x[i][None])[0] for i in branch]
        np.testing.assert_array_equal(out[branch], steps)
        if node == tree.path[-1]:
            np.testing.assert_array_equal(layer.state.window, plain.state.window)


def test_in_place_is_refused():
    x = poison(4, 16)
    with pytest.raises(AssertionError, match="must not be x"):
        record_conv(Program(pool(1)), PassArgs(4, 4), x, poison(16, 4), ConvState(16, 4, 4), x)
