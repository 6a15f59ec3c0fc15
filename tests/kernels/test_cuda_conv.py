"""The GPU's convolution of long chains: against float64, and its windows through commits and
snapshots. Passes of few rows: test_cuda_gated_delta.py.
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from draftree.kernels.cuda.compile import Gpu  # noqa: E402
from draftree.kernels.cuda.conv import ConvArena, Convolution, conv, conv_commit  # noqa: E402
from draftree.kernels.cuda.pass_args import CudaPassArgs  # noqa: E402
from tests.kernels.passes import Tree, make_tree  # noqa: E402
from tests.kernels.reference.conv import conv_reference  # noqa: E402

MAX_ROWS, MAX_NODES = 160, 24


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Layers:
    """Convolutions with their states, which see the same step."""

    def __init__(self, gpu: Gpu, *weights: torch.Tensor) -> None:
        self.gpu, self.committed = gpu, 0
        self.step, self.arena = CudaPassArgs(MAX_ROWS, MAX_NODES, gpu), ConvArena(MAX_NODES, gpu)
        self.weights = [weight.to(gpu.place) for weight in weights]
        self.states = [self.arena.new(*weight.shape) for weight in weights]

    def chain(self, x: torch.Tensor) -> torch.Tensor:
        self.step.set_chain(np.zeros(len(x), np.int32), self.committed)
        self.committed += len(x)
        return self.run(x)

    def commit(self, tree: Tree, x: torch.Tensor) -> None:
        """x: what a pass over the tree has stashed in every layer."""
        for state in self.states:
            state.stash[: len(x)] = x.to(self.gpu.place)
        tree.load(self.step, self.committed)
        self.committed += len(tree.path)
        conv_commit(self.arena, self.step, self.gpu)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """[layers, rows, channels]; the grid covers more rows than are live."""
        outs = []
        for weight, state in zip(self.weights, self.states, strict=True):
            rows, (channels, _) = len(x) + 3, weight.shape
            wide = torch.full((2, rows, channels + 4), float("nan"), device=self.gpu.place)
            wide[0, : len(x), 4:] = x.to(self.gpu.place)
            conv(Convolution(wide[0, :, 4:], weight, state), self.step, wide[1, :, 4:], self.gpu)
            assert wide[1, len(x) :].isnan().all() and wide[1, :, :4].isnan().all()
            outs.append(wide[1, : len(x), 4:].cpu())
        return torch.stack(outs)

    def use_second(self) -> None:
        """As a pass of few rows may leave it."""
        for state in self.states:
            state.windows[1], state.windows[0] = state.windows[0].clone(), float("nan")
            state.second_at.fill_(self.committed)

    @property
    def windows(self) -> torch.Tensor:
        parts = [state.snapshot(self.committed)[0] for state in self.states]
        return torch.stack(parts).cpu()


@pytest.mark.parametrize(("channels", "kernel_len"), [(16, 4), (640, 4), (96, 2), (64, 5)])
def test_chains_equal_the_reference(channels: int, kernel_len: int, any_gpu: Gpu) -> None:
    weight, x = randn(1, channels, kernel_len), randn(2, 140, channels)
    layers, parts, first = Layers(any_gpu, weight), [], 0
    for count in (31, 1, 2, 5, 101):
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
    cut = []
    for part in x.split([1, 1, 1, 2, 3, 122]):
        cut.append(pieces.chain(part))
        if len(part) > 1:
            pieces.use_second()
    assert torch.equal(torch.cat(cut, dim=1), out)
    assert torch.equal(whole.windows, pieces.windows)


@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.parametrize("last", [0, 1, 2, 9, 20])
def test_commit_moves_every_window_along_the_path(last: int, is_second: bool, any_gpu: Gpu) -> None:
    tree = make_tree([0, 1, 1, 0, 2, 3, 5, 5, 6, *range(9, 20)], last)
    prompt, x = randn(3, 5, 20), randn(4, len(tree), 20)
    layers = Layers(any_gpu, *(randn(seed, 20, 4) for seed in (1, 2)))
    layers.chain(prompt)
    if is_second:
        layers.use_second()
    layers.commit(tree, x)
    expected = torch.cat((prompt, x[list(tree.path)]))[-3:]
    assert all(torch.equal(window, expected) for window in layers.windows)


def test_nothing_live_changes_nothing(any_gpu: Gpu) -> None:
    layers, tree = Layers(any_gpu, randn(1, 32, 4)), make_tree([0, 1], 2)
    layers.chain(randn(2, 7, 32))
    layers.commit(tree, randn(3, 3, 32))
    state, window = layers.states[0], layers.windows
    parts = state.windows, state.second_at, state.stash
    copies = [part.clone() for part in parts]
    tree.load(layers.step, layers.committed)
    layers.step.set_path(np.array([], np.int64))
    conv_commit(layers.arena, layers.step, any_gpu)
    layers.step.set_path(np.array([0, 1]))
    layers.step.control[0] = 0
    x, out = torch.ones((8, 32), device=any_gpu.place), torch.ones((8, 32), device=any_gpu.place)
    conv(Convolution(x, layers.weights[0], state), layers.step, out, any_gpu)
    conv_commit(layers.arena, layers.step, any_gpu)
    assert (out == 1.0).all()
    assert torch.equal(layers.windows, window)
    assert all(torch.equal(part, copy) for part, copy in zip(parts, copies, strict=True))


@pytest.mark.parametrize("is_second", [False, True])
def test_snapshots_come_back(is_second: bool, any_gpu: Gpu) -> None:
    layers = Layers(any_gpu, randn(1, 32, 4))
    layers.chain(randn(2, 7, 32))
    if is_second:
        layers.use_second()
    state, window, at = layers.states[0], layers.windows[0], layers.committed
    parts = state.snapshot(at)
    layers.chain(randn(3, 2, 32))
    layers.use_second()
    assert torch.equal(parts[0].cpu(), window)
    state.restore(parts)
    assert torch.equal(layers.windows[0], window)
    layers.committed = at
    assert torch.equal(layers.windows[0], window)
    state.restore(())
    assert not layers.windows.any()


def test_what_does_not_fit_is_refused(any_gpu: Gpu) -> None:
    layers = Layers(any_gpu, randn(1, 32, 4))
    weight, state, step = layers.weights[0], layers.states[0], layers.step
    x, out = (torch.zeros((4, 32), device=any_gpu.place) for _ in range(2))
    with pytest.raises(ValueError, match="must not be x"):
        conv(Convolution(x, weight, state), step, x, any_gpu)
    with pytest.raises(ValueError, match="does not fit the state"):
        conv(Convolution(x, weight[:, 1:], state), step, out, any_gpu)
    with pytest.raises(ValueError, match="one size"):
        layers.arena.new(64, 4)
    with pytest.raises(ValueError, match="do not fit"):
        layers.arena.new(30, 4)
    with pytest.raises(ValueError, match="do not fit"):
        layers.arena.new(32, 6)
