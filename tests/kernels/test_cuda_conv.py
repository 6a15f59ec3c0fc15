"""The GPU's convolution: against float64, and trees and commits against token by token, in bits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")

from draftree.kernels.cuda.compile import Gpu  # noqa: E402
from draftree.kernels.cuda.conv import ConvArena, conv, conv_commit  # noqa: E402
from draftree.kernels.cuda.step import CudaStep  # noqa: E402
from draftree.kernels.reference.conv import conv_reference  # noqa: E402
from tests.kernels.emulator import emulated_gpu  # noqa: E402
from tests.kernels.passes import Tree, make_tree, trees  # noqa: E402

MAX_ROWS, MAX_NODES = 160, 24


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Layers:
    """Convolutions with their states, which see the same step."""

    def __init__(self, gpu: Gpu, *weights: torch.Tensor) -> None:
        self.gpu, self.committed = gpu, 0
        self.step, self.arena = CudaStep(MAX_ROWS, MAX_NODES, gpu), ConvArena(MAX_NODES, gpu)
        self.weights = [weight.to(gpu.place) for weight in weights]
        self.states = [self.arena.new(*weight.shape) for weight in weights]

    def chain(self, x: torch.Tensor) -> torch.Tensor:
        self.step.set_chain(np.zeros(len(x), np.int32), self.committed)
        self.committed += len(x)
        return self.run(x)

    def tree(self, tree: Tree, x: torch.Tensor) -> torch.Tensor:
        nodes = np.zeros(len(x), np.int32)
        self.step.set_tree(nodes, np.array(tree.parents), tree.depths, self.committed)
        return self.run(x)

    def commit(self, path: tuple[int, ...]) -> None:
        self.step.set_path(np.array(path))
        self.committed += len(path)
        conv_commit(self.arena, self.step, self.gpu)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """[layers, rows, channels]; the grid covers more rows than are live."""
        outs = []
        for weight, state in zip(self.weights, self.states, strict=True):
            rows, (channels, _) = len(x) + 3, weight.shape
            wide = torch.full((2, rows, channels + 4), float("nan"), device=self.gpu.place)
            wide[0, : len(x), 4:] = x.to(self.gpu.place)
            conv(wide[0, :, 4:], weight, state, self.step, wide[1, :, 4:], self.gpu)
            assert wide[1, len(x) :].isnan().all() and wide[1, :, :4].isnan().all()
            outs.append(wide[1, : len(x), 4:].cpu())
        return torch.stack(outs)

    @property
    def windows(self) -> torch.Tensor:
        return torch.stack([state.window.cpu() for state in self.states])


@pytest.mark.parametrize(("channels", "kernel_len"), [(16, 4), (640, 4), (96, 2), (64, 5)])
def test_chains_equal_the_reference(channels: int, kernel_len: int, any_gpu: Gpu) -> None:
    weight, x = randn(1, channels, kernel_len), randn(2, 140, channels)
    layers, parts, first = Layers(any_gpu, weight), [], 0
    for count in (31, 1, 2, 5, 101):  # the last one is long
        parts.append(layers.chain(x[first : first + count])[0])
        first += count
    window = torch.zeros(kernel_len - 1, channels)
    expected, after = conv_reference(x, weight, window)
    torch.testing.assert_close(torch.cat(parts), expected, atol=3e-6, rtol=3e-6)
    assert torch.equal(layers.windows[0], after)


def test_rows_have_the_same_bits_however_they_are_cut(any_gpu: Gpu) -> None:
    weight, x = randn(1, 80, 4), randn(2, 130, 80)
    whole, pieces = Layers(any_gpu, weight), Layers(any_gpu, weight)
    out = whole.chain(x)
    cut = [pieces.chain(part) for part in x.split([1, 1, 1, 2, 3, 122])]
    assert torch.equal(torch.cat(cut, dim=1), out)
    assert torch.equal(whole.windows, pieces.windows)


def check_tree(gpu: Gpu, tree: Tree, before: int) -> None:
    weights = [randn(seed, 20, 4) for seed in (1, 2)]
    prompt, x = randn(3, before, 20), randn(4, len(tree), 20)
    layers = Layers(gpu, *weights)
    if before:
        layers.chain(prompt)
    window = layers.windows
    out = layers.tree(tree, x)
    assert torch.equal(layers.windows, window), "a tree moved the window"
    layers.commit(tree.path)
    for node in {*tree.path, len(tree) - 1}:
        plain, branch = Layers(gpu, *weights), tree.branch(node)
        for row in prompt:
            plain.chain(row[None])
        steps = torch.cat([plain.chain(x[i][None]) for i in branch], dim=1)
        assert torch.equal(out[:, branch], steps)
        if node == tree.path[-1]:
            assert torch.equal(layers.windows, plain.windows)


@settings(max_examples=20, deadline=None)
@given(tree=trees(MAX_NODES), before=st.integers(0, 5))
def test_tree_and_commit_equal_token_by_token(tree: Tree, before: int) -> None:
    check_tree(emulated_gpu(), tree, before)


@pytest.mark.parametrize("last", [0, 1, 2, 9, 20])
def test_some_trees_and_commits(last: int, any_gpu: Gpu) -> None:
    check_tree(any_gpu, make_tree([0, 1, 1, 0, 2, 3, 5, 5, 6, *range(9, 20)], last), last % 4)


def test_nothing_live_changes_nothing(any_gpu: Gpu) -> None:
    layers = Layers(any_gpu, randn(1, 32, 4))
    layers.chain(randn(2, 7, 32))
    layers.tree(make_tree([0, 1], 2), randn(3, 3, 32))
    window, stash = layers.windows, layers.states[0].stash.clone()
    layers.commit(())
    assert torch.equal(layers.windows, window)
    layers.step.set_path(np.array([0, 1]))
    layers.step.control[0] = 0
    for is_tree in (0, 1):
        layers.step.control[2] = is_tree
        out = torch.full((8, 32), -1.0, device=any_gpu.place)
        x = torch.ones((8, 32), device=any_gpu.place)
        conv(x, layers.weights[0], layers.states[0], layers.step, out, any_gpu)
        conv_commit(layers.arena, layers.step, any_gpu)
        assert (out == -1.0).all()
        assert torch.equal(layers.windows, window)
        assert torch.equal(layers.states[0].stash, stash)


def test_snapshots_come_back(any_gpu: Gpu) -> None:
    layers = Layers(any_gpu, randn(1, 32, 4))
    layers.chain(randn(2, 7, 32))
    state, window = layers.states[0], layers.windows[0]
    parts = state.snapshot(7)
    layers.chain(randn(3, 2, 32))
    np.testing.assert_array_equal(parts[0], window)
    state.restore(parts)
    assert torch.equal(layers.windows[0], window)
    state.restore(())
    assert not layers.windows.any()


def test_what_does_not_fit_is_refused(any_gpu: Gpu) -> None:
    layers = Layers(any_gpu, randn(1, 32, 4))
    weight, state, step = layers.weights[0], layers.states[0], layers.step
    x, out = (torch.zeros((4, 32), device=any_gpu.place) for _ in range(2))
    with pytest.raises(ValueError, match="must not be x"):
        conv(x, weight, state, step, x, any_gpu)
    with pytest.raises(ValueError, match="does not fit the state"):
        conv(x, weight[:, 1:], state, step, out, any_gpu)
    with pytest.raises(ValueError, match="one size"):
        layers.arena.new(64, 4)
    with pytest.raises(ValueError, match="do not fit"):
        layers.arena.new(30, 4)
    with pytest.raises(ValueError, match="do not fit"):
        layers.arena.new(32, 6)
