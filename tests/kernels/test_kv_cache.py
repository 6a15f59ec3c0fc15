"""A ring of keys and values gives the bits of a cache that holds all positions."""

import numpy as np
import pytest

from draftree.kernels.cpu.kv_cache import KvCache
from draftree.kernels.cpu.simd import LANES
from tests.kernels.passes import make_tree
from tests.kernels.test_attention import Layer

RING, WINDOW = 256, 97  # with the rows of a pass, at most 160, the window just fits
TREE = make_tree([0, 1, 1, 2, 0, 5, 6, 7, 8, 3, 9], 11)
DTYPES = [np.float32, np.float16, np.int8]


def _pair(dtype, num_threads, **options):
    options = {"dtype": dtype, "window": WINDOW, **options}
    ring = Layer(6, 2, 48, ring_len=RING, threads=num_threads, **options)
    return ring, Layer(6, 2, 48, 1100, threads=1, **options)


def _run(layers, inputs, committed, name="chain", *args):
    """The same pass on both, which must give the same bits."""
    found, expected = (getattr(one, name)(*args, inputs, committed) for one in layers)
    np.testing.assert_array_equal(found, expected)


def _assert_same(layers, end):
    """All whole tiles that the ring holds, when the rows of a pass may lie behind the end."""
    start = -(-max(end + 160 - RING, 0) // LANES) * LANES
    end = end // LANES * LANES
    for a, b in zip(*(one.cache.copy(start, end) for one in layers), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_chains_of_any_length(num_threads, dtype):
    layers, rng, done = _pair(dtype, num_threads), np.random.default_rng(1), 0
    for count in (160, 1, 95, 7, 160, 160, 33, 1, 1, 150, 64, 64, 2, 130):
        _run(layers, layers[0].random_inputs(rng, count), done)
        done += count
        _assert_same(layers, done)
    assert done > 4 * RING


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks(dtype):
    """As a draft runs them: rows that see each other, written over by the next ones."""
    layers, rng = _pair(dtype, 2, bidirectional=True), np.random.default_rng(2)
    for done in range(0, 800, 50):
        _run(layers, layers[0].random_inputs(rng, 16), done)
        _run(layers, layers[0].random_inputs(rng, 50), done)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("committed", [240, 243, 250, 255, 256, 505, 511, 767])
def test_trees_across_the_end_of_the_ring(committed, dtype):
    layers, rng = _pair(dtype, 2), np.random.default_rng(committed)
    for start in range(0, committed, 160):
        count = min(160, committed - start)
        _run(layers, layers[0].random_inputs(rng, count), start)
    _run(layers, layers[0].random_inputs(rng, len(TREE)), committed, "tree", TREE)
    for one in layers:
        one.commit.run()
    committed += len(TREE.path)
    _assert_same(layers, committed)
    _run(layers, layers[0].random_inputs(rng, 40), committed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "start, first, end", [(500, 500, 520), (505, 510, 700), (256, 300, 512), (511, 0, 513)]
)
def test_a_copy_comes_back_across_the_end_of_the_ring(start, first, end, dtype):
    """The positions asked for, and no others."""
    rng = np.random.default_rng(start)
    source, target = (KvCache(2, 48, 0, dtype, RING) for _ in range(2))
    for cache in (source, target):
        arrays = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
        for array in arrays:
            array[:] = rng.integers(-100, 100, array.shape)
    before = target.copy(256, 512)
    target.put(source.copy(start, end), start, end, first)
    slots = np.arange(max(start, first), end) % RING
    is_put = np.isin(np.arange(RING), slots)
    after = target.copy(256, 512)
    for old, new, wanted in zip(before, after, source.copy(256, 512), strict=True):
        if new.ndim == 5:  # keys in tiles
            old, new, wanted = (a.swapaxes(2, 3).reshape(2, RING, -1) for a in (old, new, wanted))
        np.testing.assert_array_equal(new[:, is_put], wanted[:, is_put])
        np.testing.assert_array_equal(new[:, ~is_put], old[:, ~is_put])


def test_a_ring_takes_no_more_memory_for_a_longer_context():
    sizes = [KvCache(2, 48, capacity, np.int8, RING).values.nbytes for capacity in (1000, 100_000)]
    assert sizes[0] == sizes[1] < KvCache(2, 48, 1000, np.int8).values.nbytes


def test_a_ring_needs_a_window_and_whole_chunks():
    with pytest.raises(AssertionError, match="bounded"):
        Layer(2, 1, 32, ring_len=RING)
    with pytest.raises(AssertionError, match="side by side"):
        Layer(2, 1, 32, ring_len=RING + 32, window=9)
