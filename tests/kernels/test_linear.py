"""The matrix product against float64, and batch-invariant to the bit."""

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.kernels.cpu.isa import PORTABLE, Isa, current_isa, supported_isas
from draftree.kernels.cpu.linear import _linear_kernel, record_linear
from draftree.kernels.cpu.pack import Weight, pack
from draftree.kernels.cpu.pass_args import NUM_ROWS, PassArgs
from draftree.kernels.cpu.program import Program
from draftree.kernels.cpu.quantize import QuantizedRows, quantized_bytes, record_quantize
from draftree.kernels.cpu.thread_pool import FIRST_ARG, ThreadPool
from draftree.kernels.quant.formats import QuantType, dequantize
from draftree.kernels.quant.layout import block_layout
from tests.kernels.raw import random_raw

EPS = 2.0**-24
# One format for each width of integers; the others share their code.
SOME_TYPES = [QuantType.Q4_1, QuantType.Q5_1, QuantType.Q6_K, QuantType.Q8_0]
BLOCK_TYPES = [qtype for qtype in QuantType if block_layout(qtype) is not None]
OTHER_ISAS = [isa for isa in supported_isas() if isa != current_isa()]


@pytest.fixture(scope="module")
def pools():
    pools = {count: ThreadPool(count) for count in (1, 2, 3)}
    yield pools
    for pool in pools.values():
        pool.close()


