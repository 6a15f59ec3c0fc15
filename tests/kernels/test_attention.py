from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.kernels.cpu.attention import (
    AttentionRows,
    KvCache,
    attention_scratch_len,
    record_attention,
    record_kv_commit,
    record_kv_write,
)
from draftree.kernels.cpu.pass_args import PassArgs
from draftree.kernels.cpu.program import Program
from tests.kernels.passes import make_tree, poison, pool, randn, set_rows, trees
from tests.kernels.reference.attention import (
    attention_reference,
    block_mask,
    chain_mask,
    tree_mask,
)

MAX_ROWS, MAX_NODES = 160, 24
# Of results of about 1; with bytes, queries and weights are rounded to 16 bits.
TOLERANCE = {np.float32: 3e-6, np.float16: 3e-6, np.int8: 1.3e-3}


def keys_by_position(cache, kv_head):
    """A copy of one head's keys as [capacity, head_dim]."""
    return cache.keys[kv_head].transpose(0, 2, 1, 3).reshape(cache.capacity, cache.head_dim)


def transform(rows, dim):
    """Each head of rows [count, heads * dim] times a Hadamard matrix, in parts of its order."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < dim & -dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (rows.reshape(-1, len(matrix)) @ matrix).reshape(rows.shape)


class Layer:
    """One attention layer over a poisoned cache, and the programs that run and commit it."""

    def __init__(
        self,
        heads,
        kv_heads,
        dim,
        capacity=640,
        dtype=np.float32,
        threads=2,
        ring_len=0,
        **options,
    ):
        self.shape = heads, kv_heads, dim
        self.step = PassArgs(MAX_ROWS, MAX_NODES)
        self.cache = KvCache(kv_heads, dim, capacity, dtype, ring_len)
        if dtype == np.int8:
            self.cache.keys[:], self.cache.values[..., :dim] = -128, -128
            self.cache.key_scales[:], self.cache.value_scales[:] = np.nan, np.nan
        else:
            self.cache.keys[:], self.cache.values[..., :dim] = np.nan, np.nan
        widths = (heads * dim, kv_heads * dim, kv_heads * dim)
        self.inputs = [poison(MAX_ROWS, width) for width in widths]
        self.out = poison(MAX_ROWS, heads * dim)
        q, k, v = self.inputs
        scratch = poison(attention_scratch_len(self.step, self.cache, heads, threads))
        self.program, self.commit = Program(pool(threads)), Program(pool(threads))
        record_kv_write(self.program, self.step, k, v, self.cache)
        rows = AttentionRows(self.step, q, self.cache, self.out, scratch)
        record_attention(self.program, [rows], heads, dim**-0.5, **options)
        record_kv_commit(self.commit, self.step, self.cache)

    def random_inputs(self, rng, count):
        """Values that the cache holds exactly, so that all types have the same reference."""
        heads, kv_heads, dim = self.shape
        found = [randn(rng, count, n * dim) for n in (heads, kv_heads, kv_heads)]
        found = [a.astype(np.float16).astype(np.float32) for a in found]
        if self.cache.dtype == np.int8:
            for rows in found[1:]:
                rows[:] = np.rint(32 * rows).clip(-127, 127) / 32
                rows[:, ::dim] = 127 / 32  # so that the scale is 1 / 32
            found[1] = transform(found[1], dim) / (dim & -dim)
        return found

    def chain(self, inputs, committed):
        set_rows(self.step, len(inputs[0]), committed)
        return self._run(inputs)

    def one_by_one(self, inputs, committed=0):
        count = len(inputs[0])
        rows = [[a[i : i + 1] for a in inputs] for i in range(count)]
        return [self.chain(row, committed + i)[0] for i, row in enumerate(rows)]

    def tree(self, tree, inputs, committed):
        tree.load(self.step, committed)
        return self._run(inputs)

    def contents(self, length):
        """Keys and values [kv_heads, length, head_dim] of the committed positions, and scales."""
        cache = self.cache
        keys = [keys_by_position(cache, h)[:length] for h in range(cache.kv_heads)]
        by_slot = (cache.values, cache.key_scales, cache.value_scales)
        return np.array(keys), *(array[:, :length].copy() for array in by_slot)

    def _run(self, inputs):
        count = len(inputs[0])
        for buffer, values in zip(self.inputs, inputs, strict=True):
            buffer[:] = np.nan
            buffer[:count] = values
        self.out[:] = np.nan
        self.program.run()
        assert np.isnan(self.out[count:]).all()
        return self.out[:count].copy()


def _reference(layer, q, k, v, mask):
    heads, kv_heads, dim = layer.shape
    tensors = [
        torch.from_numpy(a).unflatten(1, (n, dim))
        for a, n in zip((q, k, v), (heads, kv_heads, kv_heads), strict=True)
    ]
    return attention_reference(*tensors, mask, dim**-0.5).flatten(1)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (1, 1, 32), (8, 1, 32), (4, 2, 128), (5, 1, 48)]
)
def test_prefill_equals_reference(heads, kv_heads, dim, dtype):
    rng = np.random.default_rng(dim)
    layer = Layer(heads, kv_heads, dim, dtype=dtype)
    inputs, done, out = layer.random_inputs(rng, 620), 0, []
    inputs[0] *= 3  # a few keys dominate, and the largest score moves from chunk to chunk
    for count in (65, 1, 63, 160, 7, 154, 160, 10):
        out.append(layer.chain([a[done : done + count] for a in inputs], done))
        done += count
    expected = _reference(layer, *inputs, chain_mask(620, 0))
    np.testing.assert_allclose(np.concatenate(out), expected, atol=3 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [np.float32, np.int8])
@pytest.mark.parametrize("window", [1, 24, 300])
def test_windows_hide_what_is_further_back(window, dtype):
    rng = np.random.default_rng(window)
    layer = Layer(4, 2, 32, dtype=dtype, window=window)
    inputs = layer.random_inputs(rng, 420)
    out = [layer.chain([a[i : i + 140] for a in inputs], i) for i in (0, 140, 280)]
    expected = _reference(layer, *inputs, chain_mask(420, 0, window))
    np.testing.assert_allclose(np.concatenate(out), expected, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [np.float32, np.int8])
@pytest.mark.parametrize("sinks", [5, 70, 300])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_window_leaves_the_sinks(sinks, num_threads, dtype):
    """Chains and trees; sinks that end in the window's chunk, before it, and inside the window."""
    rng = np.random.default_rng(sinks)
    tree = make_tree([0, 1, 1, 2, 0, 5, 6, 7, 8, 3, 9], 11)
    for window in (24, 270):
        layer = Layer(4, 2, 32, dtype=dtype, threads=num_threads, window=window)
        layer.step.set_sinks(sinks)
        inputs, out = layer.random_inputs(rng, 560 + len(tree)), []
        for i in range(0, 560, 140):
            out.append(layer.chain([a[i : i + 140] for a in inputs], i))
        out.append(layer.tree(tree, [a[560:] for a in inputs], 560))
        masks = []
        for each in (window, 0):
            whole = torch.zeros(len(inputs[0]), len(inputs[0]), dtype=torch.bool)
            whole[:560, :560] = chain_mask(560, 0, each)
            whole[560:] = tree_mask(list(tree.parents), 560, each)
            masks.append(whole)
        is_sink = torch.arange(len(inputs[0])) < sinks
        expected = _reference(layer, *inputs, masks[0] | (masks[1] & is_sink))
        np.testing.assert_allclose(np.concatenate(out), expected, atol=3 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [np.float32, np.int8])
