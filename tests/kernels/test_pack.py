"""Packed weights: a plain reading of the strips gives back what the decoder says, to the bit."""

import numpy as np
import pytest

from draftree.kernels.cpu.dot import wants_signed_bytes
from draftree.kernels.cpu.form import F32, FLOAT_ROWS, quant_bytes, scale_bytes
from draftree.kernels.cpu.isa import NEON_DOTPROD, current_isa
from draftree.kernels.cpu.pack import Weight, pack
from draftree.kernels.cpu.thread_pool import ThreadPool
from draftree.kernels.quant.formats import QuantType, dequantize
from draftree.kernels.quant.layout import block_layout
from tests.kernels.raw import random_raw

BLOCK_TYPES = [qtype for qtype in QuantType if block_layout(qtype) is not None]
FLOAT_TYPES = [QuantType.F32, QuantType.F16, QuantType.BF16]
ROWS, COLS = 21, 512


def _read_integers(weight: Weight) -> np.ndarray:
    """int64 [strips * lanes, cols], zero not yet subtracted."""
    form, lanes, num_groups = weight.form, weight.strip_rows, weight.cols // 32
    size = quant_bytes(form, lanes, weight.cols)
    words = weight.data[:, :size].reshape(-1, num_groups, form.bits, lanes, 4).astype(np.int64)
    if form.bits == 8:
        units = words
    else:
        nibbles = words[:, :, :4]
        units = np.concatenate([nibbles & 15, nibbles >> 4], axis=2)
    for unit in range(8):
        if form.bits == 5:
            units[:, :, unit] |= ((words[:, :, 4] >> unit) & 1) << 4
        if form.bits == 6:
            units[:, :, unit] |= ((words[:, :, 4 + unit // 4] >> (2 * (unit % 4))) & 3) << 4
    return units.transpose(0, 3, 1, 2, 4).reshape(-1, weight.cols)


def _read_scales(weight: Weight) -> tuple[np.ndarray, np.ndarray]:
    """Scale and min, float64 [strips * lanes, cols / group_len]."""
    form, lanes = weight.form, weight.strip_rows
    period = 256 if form.is_nested else 32
    first, count = quant_bytes(form, lanes, weight.cols), weight.cols // period
    size = scale_bytes(form, lanes)
    records = weight.data[:, first : first + count * size].reshape(-1, count, size)
    parts = 2 if form.has_min else 1
    halves = np.ascontiguousarray(records[:, :, : 2 * lanes * parts]).view(np.float16)
    halves = halves.reshape(-1, count, parts, lanes).astype(np.float64)
    values = halves[:, :, :, None]
    if form.is_nested:
        small = np.ascontiguousarray(records[:, :, 2 * lanes * parts :]).view(np.int8)
        values = values * small.reshape(-1, count, parts, 256 // form.group_len, lanes)
    values = values.transpose(2, 0, 4, 1, 3).reshape(parts, weight.data.shape[0] * lanes, -1)
    return values[0], values[1] if form.has_min else np.zeros_like(values[0])


def _read_back(weight: Weight) -> np.ndarray:
    integers = _read_integers(weight)
    zero = weight.form.zero
    if weight.form.bits == 8 and wants_signed_bytes(weight.isa):
        integers, zero = integers.astype(np.uint8).view(np.int8).astype(np.int64), 0
    scale, least = (np.repeat(v, weight.form.group_len, axis=1) for v in _read_scales(weight))
    return (scale * (integers - zero) + least).astype(np.float32)


@pytest.mark.parametrize("qtype", BLOCK_TYPES, ids=lambda qtype: qtype.name)
@pytest.mark.parametrize("isa", [current_isa(), NEON_DOTPROD], ids=lambda isa: isa.name)
def test_no_bit_is_lost(qtype: QuantType, isa) -> None:
    raw = random_raw(np.random.default_rng(qtype), qtype, ROWS, COLS)
    weight = pack(raw, qtype, isa=isa)
    assert (weight.rows, weight.cols, weight.strip_rows) == (ROWS, COLS, isa.rows)
    values = _read_back(weight)
    np.testing.assert_array_equal(values[:ROWS], dequantize(raw, qtype))
    assert not values[ROWS:].any()


@pytest.mark.parametrize("qtype", QuantType, ids=lambda qtype: qtype.name)
def test_exact_weights_are_the_decoded_values(qtype: QuantType) -> None:
    raw = random_raw(np.random.default_rng(qtype), qtype, ROWS, COLS)
    weight = pack(raw, qtype, exact=True)
    assert weight.form == F32
    values = weight.data.view(np.float32).reshape(-1, COLS, FLOAT_ROWS)
    values = values.transpose(0, 2, 1).reshape(-1, COLS)
    np.testing.assert_array_equal(values[:ROWS], dequantize(raw, qtype))
    assert not values[ROWS:].any()


@pytest.mark.parametrize("qtype", FLOAT_TYPES, ids=lambda qtype: qtype.name)
def test_float_weights_keep_their_bits(qtype: QuantType) -> None:
    raw = random_raw(np.random.default_rng(1), qtype, ROWS, 33)
    weight = pack(raw, qtype)
    assert weight.form.bits == qtype.bits_per_weight
    word = np.dtype(f"u{qtype.block_bytes}")
    values = weight.data.view(word).reshape(-1, 33, FLOAT_ROWS).transpose(0, 2, 1)
    np.testing.assert_array_equal(values.reshape(-1, 33)[:ROWS], raw.view(word))


@pytest.mark.parametrize("qtype", BLOCK_TYPES, ids=lambda qtype: qtype.name)
def test_memory_is_about_that_of_the_file(qtype: QuantType) -> None:
    raw = random_raw(np.random.default_rng(0), qtype, 64, 2048)
    widened = {QuantType.Q2_K: 5.13, QuantType.Q3_K: 4.57}
    widened |= {QuantType.IQ4_NL: 8.5, QuantType.IQ4_XS: 8.32}
    limit = widened.get(qtype, 1.03 * qtype.bits_per_weight)
    assert 8 * pack(raw, qtype).data.nbytes <= limit * 64 * 2048


def test_rows_of_a_larger_array_and_many_threads() -> None:
    rng = np.random.default_rng(3)
    wide = random_raw(rng, QuantType.Q4_K, 100, 1024)
    raw = wide[:, 144 : 3 * 144]  # the middle columns: rows are not adjacent
    alone = pack(np.ascontiguousarray(raw), QuantType.Q4_K)
    pool = ThreadPool(3)
    together = pack(raw, QuantType.Q4_K, pool=pool)
    pool.close()
    np.testing.assert_array_equal(alone.data, together.data)
