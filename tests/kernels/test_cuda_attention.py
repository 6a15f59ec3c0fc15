"""The GPU's attention: against float64, and trees and batches against token by token, in bits."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")

from draftree.kernels.cuda.attention import (  # noqa: E402
    attention,
    new_attention_workspace,
    plan_attention,
)
from draftree.kernels.cuda.attention_prefill import prefill_attention  # noqa: E402
from draftree.kernels.cuda.compile import Gpu  # noqa: E402
from draftree.kernels.cuda.kv_cache import KvArena, kv_commit  # noqa: E402
from draftree.kernels.cuda.pass_args import CudaPassArgs  # noqa: E402
from tests.kernels.cuda_cache import write_rows  # noqa: E402
from tests.kernels.emulator import emulated_gpu  # noqa: E402
from tests.kernels.passes import Tree, make_tree, trees  # noqa: E402
from tests.kernels.reference.attention import (  # noqa: E402
    attention_reference,
    block_mask,
    chain_mask,
    tree_mask,
)

MAX_ROWS, MAX_NODES = 160, 64
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v: [rows, heads, head_dim]


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Layer:
    """One attention layer over a poisoned cache; short segments, so that few keys make many."""

    def __init__(
        self,
        gpu: Gpu,
        heads: int,
        kv_heads: int,
        dim: int,
        *,
        capacity: int = 800,
        segment_len: int = 128,
        window: int = 0,
        bidirectional: bool = False,
    ) -> None:
        self.gpu, self.shape = gpu, (heads, kv_heads, dim)
        self.step, self.arena = CudaPassArgs(MAX_ROWS, MAX_NODES, gpu), KvArena(capacity, gpu)
        self.cache = self.arena.new(kv_heads, dim)
        self.cache.halves.fill_(float("nan"))
        self.workspace = new_attention_workspace(
            MAX_NODES, heads, dim, capacity - MAX_NODES, gpu, segment_len=segment_len
        )
        self.workspace.partial.fill_(float("nan"))
        self.workspace.stats.fill_(float("nan"))
        self.window, self.bidirectional = window, bidirectional

    def rows(self, seed: int, count: int) -> Rows:
        """Keys and values that half floats hold exactly."""
        heads, kv_heads, dim = self.shape
        q, k, v = (
            randn(seed + i, count, n, dim) for i, n in enumerate((heads, kv_heads, kv_heads))
        )
        return 3 * q, k.half().float(), v.half().float()

    def fill(self, rows: Rows) -> None:
        """Committed keys and values, without a pass."""
        for part, values in zip((self.cache.keys, self.cache.values), rows[1:], strict=True):
            part[:, : len(values)] = values.transpose(0, 1).half()

    def chain(self, rows: Rows, committed: int) -> torch.Tensor:
        self.step.set_chain(np.zeros(len(rows[0]), np.int32), committed)
        return self.run(rows)

    def tree(self, tree: Tree, rows: Rows, committed: int) -> torch.Tensor:
        nodes = np.zeros(len(tree), np.int32)
        self.step.set_tree(nodes, np.array(tree.parents), tree.depths, committed)
        return self.run(rows)

    def run(self, rows: Rows) -> torch.Tensor:
        """The grid covers more rows than are live; rows lie in wider ones."""
        heads, _, dim = self.shape
        count = len(rows[0])
        q, k, v = (self.widen(part, count + 3) for part in rows)
        write_rows(k, v, self.cache, self.step)
        wide = torch.full((count + 3, heads * dim + 4), float("nan"), device=self.gpu.place)
        options = {"window": self.window, "bidirectional": self.bidirectional}
        where = (self.cache, self.step, wide[:, 4:], self.workspace, self.gpu)
        attention(q, *where, **options)
        assert wide[count:].isnan().all() and wide[:, :4].isnan().all()
        return wide[:count, 4:].reshape(count, heads, dim).cpu()

    def widen(self, part: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Heads with a gap after each, as a view [rows, heads, head_dim]."""
        count, heads, dim = part.shape
        wide = torch.full((num_rows, heads, dim + 8), float("nan"), device=self.gpu.place)
        wide[:count, :, :dim] = part
        return wide[:, :, :dim]


def join(*parts: Rows) -> Rows:
    q, k, v = (torch.cat(same) for same in zip(*parts, strict=True))
    return q, k, v


def pick(rows: Rows, which: Sequence[int]) -> Rows:
    q, k, v = (part[list(which)] for part in rows)
    return q, k, v