def _multiply(
    pool: ThreadPool,
    weight: Weight,
    x: np.ndarray,
    num_tokens: int | None = None,
    *,
    bias: np.ndarray | None = None,
    start: np.ndarray | None = None,
) -> np.ndarray:
    """x @ weight.T for the first num_tokens rows, added to start; other rows stay untouched."""
    count = len(x) if num_tokens is None else num_tokens
    step = PassArgs(max(len(x), 1), 1)
    step.control[0] = count
    out = np.full((len(x), weight.rows), np.nan, np.float32)
    if start is not None:
        out[:count] = start
    buffer = np.full(quantized_bytes(len(x), -(-weight.cols // 32) * 32), 0xFF, np.uint8)
    program = Program(pool)
    accumulate = start is not None
    record_linear(program, step, x, weight, out, bias=bias, accumulate=accumulate, buffer=buffer)
    program.run()
    assert np.isnan(out[count:]).all(), "rows beyond the pass were written"
    return out[:count]


def _quantize(pool: ThreadPool, x: np.ndarray) -> QuantizedRows:
    step = PassArgs(len(x), 1)
    step.control[0] = len(x)
    program = Program(pool)
    rows = record_quantize(program, step, x, isa=PORTABLE)
    program.run()
    return rows


def _activations(rows: QuantizedRows) -> np.ndarray:
    """What the kernel multiplies with, float64 [tokens, cols]."""
    integers = rows.records[:, :, :32].view(np.int8).astype(np.float64)
    scales = np.ascontiguousarray(rows.records[:, :, 32:36]).view(np.float32).astype(np.float64)
    return (integers * scales).reshape(len(rows.records), -1)


def _check(
    pool: ThreadPool, qtype: QuantType, isa: Isa, rows: int, cols: int, num_tokens: int
) -> None:
    """Within the rounding of a float32 sum over groups of the float64 product."""
    rng = np.random.default_rng(rows * cols)
    raw = random_raw(rng, qtype, rows, cols)
    x = rng.standard_normal((num_tokens, cols)).astype(np.float32)
    weights = dequantize(raw, qtype).astype(np.float64)
    values = _activations(_quantize(pool, x)) if block_layout(qtype) else x.astype(np.float64)
    bias = rng.standard_normal(rows).astype(np.float32)
    found = _multiply(pool, pack(raw, qtype, isa=isa), x, bias=bias)
    # Scale and min are rounded apart, so the size of each counts, not of what they add up to.
    size = np.abs(values) @ np.abs(weights).T + _size_of_mins(raw, qtype, values) + np.abs(bias)
    steps = cols if block_layout(qtype) is None else 3 * cols // 16
    assert (np.abs(found - (values @ weights.T + bias)) <= 2 * steps * EPS * size).all()


def _size_of_mins(raw: np.ndarray, qtype: QuantType, values: np.ndarray) -> np.ndarray:
    layout = block_layout(qtype)
    if layout is None or not layout.has_min:
        return np.zeros((len(values), len(raw)))
    largest = 4.0  # of |min| in random_raw: 2 / (2^bits * 32) * 63 and 2 / 2^bits are below it
    return largest * np.abs(values).sum(1, keepdims=True) + np.zeros((1, len(raw)))


@pytest.mark.parametrize("qtype", QuantType, ids=lambda qtype: qtype.name)
def test_product_of_every_format(pools, qtype: QuantType) -> None:
    _check(pools[2], qtype, current_isa(), 85, 512, 19)


@pytest.mark.parametrize("isa", OTHER_ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("qtype", SOME_TYPES, ids=lambda qtype: qtype.name)
def test_instruction_sets_give_the_same_bits(pools, qtype: QuantType, isa: Isa) -> None:
    rng = np.random.default_rng(5)
    raw = random_raw(rng, qtype, 53, 768)
    x = rng.standard_normal((13, 768)).astype(np.float32)
    best = _multiply(pools[2], pack(raw, qtype), x)
    np.testing.assert_array_equal(best, _multiply(pools[2], pack(raw, qtype, isa=isa), x))
    assert np.abs(best).max() > 1


@pytest.mark.parametrize("isa", supported_isas(), ids=lambda isa: isa.name)
@pytest.mark.parametrize("qtype", SOME_TYPES, ids=lambda qtype: qtype.name)
def test_largest_integers_do_not_overflow(pools, qtype: QuantType, isa: Isa) -> None:
    byte = 0x80 if qtype == QuantType.Q8_0 else 0xFF
    raw = np.full((16, 256 // qtype.block_len, qtype.block_bytes), byte, np.uint8)
    layout = block_layout(qtype)
    assert layout is not None
    if layout.has_min:
        raw[:, :, layout.min_at : layout.min_at + 2] = 0
    raw[:, :, layout.scale_at : layout.scale_at + 2] = np.float16([1.0]).view(np.uint8)
    raw = raw.reshape(16, -1)
    x = np.full((9, 256), 127.0, np.float32)
    x[1::2] *= -1
    weights = dequantize(raw, qtype).astype(np.float64)
    assert np.abs(weights).min() >= 15
    found = _multiply(pools[1], pack(raw, qtype, isa=isa), x)
    np.testing.assert_array_equal(found, x.astype(np.float64) @ weights.T)


@pytest.mark.parametrize("qtype", QuantType, ids=lambda qtype: qtype.name)
@settings(max_examples=6, deadline=None)
@given(
    rows=st.integers(1, 70),
    blocks=st.integers(1, 3),
    num_tokens=st.one_of(st.integers(1, 64), st.sampled_from([100, 257, 600])),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_a_row_is_batch_invariant(
    pools, qtype: QuantType, rows: int, blocks: int, num_tokens: int, threads: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    cols = blocks * max(qtype.block_len, 32) - (seed % 32 if block_layout(qtype) is None else 0)
    raw = random_raw(rng, qtype, rows, cols)
    weight = pack(raw, qtype, pool=pools[threads])
    x = rng.standard_normal((num_tokens, cols)).astype(np.float32)
    together = _multiply(pools[threads], weight, x)
    assert np.isfinite(together).all()
    for row in {0, num_tokens // 2, num_tokens - 1}:
        alone = _multiply(pools[1], weight, x[row : row + 1])
        np.testing.assert_array_equal(alone[0], together[row])
    order = rng.permutation(num_tokens)
    mixed = _multiply(pools[3], weight, np.ascontiguousarray(x[order]))
    np.testing.assert_array_equal(mixed, together[order])


def test_a_thread_does_what_others_have_not_begun(pools) -> None:
    """Threads have strips of their own; where one of three comes alone, it does them all."""
    rng = np.random.default_rng(9)
    weight = pack(random_raw(rng, QuantType.Q4_1, 100, 64), QuantType.Q4_1, pool=pools[1])
    x = rng.standard_normal((5, 64)).astype(np.float32)
    step, out = PassArgs(5, 1), np.zeros((5, 100), np.float32)
    step.control[0] = 5
    program = Program(pools[3])
    record_linear(program, step, _quantize(pools[1], x), weight, out)
    program._freeze()
    records, tickets = program._arrays
    address = records.ctypes.data + 8 * FIRST_ARG
    multiply = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(int(records[0, 0]))
    multiply(address, tickets.ctypes.data, 1, 3)
    np.testing.assert_array_equal(out, _multiply(pools[1], weight, x))
    out[:] = 0
    multiply(address, tickets.ctypes.data, 0, 3)  # comes too late
    assert not out.any()


@pytest.mark.parametrize("is_run_between", [False, True])
def test_a_product_knows_the_weights_of_the_next(pools, is_run_between: bool) -> None:
    rng = np.random.default_rng(10)
    weights = [
        pack(random_raw(rng, QuantType.Q8_0, rows, 32), QuantType.Q8_0, pool=pools[1])
        for rows in (48, 100)
    ]
    step, program = PassArgs(1, 1), Program(pools[1])
    rows = _quantize(pools[1], np.zeros((1, 32), np.float32))
    for weight in weights:
        record_linear(program, step, rows, weight, np.zeros((1, weight.rows), np.float32))
        if is_run_between:
            program.run()
    data = weights[1].data
    program._freeze()
    first, last = (list(row) for row in program._arrays[0])
    at = first.index(data.ctypes.data)
    assert first[at : at + 3] == [data.ctypes.data, data.shape[1], data.shape[0]]
    assert last[at : at + 3] == [0, 0, 0]


@pytest.mark.parametrize("isa", OTHER_ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("qtype", SOME_TYPES, ids=lambda qtype: qtype.name)
def test_other_instruction_sets_are_row_invariant(pools, qtype: QuantType, isa: Isa) -> None:
    rng = np.random.default_rng(6)
    raw = random_raw(rng, qtype, 45, 256)
    x = rng.standard_normal((64, 256)).astype(np.float32)
    weight = pack(raw, qtype, isa=isa)
    together = _multiply(pools[2], weight, x)
    for count in range(1, 64):
        np.testing.assert_array_equal(_multiply(pools[1], weight, x, count), together[:count])


@pytest.mark.parametrize("qtype", QuantType, ids=lambda qtype: qtype.name)
def test_exact_weights_are_multiplied_in_float32(pools, qtype: QuantType) -> None:
    rng = np.random.default_rng(7)
    raw = random_raw(rng, qtype, 50, 256)
    x = rng.standard_normal((11, 256)).astype(np.float32)
    weights = dequantize(raw, qtype).astype(np.float64)
    found = _multiply(pools[2], pack(raw, qtype, exact=True), x)
    size = np.abs(x.astype(np.float64)) @ np.abs(weights).T
    assert (np.abs(found - x.astype(np.float64) @ weights.T) <= 256 * EPS * size).all()
    chain = np.zeros(50)  # one fused step per column, in order
    for k in range(256):
        chain = (x[3, k].astype(np.float64) * weights[:, k] + chain).astype(np.float32)
    np.testing.assert_allclose(found[3], chain, rtol=0, atol=2 * EPS * size[3].max())


@pytest.mark.parametrize("qtype", [QuantType.F16, QuantType.Q4_K], ids=lambda qtype: qtype.name)
@pytest.mark.parametrize("rows", [16, 37])
def test_bias_and_adding_to_what_is_there(pools, qtype: QuantType, rows: int) -> None:
    rng = np.random.default_rng(8)
    raw = random_raw(rng, qtype, rows, 256)
    weight = pack(raw, qtype)
    x = rng.standard_normal((29, 256)).astype(np.float32)
    bias = rng.standard_normal(rows).astype(np.float32)
    start = rng.standard_normal((21, rows)).astype(np.float32)
    plain = _multiply(pools[2], weight, x, 21)
    with_bias = _multiply(pools[2], weight, x, 21, bias=bias)
    np.testing.assert_array_equal(with_bias, plain + bias)
    added = _multiply(pools[2], weight, x, 21, start=start)
    np.testing.assert_array_equal(added, start + plain)
    both = _multiply(pools[2], weight, x, 21, start=start, bias=bias)
    np.testing.assert_array_equal(both, start + (plain + bias))


def test_quantised_rows_are_shared_and_float_weights_read_the_source(pools) -> None:
    rng = np.random.default_rng(9)
    x = rng.standard_normal((5, 256)).astype(np.float32)
    step = PassArgs(5, 5)
    step.control[NUM_ROWS] = 4
    program = Program(pools[2])
    rows = record_quantize(program, step, x, rows_word=NUM_ROWS)
    outs = []
    for qtype in (QuantType.Q4_0, QuantType.Q6_K, QuantType.BF16):
        weight = pack(random_raw(rng, qtype, 24, 256), qtype)
        out = np.full((5, 24), np.nan, np.float32)
        record_linear(program, step, rows, weight, out, rows_word=NUM_ROWS)
        outs.append((weight, out))
    assert [row[1] for row in program._rows] == [0, 1, 0, 0]  # which of them wait for others
    program.run()
    for weight, out in outs:
        np.testing.assert_array_equal(out[:4], _multiply(pools[1], weight, x[:4]))
        assert np.isnan(out[4]).all()


def test_activations_are_rounded_to_the_nearest_of_255_steps(pools) -> None:
    rng = np.random.default_rng(10)
    x = (rng.standard_normal((7, 320)) * 10.0 ** rng.integers(-30, 30, (7, 1))).astype(np.float32)
    x[3, 32:64] = 0
    rows = _quantize(pools[2], x)
    groups = x.reshape(7, 10, 32).astype(np.float64)
    largest = np.abs(groups).max(2, keepdims=True)
    error = np.abs(_activations(rows).reshape(groups.shape) - groups)
    assert (error <= largest / 254 * (1 + 1e-5)).all()
    integers = rows.records[:, :, :32].view(np.int8).astype(np.int64)
    assert np.abs(integers).max() == 127
    sums = np.stack([integers.sum(2), integers[..., :16].sum(2), integers[..., 16:].sum(2)], 2)
    scales = np.ascontiguousarray(rows.records[:, :, 32:36]).view(np.float32)
    floats = np.ascontiguousarray(rows.records[:, :, 36:48]).view(np.float32)
    np.testing.assert_array_equal(floats, (scales * sums.astype(np.float32)))
    negated = np.ascontiguousarray(rows.records[:, :, 48:60]).view(np.int32)
    np.testing.assert_array_equal(negated, -sums)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("qtype", [QuantType.Q8_0, QuantType.Q4_1, QuantType.Q6_K])
def test_what_is_not_finite_stays_visible(pools, qtype: QuantType, bad: float) -> None:
    rng = np.random.default_rng(11)
    x = rng.standard_normal((9, 256)).astype(np.float32)
    weight = pack(random_raw(rng, qtype, 20, 256), qtype)
    before = _multiply(pools[1], weight, x)
    x[4, 77] = bad
    after = _multiply(pools[1], weight, x)
    assert not np.isfinite(after[4]).any()
    np.testing.assert_array_equal(np.delete(after, 4, 0), np.delete(before, 4, 0))


@pytest.mark.parametrize("isa", supported_isas(), ids=lambda isa: isa.name)
def test_a_pass_may_have_no_rows(pools, isa: Isa) -> None:
    raw = random_raw(np.random.default_rng(12), QuantType.Q4_1, 40, 64)
    x = np.ones((3, 64), np.float32)
    for weight in (pack(raw, QuantType.Q4_1, isa=isa), pack(raw, QuantType.Q4_1, exact=True)):
        assert _multiply(pools[2], weight, x, 0).shape == (0, 40)


def test_wrong_shapes_are_refused(pools) -> None:
    weight = pack(random_raw(np.random.default_rng(0), QuantType.Q8_0, 16, 64), QuantType.Q8_0)
    program, step = Program(pools[1]), PassArgs(2, 1)
    out = np.zeros((2, 16), np.float32)
    with pytest.raises(AssertionError, match="columns"):
        record_linear(program, step, np.zeros((2, 96), np.float32), weight, out)
    with pytest.raises(AssertionError, match="multiple of 32"):
        record_quantize(program, step, np.zeros((2, 33), np.float32))


def test_a_kernel_closes_over_plain_values() -> None:
    """A compiled function among them would be another one in every process: code kept on disk would
    never be found again.
    """
    cells = _linear_kernel(4, 0, 16)._function.__closure__
    assert cells and all(isinstance(cell.cell_contents, int) for cell in cells)


@pytest.mark.parametrize("qtype", SOME_TYPES, ids=lambda qtype: qtype.name)
def test_every_tile_has_the_bits_of_one_token(pools, qtype: QuantType) -> None:
    rng = np.random.default_rng(13)
    weight = pack(random_raw(rng, qtype, 45, 256), qtype)
    x = rng.standard_normal((26, 256)).astype(np.float32)
    alone = np.concatenate([_multiply(pools[1], weight, x[i : i + 1]) for i in range(26)])
    for count in range(1, 27):
        np.testing.assert_array_equal(_multiply(pools[2], weight, x, count), alone[:count])