@pytest.mark.parametrize("window", [0, 200])
@pytest.mark.parametrize("first", [1, 255, 300])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_what_lies_before_the_first_position_is_hidden(first, window, num_threads, dtype):
    rng = np.random.default_rng(first)
    layer = Layer(4, 2, 32, dtype=dtype, threads=num_threads, window=window)
    inputs = layer.random_inputs(rng, 320)
    for i in range(0, first, 100):
        layer.chain([a[i : min(i + 100, first)] for a in inputs], i)
    layer.step.set_first(first)
    starts = range(first, 320, 110)
    out = [layer.chain([a[i : min(i + 110, 320)] for a in inputs], i) for i in starts]
    mask = chain_mask(320 - first, 0, window)
    expected = _reference(layer, *(a[first:] for a in inputs), mask)
    np.testing.assert_allclose(np.concatenate(out), expected, atol=3 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [np.float32, np.int8])
@pytest.mark.parametrize("window", [0, 24])
@pytest.mark.parametrize("committed", [0, 7, 300])
def test_bidirectional_block(committed, window, dtype):
    rng = np.random.default_rng(committed)
    layer = Layer(4, 2, 64, dtype=dtype, window=window, bidirectional=True)
    inputs = layer.random_inputs(rng, committed + 16)
    for i in range(0, committed, 100):
        layer.chain([a[i : min(i + 100, committed)] for a in inputs], i)
    out = layer.chain([a[committed:] for a in inputs], committed)
    queries = inputs[0][committed:]
    mask = block_mask(16, committed, window)
    np.testing.assert_allclose(
        out, _reference(layer, queries, *inputs[1:], mask), atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", [np.float32, np.int8])
@pytest.mark.parametrize("window", [0, 5, 270])
@pytest.mark.parametrize("committed", [0, 1, 250, 256, 400])
def test_tree_equals_reference(committed, window, dtype):
    rng = np.random.default_rng(committed)
    tree = make_tree([0, 1, 1, 2, 0, 5, 6, 7, 8, 3, 9], 11)
    layer = Layer(9, 3, 64, dtype=dtype, window=window)
    inputs = layer.random_inputs(rng, committed + len(tree))
    for i in range(0, committed, 100):
        layer.chain([a[i : min(i + 100, committed)] for a in inputs], i)
    out = layer.tree(tree, [a[committed:] for a in inputs], committed)
    mask = tree_mask(list(tree.parents), committed, window)
    expected = _reference(layer, inputs[0][committed:], *inputs[1:], mask)
    np.testing.assert_allclose(out, expected, atol=TOLERANCE[dtype])


@settings(max_examples=25, deadline=None)
@given(
    tree=trees(MAX_NODES),
    shape=st.sampled_from([(3, 1, 32), (4, 4, 32), (6, 2, 48), (8, 1, 32)]),
    committed=st.sampled_from([0, 3, 16, 243, 255, 256, 300]),
    dtype=st.sampled_from([np.float32, np.float16, np.int8]),
    num_threads=st.integers(1, 3),
    view=st.sampled_from([(0, 0), (9, 0), (60, 0), (60, 5), (60, 70), (30, 200), (40, 290)]),
)
def test_tree_and_commit_equal_token_by_token(tree, shape, committed, dtype, num_threads, view):
    window, sinks = view
    rng = np.random.default_rng(committed + len(tree))
    layer = Layer(*shape, 384, dtype, num_threads, window=window)
    plain = Layer(*shape, 384, dtype, 1, window=window)
    for one in (layer, plain):
        one.step.set_sinks(sinks)
    prompt = layer.random_inputs(rng, committed)
    inputs = layer.random_inputs(rng, len(tree))
    for i in range(0, committed, 150):
        for one in (layer, plain):
            one.chain([a[i : min(i + 150, committed)] for a in prompt], i)
    before = layer.contents(committed)
    out = layer.tree(tree, inputs, committed)
    for kept, old in zip(layer.contents(committed), before, strict=True):
        np.testing.assert_array_equal(kept, old)  # a rollback is doing nothing
    path = list(tree.path)
    steps = plain.one_by_one([a[path] for a in inputs], committed)
    np.testing.assert_array_equal(out[path], steps)
    layer.commit.run()
    length = committed + len(path)
    for kept, expected in zip(layer.contents(length), plain.contents(length), strict=True):
        np.testing.assert_array_equal(kept, expected)


def nine_heads(num_threads, dtype, view):
    layer = Layer(9, 3, 64, dtype=dtype, threads=num_threads, window=view[0])
    layer.step.set_sinks(view[1])
    return layer


@cache
def token_by_token(dtype, view):
    layer = nine_heads(3, dtype, view)
    inputs = layer.random_inputs(np.random.default_rng(1), 560)
    return inputs, layer.one_by_one(inputs)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("view", [(0, 0), (100, 5), (90, 300)])
def test_chunks_equal_token_by_token(num_threads, dtype, view):
    """Rows alone (keys split over threads) and in blocks (one thread each) give the same bits."""
    inputs, expected = token_by_token(dtype, view)
    layer, done, out = nine_heads(num_threads, dtype, view), 0, []
    for count in (130, 150, 33, 2, 1, 84, 160):
        out.append(layer.chain([a[done : done + count] for a in inputs], done))
        done += count
    np.testing.assert_array_equal(np.concatenate(out), expected)


def test_large_scores_do_not_overflow():
    layer = Layer(1, 1, 32)
    inputs = [np.full((3, 32), 100.0, np.float32) for _ in range(3)]
    inputs[1][1] = -100.0
    out = layer.chain(inputs, 0)
    np.testing.assert_allclose(out, np.full((3, 32), 100.0), rtol=1e-6)


def test_eight_bits_round_to_the_nearest():
    """Each key and value of a head by its own largest number, keys after their transform."""
    rng = np.random.default_rng(3)
    layer = Layer(2, 2, 32, dtype=np.int8)
    inputs = [randn(rng, 9, 64) * 10.0 ** rng.integers(-3, 4, (9, 1)) for _ in range(3)]
    inputs[1][4] = 0.0
    layer.chain([a.astype(np.float32) for a in inputs], 0)
    keys, values, key_scales, value_scales = layer.contents(9)
    pairs = ((transform(inputs[1], 32), keys, key_scales), (inputs[2], values, value_scales))
    for rows, quants, scales in pairs:
        rows = rows.reshape(9, 2, 32).transpose(1, 0, 2)
        np.testing.assert_allclose(scales, np.abs(rows).max(axis=2) / 127, rtol=1e-6)
        error = np.abs(quants * scales[..., None] - rows)
        assert (error <= 0.501 * scales[..., None]).all()


@pytest.mark.parametrize("dim", [32, 48, 128])
def test_a_dimension_that_is_large_in_all_keys_costs_no_precision(dim):
    """Biases of keys are such: the same for all, they do not change a result."""
    rng = np.random.default_rng(dim)
    q, k, v = (randn(rng, 40, n * dim) for n in (2, 1, 1))
    k[:, 5] += 30.0
    layer = Layer(2, 1, dim, dtype=np.int8)
    expected = _reference(layer, q, k, v, chain_mask(40, 0))
    error = np.abs(layer.chain([q, k, v], 0) - expected.numpy()).mean()
    assert error < 0.008, error  # rounded by the largest number as they are: 0.014


@pytest.mark.parametrize("count", [1, 5, 19])
def test_what_lies_behind_the_text_has_no_say(count):
    """Scales that were never written, beside values that are all zero."""
    layer = Layer(3, 1, 32, dtype=np.int8)
    layer.cache.key_scales[:], layer.cache.value_scales[:] = 1e30, 1e30
    inputs = layer.random_inputs(np.random.default_rng(count), count)
    inputs[2][:] = 0.0
    np.testing.assert_array_equal(layer.chain(inputs, 0), 0.0)