def expect(before: Rows, rows: Rows, mask: torch.Tensor) -> torch.Tensor:
    _, k, v = join(before, rows)
    return attention_reference(rows[0].double(), k, v, mask, rows[0].shape[-1] ** -0.5).float()


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Queries and weights are rounded to half floats, scores reach 20."""
    error = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 6e-3 and error.mean() < 2e-3


SHAPES = [(2, 2, 64), (4, 2, 16), (3, 1, 80), (6, 1, 128), (6, 1, 256), (10, 1, 24)]
TREE = make_tree([0, 0, 1, 1, 3, 5, 2, 6, 8], 9)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("committed", [0, 65, 200])
def test_trees_and_chains_equal_the_reference(
    shape: tuple[int, int, int], committed: int, any_gpu: Gpu
) -> None:
    layer = Layer(any_gpu, *shape)
    before, rows = layer.rows(1, committed), layer.rows(4, len(TREE))
    layer.fill(before)
    mask = tree_mask(list(TREE.parents), committed)
    assert_near(layer.tree(TREE, rows, committed), expect(before, rows, mask))
    mask = chain_mask(len(TREE), committed)
    assert_near(layer.chain(rows, committed), expect(before, rows, mask))


@pytest.mark.parametrize("committed", [1, 63, 64, 130, 600])
def test_windows_equal_the_reference(committed: int, any_gpu: Gpu) -> None:
    for window in (3, 70):
        layer = Layer(any_gpu, 4, 2, 32, window=window)
        before, rows = layer.rows(1, committed), layer.rows(4, len(TREE))
        layer.fill(before)
        mask = tree_mask(list(TREE.parents), committed, window)
        assert_near(layer.tree(TREE, rows, committed), expect(before, rows, mask))
        mask = chain_mask(len(TREE), committed, window)
        assert_near(layer.chain(rows, committed), expect(before, rows, mask))


@pytest.mark.parametrize("window", [0, 40, 100])
def test_blocks_see_both_ways(window: int, any_gpu: Gpu) -> None:
    layer = Layer(any_gpu, 4, 1, 64, window=window, bidirectional=True)
    for committed, count in ((0, 1), (0, 16), (59, 16), (64, 5), (200, 33)):
        before, rows = layer.rows(1, committed), layer.rows(4, count)
        layer.fill(before)
        mask = block_mask(count, committed, window)
        assert_near(layer.chain(rows, committed), expect(before, rows, mask))


def one_by_one(layer: Layer, rows: Rows, committed: int) -> torch.Tensor:
    count = len(rows[0])
    return torch.cat([layer.chain(pick(rows, [i]), committed + i) for i in range(count)])


def check_tree(layer: Layer, tree: Tree, committed: int) -> None:
    """Every node has the bits of its branch run token by token; so has the committed path."""
    before, rows = layer.rows(1, committed), layer.rows(4, len(tree))
    layer.fill(before)
    got = layer.tree(tree, rows, committed)
    layer.step.set_path(np.array(tree.path))
    kv_commit(layer.arena, layer.step, layer.gpu)
    path = list(tree.path)
    kept = layer.cache.snapshot(committed + len(path))
    after = layer.rows(7, 1)
    next_row = layer.chain(after, committed + len(path))
    assert torch.equal(got[path], one_by_one(layer, pick(rows, path), committed))
    again = layer.cache.snapshot(committed + len(path))
    assert all(np.array_equal(a, b) for a, b in zip(kept, again, strict=True))
    assert torch.equal(next_row, layer.chain(after, committed + len(path)))
    leaves = set(range(len(tree))) - set(tree.parents) - {path[-1]}
    for leaf in sorted(leaves)[:2]:
        branch = tree.branch(leaf)
        assert torch.equal(got[branch], one_by_one(layer, pick(rows, branch), committed))


@pytest.mark.parametrize(
    ("shape", "committed"),
    [((6, 1, 16), 0), ((6, 1, 256), 60), ((3, 3, 64), 120), ((4, 2, 128), 64), ((10, 1, 8), 255)],
)
def test_trees_equal_token_by_token(
    shape: tuple[int, int, int], committed: int, any_gpu: Gpu
) -> None:
    check_tree(Layer(any_gpu, *shape), TREE, committed)


@settings(max_examples=8, deadline=None)
@given(tree=trees(20), committed=st.integers(0, 300), window=st.sampled_from([0, 5, 90]))
def test_any_tree_equals_token_by_token(tree: Tree, committed: int, window: int) -> None:
    check_tree(Layer(emulated_gpu(), 6, 1, 16, window=window), tree, committed)


@pytest.mark.parametrize("window", [0, 600])
def test_rows_are_batch_invariant_on_any_number_of_blocks(window: int, any_gpu: Gpu) -> None:
    """Some of these fold spans in the kernel, others leave that to the merge."""
    committed, count, found = 1100, 40, []
    for num_sms in (1, 2, 40):
        gpu = replace(any_gpu, num_sms=num_sms, loader=any_gpu.loader)
        layer = Layer(gpu, 4, 2, 16, capacity=1200, window=window)
        before, rows = layer.rows(1, committed), layer.rows(4, count)
        layer.fill(before)
        found.append(layer.chain(rows, committed))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    for count in (1, 7, 24):
        assert torch.equal(found[0][:count], layer.chain(pick(rows, range(count)), committed))


def test_a_pass_of_no_rows_changes_nothing(any_gpu: Gpu) -> None:
    layer = Layer(any_gpu, 6, 1, 16)
    layer.fill(layer.rows(1, 80))
    layer.step.set_idle(70)
    layer.step.set_path(np.array([0, 2]))
    before = layer.cache.halves.clone()
    assert layer.run(pick(layer.rows(4, 1), [])).shape[0] == 0
    kv_commit(layer.arena, layer.step, layer.gpu)
    assert torch.equal(layer.cache.halves.nan_to_num(7), before.nan_to_num(7))


def test_one_commit_serves_layers_of_different_shapes(any_gpu: Gpu) -> None:
    arena, step = KvArena(100, any_gpu), CudaPassArgs(MAX_ROWS, MAX_NODES, any_gpu)
    caches = [arena.new(heads, dim) for heads, dim in ((1, 8), (4, 256), (3, 40))]
    path = list(range(0, 22, 2)) + [22, 25, 40]
    committed, parts = 30, []
    for i, cache in enumerate(caches):
        cache.halves.copy_(randn(i, *cache.halves.shape))
        parts.append(cache.halves[:, :, [*range(committed), *(committed + n for n in path)]])
    step.set_tree(np.zeros(60, np.int32), np.arange(60) - 1, np.arange(60), committed)
    step.set_path(np.array(path))
    kv_commit(arena, step, any_gpu)
    for cache, part in zip(caches, parts, strict=True):
        assert torch.equal(cache.halves[:, :, : committed + len(path)], part)


def test_copies_of_the_committed_positions_come_back(any_gpu: Gpu) -> None:
    layer = Layer(any_gpu, 2, 1, 16)
    layer.fill(layer.rows(1, 20))
    parts = layer.cache.snapshot(20)
    assert parts[0].shape == parts[1].shape == (1, 20, 16)
    layer.fill(layer.rows(2, 20))
    layer.cache.restore(parts)
    layer.cache.restore(())
    assert all(np.array_equal(a, b) for a, b in zip(parts, layer.cache.snapshot(20), strict=True))


def test_large_values_stay_finite(any_gpu: Gpu) -> None:
    layer = Layer(any_gpu, 2, 1, 16)
    q, k, v = layer.rows(1, 5)
    out = layer.chain((q * 1e7, k * 1e7, v * 1e7), 0)
    assert out.isfinite().all() and out.abs().max() <= 65504


@pytest.mark.parametrize("options", [{}, {"window": 33}, {"bidirectional": True}])
@pytest.mark.parametrize("committed", [0, 50])
def test_long_chains_equal_the_reference(
    options: dict[str, int], committed: int, any_gpu: Gpu
) -> None:
    heads, dim, count = 6, 64, 100
    layer = Layer(any_gpu, heads, 2, dim)
    before, rows = layer.rows(1, committed), layer.rows(4, count)
    layer.fill(before)
    layer.chain(rows, committed)
    out = torch.full((count + 2, heads * dim), float("nan"), device=any_gpu.place)
    q = layer.widen(rows[0], count + 2)
    prefill_attention(q, layer.cache, layer.step, out, **options)
    make_mask = block_mask if "bidirectional" in options else chain_mask
    mask = make_mask(count, committed, options.get("window", 0))
    got = out[:count].reshape(count, heads, dim).cpu()
    assert_near(got, expect(before, rows, mask))
    assert out[count:].isnan().all()


def test_what_does_not_fit_is_refused(any_gpu: Gpu) -> None:
    layer = Layer(any_gpu, 2, 1, 16)
    q = torch.zeros((2, 32), device=any_gpu.place)
    where = (layer.step, q.clone(), layer.workspace, any_gpu)
    with pytest.raises(ValueError, match="cannot share 3 key heads"):
        attention(q, KvArena(64, any_gpu).new(3, 16), *where)
    with pytest.raises(ValueError, match="too small"):
        attention(q, KvArena(10**6, any_gpu).new(1, 16), *where)
    with pytest.raises(ValueError, match="not supported"):
        plan_attention(264, any_gpu)
    with pytest.raises(ValueError, match="multiple of 8"):
        KvArena(64, any_gpu).new(1, 12)


@pytest.mark.parametrize(("head_dim", "shared"), [(256, 101376), (256, 232448), (128, 101376)])
def test_shared_memory_is_enough(head_dim: int, shared: int) -> None:
    plan = plan_attention(head_dim, Gpu(0, 90, 100, shared + 1024, shared))
    assert plan.num_stages >= 2 and plan.shared_bytes + 3072 <= shared
