"""The GPU's attention: against float64, and trees and batches against token by token, in bits."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")

from draftree.kernels.cuda.attention import (  # noqa: E402
    attention,
    plan_attention,
)
from draftree.kernels.cuda.compile import Gpu  # noqa: E402
from draftree.kernels.cuda.kv_cache import KvArena, KvShape, kv_commit  # noqa: E402
from draftree.kernels.cuda.pass_args import CudaPassArgs  # noqa: E402
from draftree.kernels.quant.kv_format import (  # noqa: E402
    KEY_FORMATS,
    PAGE,
    VALUE_FORMATS,
)
from tests.examples import mark_long  # noqa: E402
from tests.kernels.cuda_attention import (  # noqa: E402
    MAX_NODES,
    MAX_ROWS,
    Layer,
    Rows,
    assert_near,
    expect,
    long_chain,
    pick,
)
from tests.kernels.cuda_cache import fill  # noqa: E402
from tests.kernels.emulator import emulated_gpu  # noqa: E402
from tests.kernels.passes import Tree, make_tree, trees  # noqa: E402
from tests.kernels.reference.attention import (  # noqa: E402
    block_mask,
    chain_mask,
    tree_mask,
)

WARPGROUPS = pytest.param("warpgroups", marks=pytest.mark.long)
REAL = [pytest.param(name, marks=pytest.mark.gpu) for name in ("real", "real without warpgroups")]


@pytest.fixture(params=["emulated", WARPGROUPS, *REAL])
def any_gpu(request: pytest.FixtureRequest) -> Gpu:
    """Chips with both kinds of matrix instructions, or told to leave the newer one alone."""
    if request.param in ("emulated", "warpgroups"):
        return emulated_gpu(90 if request.param == "warpgroups" else 80)
    gpu: Gpu = request.getfixturevalue("real_gpu")
    return gpu if request.param == "real" else gpu.without_warpgroups()


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
    kept = layer.cache.rows(0, committed + len(path))
    after = layer.rows(7, 1)
    next_row = layer.chain(after, committed + len(path))
    assert torch.equal(got[path], one_by_one(layer, pick(rows, path), committed))
    again = layer.cache.rows(0, committed + len(path))
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
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


@pytest.mark.parametrize(
    ("shape", "formats", "committed"),
    [
        ((6, 1, 256), ("f16", "f16"), 200),
        ((4, 2, 64), ("q4", "f16"), 200),
        ((2, 1, 64), ("f16", "f16"), 1300),
    ],
)
def test_warpgroups_have_the_reference_and_the_bits_of_single_rows(
    shape: tuple[int, int, int], formats: tuple[str, str], committed: int
) -> None:
    """Straight copies and decoded ones, segments of all lengths; other tests take longer."""
    layer = Layer(emulated_gpu(90), *shape, formats=formats, capacity=1400)
    assert [plan.col_tiles for plan in layer.workspace.plans if plan.num_groups] == [1, 6, 12, 18]
    before, rows = layer.rows(1, committed), layer.rows(4, len(TREE))
    layer.fill(before)
    known = layer.rounded(before), layer.rounded(rows)
    mask = tree_mask(list(TREE.parents), committed)
    assert_near(layer.tree(TREE, rows, committed), expect(*known, mask))
    check_tree(layer, TREE, committed)


@pytest.mark.parametrize("any_gpu", ["emulated", "warpgroups", *REAL], indirect=True)
def test_scores_far_from_zero_rise_by_what_their_floats_can_tell(any_gpu: Gpu) -> None:
    """Of two tiles, the second is 16 above the first: four steps of a float at 2 ** 25."""
    layer, dim = Layer(any_gpu, 1, 1, 64), 64
    q = torch.full((1, 1, dim), 8192.0)
    q[..., -2:] = torch.tensor([16384.0, 1.0])
    keys = torch.full((128, 1, dim), 64.0)
    keys[:64, :, -1], keys[64:, :, -1] = 0.0, 16.0
    values = torch.ones(128, 1, dim)
    values[64:] = 3.0
    layer.fill((q, keys, values))
    row = q / (dim**-0.5 * math.log2(math.e)), torch.zeros(1, 1, dim), torch.zeros(1, 1, dim)
    assert torch.allclose(layer.chain(row, 128), torch.tensor(3.0), atol=1e-3)


def test_chips_without_room_leave_warpgroups_alone() -> None:
    shape, gpu = KvShape(4, 256), Gpu(0, 90, 100, 233472, 232448)
    small = replace(gpu, shared_per_sm=102400, shared_per_block=101376)
    assert all(plan.num_groups for plan in plan_attention(shape, gpu))
    centred = KvShape(2, 64, KEY_FORMATS["q4"], VALUE_FORMATS["q4"], is_centred=True)
    for some, chip in ((shape, small), (shape, replace(gpu, arch=100)), (centred, gpu)):
        assert not any(plan.num_groups for plan in plan_attention(some, chip))


@settings(max_examples=8, deadline=None)
@given(tree=trees(20), committed=st.integers(0, 300), window=st.sampled_from([0, 5, 90]))
def test_any_tree_equals_token_by_token(tree: Tree, committed: int, window: int) -> None:
    check_tree(Layer(emulated_gpu(), 6, 1, 16, window=window), tree, committed)


@pytest.mark.parametrize("window", [0, 600])
def test_rows_are_batch_invariant_on_any_number_of_blocks(window: int, any_gpu: Gpu) -> None:
    """Some of these fold spans in the kernel, others leave that to the merge."""
    committed, count, found = 1300, 40, []
    for num_sms in (1, 2, 40):
        gpu = replace(any_gpu, num_sms=num_sms, loader=any_gpu.loader)
        layer = Layer(gpu, 4, 2, 16, capacity=1400, window=window)
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
    parts = tuple(part.clone() for part in layer.cache.rows(0, 20))
    assert parts[0].shape == parts[1].shape == (1, 20, 32)
    layer.fill(layer.rows(2, 20))
    layer.cache.put(parts, 0)
    again = layer.cache.rows(0, 20)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))


def test_large_values_stay_finite(any_gpu: Gpu) -> None:
    layer = Layer(any_gpu, 2, 1, 16)
    q, k, v = layer.rows(1, 5)
    out = layer.chain((q * 1e7, k * 1e7, v * 1e7), 0)
    assert out.isfinite().all() and out.abs().max() <= 65504


FORMATS = [("q8_0", "q8_0"), ("q4", "q4"), ("tq3_0", "tq3_0"), ("f16", "q4"), ("q8_0", "f16")]


@pytest.mark.parametrize(
    ("formats", "dim"),
    [
        *((formats, 64) for formats in FORMATS),
        *((formats, 128) for formats in FORMATS[1:3]),
        *mark_long(((formats, 256) for formats in FORMATS), but=((FORMATS[2], 256),)),
    ],
)
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
        gpu = Gpu(0, 90, 100, shared + 1024, shared)
        for plan in plan_attention(shape, gpu):
            beside = 6144 if plan.num_groups else 3072
            assert plan.num_stages >= 2 and plan.shared_bytes + beside <= shared
