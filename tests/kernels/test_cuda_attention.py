"""The GPU's attention: against float64, and trees and batches against token by token, in bits."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

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
from draftree.kernels.cuda.attention_prefill import (  # noqa: E402
    prefill_attention,
    split_range,
)
from draftree.kernels.cuda.compile import Gpu  # noqa: E402
from draftree.kernels.cuda.kv_cache import KvArena, KvShape, kv_commit  # noqa: E402
from draftree.kernels.cuda.pass_args import CudaPassArgs  # noqa: E402
from draftree.kernels.quant.kv_format import (  # noqa: E402
    KEY_FORMATS,
    PAGE,
    VALUE_FORMATS,
    rotate,
)
from tests.kernels.cuda_cache import POISON, fill, rounded, write_rows  # noqa: E402
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
        formats: tuple[str, str] = ("f16", "f16"),
        ring_len: int = 0,
    ) -> None:
        self.gpu, self.shape = gpu, (heads, kv_heads, dim)
        self.step = CudaPassArgs(MAX_ROWS, MAX_NODES, gpu)
        names = KEY_FORMATS[formats[0]], VALUE_FORMATS[formats[1]]
        self.arena = KvArena(capacity, gpu, *names, ring_len)
        self.arena.table.pages.copy_(self.arena.table.pages.max() - self.arena.table.pages)
        self.cache = self.arena.new(kv_heads, dim)
        self.cache.pool.fill_(POISON)
        self.workspace = new_attention_workspace(
            *(MAX_NODES, heads, self.cache.shape, capacity - MAX_NODES, gpu),
            segment_len=segment_len,
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
        fill(*rows[1:], self.cache)

    def rounded(self, rows: Rows) -> Rows:
        """With keys and values as the cache holds them."""
        return rows[0], *(rounded(part, self.cache, i) for i, part in enumerate(rows[1:]))

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
        if self.cache.shape.keys.is_rotated:
            q[:count] = torch.from_numpy(rotate(rows[0].numpy()))
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
    before = layer.cache.pool.clone()
    assert layer.run(pick(layer.rows(4, 1), [])).shape[0] == 0
    kv_commit(layer.arena, layer.step, layer.gpu)
    assert torch.equal(layer.cache.pool, before)


def test_one_commit_serves_layers_of_different_shapes(any_gpu: Gpu) -> None:
    arena, step = KvArena(100, any_gpu), CudaPassArgs(MAX_ROWS, MAX_NODES, any_gpu)
    caches = [arena.new(heads, dim) for heads, dim in ((1, 8), (4, 256), (3, 40))]
    path = list(range(0, 22, 2)) + [22, 25, 40]
    committed, parts = 30, []
    for cache in caches:
        cache.pool.copy_(torch.randint(0, 256, cache.pool.shape, dtype=torch.uint8))
        kept = [*range(committed), *(committed + n for n in path)]
        parts.append([part[:, kept] for part in cache.rows(0, 100)])
    step.set_tree(np.zeros(60, np.int32), np.arange(60) - 1, np.arange(60), committed)
    step.set_path(np.array(path))
    kv_commit(arena, step, any_gpu)
    for cache, expected in zip(caches, parts, strict=True):
        found = cache.rows(0, committed + len(path))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_copies_of_the_committed_positions_come_back(any_gpu: Gpu) -> None:
    layer = Layer(any_gpu, 2, 1, 16)
    layer.fill(layer.rows(1, 20))
    parts = layer.cache.snapshot(20)
    assert parts[0].shape == parts[1].shape == (1, 20, 32)
    layer.fill(layer.rows(2, 20))
    layer.cache.restore(parts)
    layer.cache.restore(())
    assert all(np.array_equal(a, b) for a, b in zip(parts, layer.cache.snapshot(20), strict=True))


def test_large_values_stay_finite(any_gpu: Gpu) -> None:
    layer = Layer(any_gpu, 2, 1, 16)
    q, k, v = layer.rows(1, 5)
    out = layer.chain((q * 1e7, k * 1e7, v * 1e7), 0)
    assert out.isfinite().all() and out.abs().max() <= 65504


def long_chain(layer: Layer, rows: Rows, committed: int, window: int = 0) -> torch.Tensor:
    (heads, _, dim), count = layer.shape, len(rows[0])
    if not committed:
        layer.cache.pool.zero_()  # a first pass covers more rows than are live: those are finite
    layer.step.set_chain(np.zeros(count, np.int32), committed)
    write_rows(*rows[1:], layer.cache, layer.step)
    out = torch.full((count + 2, heads * dim), float("nan"), device=layer.gpu.place)
    is_rotated = layer.cache.shape.keys.is_rotated
    q = torch.from_numpy(rotate(rows[0].numpy())) if is_rotated else rows[0]
    q = layer.widen(q, count + 2)
    prefill_attention(q, layer.cache, layer.step, out, layer.gpu, window=window)
    assert out[count:].isnan().all() or not committed
    return out[:count].reshape(count, heads, dim).cpu()


@pytest.mark.parametrize("window", [0, 33])
@pytest.mark.parametrize("committed", [0, 50])
def test_long_chains_equal_the_reference(window: int, committed: int, any_gpu: Gpu) -> None:
    layer = Layer(any_gpu, 6, 2, 64)
    before, rows = layer.rows(1, committed), layer.rows(4, 100)
    layer.fill(before)
    mask = chain_mask(100, committed, window)
    assert_near(long_chain(layer, rows, committed, window), expect(before, rows, mask))


def test_ranges_of_a_long_prompt_are_merged(any_gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftree.kernels.cuda.attention_prefill.MOST_RANGE", 128)
    monkeypatch.setattr("draftree.kernels.cuda.attention_prefill._LEAST_RANGE", 32)
    layer = Layer(any_gpu, 4, 2, 64)
    before, rows = layer.rows(1, 420), layer.rows(4, 80)
    layer.fill(before)
    mask = chain_mask(80, 420)
    assert_near(long_chain(layer, rows, 420), expect(before, rows, mask))


@pytest.mark.parametrize("length", [1, 1023, 1024, 5000, 32768, 100_000])
def test_ranges_cover_what_is_committed_in_few_sizes(length: int) -> None:
    ranges = split_range(length)
    assert ranges[0][0] == 0 and ranges[-1][1] == length
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    sizes = {end - first for first, end in ranges[:-1]}
    assert all(size & (size - 1) == 0 and 1024 <= size <= 32768 for size in sizes)


FORMATS = [("q8_0", "q8_0"), ("q4", "q4"), ("tq3_0", "tq3_0"), ("f16", "q4"), ("q8_0", "f16")]


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("formats", FORMATS, ids="/".join)
def test_formats_are_read_as_they_are_written(
    formats: tuple[str, str], dim: int, any_gpu: Gpu
) -> None:
    """Decode, verify and prefill against the reference over rounded keys and values."""
    layer, committed = Layer(any_gpu, 4, 2, dim, formats=formats), 150
    before, rows = layer.rows(1, committed), layer.rows(4, len(TREE))
    layer.fill(before)
    known = layer.rounded(before), layer.rounded(rows)
    mask = tree_mask(list(TREE.parents), committed)
    assert_near(layer.tree(TREE, rows, committed), expect(*known, mask))
    mask = chain_mask(len(TREE), committed)
    assert_near(layer.chain(rows, committed), expect(*known, mask))
    assert_near(long_chain(layer, rows, committed), expect(*known, mask))


@pytest.mark.parametrize("formats", FORMATS[1:4], ids="/".join)
def test_formats_keep_trees_equal_to_token_by_token(formats: tuple[str, str], any_gpu: Gpu) -> None:
    check_tree(Layer(any_gpu, 6, 1, 64, formats=formats), TREE, 250)


@pytest.mark.parametrize("committed", [200, 1100])
@pytest.mark.parametrize("sinks", [5, 70, 300])
def test_a_window_leaves_the_sinks(sinks: int, committed: int, any_gpu: Gpu) -> None:
    for window in (40, 400):
        layer = Layer(any_gpu, 4, 2, 32, capacity=1400, window=window)
        layer.step.set_sinks(sinks)
        before, rows = layer.rows(1, committed), layer.rows(4, len(TREE))
        layer.fill(before)
        is_sink = torch.arange(committed + len(TREE)) < sinks

        def see(mask: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
            return expect(before, rows, mask | (whole & is_sink))  # noqa: B023

        masks = [tree_mask(list(TREE.parents), committed, n) for n in (window, 0)]
        assert_near(layer.tree(TREE, rows, committed), see(*masks))
        masks = [chain_mask(len(TREE), committed, n) for n in (window, 0)]
        assert_near(layer.chain(rows, committed), see(*masks))
        assert_near(long_chain(layer, rows, committed, window), see(*masks))


@pytest.mark.parametrize("is_block", [False, True])
def test_a_ring_holds_what_a_window_sees(is_block: bool, any_gpu: Gpu) -> None:
    options = {"window": 300, "bidirectional": is_block}
    whole = Layer(any_gpu, 4, 2, 32, capacity=1400, **options)
    ring = Layer(any_gpu, 4, 2, 32, capacity=1400, ring_len=2 * PAGE, **options)
    assert len(ring.cache.pool) == 2 < len(whole.cache.pool)
    before, rows = whole.rows(1, 1100), whole.rows(4, 16)
    whole.fill(before)
    for first in range(0, 1100, 100):
        fill(before[1][first : first + 100], before[2][first : first + 100], ring.cache, first)
    assert torch.equal(whole.chain(rows, 1100), ring.chain(rows, 1100))


def test_keys_before_the_first_position_are_hidden(any_gpu: Gpu) -> None:
    for window in (0, 200):
        layer = Layer(any_gpu, 4, 2, 32, window=window, bidirectional=True)
        before, rows = layer.rows(1, 400), layer.rows(4, 16)
        layer.fill(before)
        for first in (0, 1, 300, 399, 400):
            layer.step.set_first(first)
            mask = block_mask(16, 400, window) & (torch.arange(416) >= first)
            assert_near(layer.chain(rows, 400), expect(before, rows, mask))


def test_what_does_not_fit_is_refused(any_gpu: Gpu) -> None:
    layer = Layer(any_gpu, 2, 1, 16)
    q = torch.zeros((2, 32), device=any_gpu.place)
    where = (layer.step, q.clone(), layer.workspace, any_gpu)
    with pytest.raises(ValueError, match="cannot share 3 key heads"):
        attention(q, KvArena(64, any_gpu).new(3, 16), *where)
    with pytest.raises(ValueError, match="too small"):
        attention(q, KvArena(10**6, any_gpu).new(1, 16), *where)
    with pytest.raises(ValueError, match="not supported"):
        plan_attention(KvShape(1, 264), any_gpu)
    with pytest.raises(ValueError, match="only be kept as f16"):
        KvShape(1, 80, KEY_FORMATS["q4"])
    with pytest.raises(ValueError, match="multiple of 8"):
        KvArena(64, any_gpu).new(1, 12)


@pytest.mark.parametrize(("head_dim", "shared"), [(256, 101376), (256, 232448), (128, 101376)])
def test_shared_memory_is_enough(head_dim: int, shared: int) -> None:
    for name, keys in KEY_FORMATS.items():
        shape = KvShape(4, head_dim, keys, VALUE_FORMATS[name])
        plan = plan_attention(shape, Gpu(0, 90, 100, shared + 1024, shared))
        assert plan.num_stages >= 2 and plan.shared_bytes + 3072 <= shared
