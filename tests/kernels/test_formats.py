"""The block formats against ggml's own numbers and decoded values."""

import json

import numpy as np
import pytest

from draftree.kernels.quant.formats import QuantType, dequantize, row_bytes
from tests.golden import golden

QUANTS = [qtype for qtype in QuantType if qtype != QuantType.F32]


@pytest.fixture(scope="module")
def blocks() -> dict[str, np.ndarray]:
    with np.load(golden("quants/quants.npz")) as arrays:
        return dict(arrays)


def test_sizes_are_those_of_ggml() -> None:
    entries = json.loads(golden("quants/quants.json").read_text())
    assert {entry["type"] for entry in entries} == {qtype.name for qtype in QUANTS}
    for entry in entries:
        qtype = QuantType[entry["type"]]
        assert qtype.value == entry["ggml_type_id"]
        assert qtype.block_len == entry["block_elems"]
        assert qtype.block_bytes == entry["block_bytes"]


@pytest.mark.parametrize("qtype", QUANTS, ids=lambda qtype: qtype.name)
@pytest.mark.parametrize("kind", ["rand", "gauss"])
def test_decodes_bit_equal_to_ggml(
    blocks: dict[str, np.ndarray], qtype: QuantType, kind: str
) -> None:
    decoded = dequantize(blocks[f"{qtype.name}.{kind}.raw"], qtype)
    expected = blocks[f"{qtype.name}.{kind}.f32"].reshape(decoded.shape)
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded.view(np.uint32), expected.view(np.uint32))


def test_f32_passes_through_bit_equal() -> None:
    values = np.array([[0.0, -0.0, 1e-45, np.inf, -np.inf, np.nan, 3.5]], np.float32)
    decoded = dequantize(values.view(np.uint8), QuantType.F32)
    np.testing.assert_array_equal(decoded.view(np.uint32), values.view(np.uint32))


def test_result_is_writable_and_separate_from_a_read_only_source() -> None:
    for qtype in QuantType:
        raw = np.frombuffer(bytes(2 * qtype.block_bytes), np.uint8).reshape(2, -1)
        decoded = dequantize(raw, qtype)
        decoded += 1
        assert decoded.shape == (2, qtype.block_len) and not raw.any()


def test_rows_keep_their_order_whatever_their_number() -> None:
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 100, (67, 2 * QuantType.Q4_K.block_bytes), dtype=np.uint8)
    alone = [dequantize(row[None], QuantType.Q4_K)[0] for row in raw]
    np.testing.assert_array_equal(dequantize(raw, QuantType.Q4_K), np.stack(alone))


def test_accepts_no_rows_and_strided_rows() -> None:
    for qtype in QuantType:
        empty = np.zeros((0, 3 * qtype.block_bytes), np.uint8)
        assert dequantize(empty, qtype).shape == (0, 3 * qtype.block_len)
        raw = np.arange(4 * qtype.block_bytes, dtype=np.uint8).reshape(4, -1)
        np.testing.assert_array_equal(
            dequantize(raw[::2], qtype), dequantize(raw[::2].copy(), qtype)
        )


def test_bits_per_weight() -> None:
    assert QuantType.Q4_K.bits_per_weight == 4.5
    assert QuantType.Q6_K.bits_per_weight == 6.5625
    assert QuantType.BF16.bits_per_weight == 16


def test_row_bytes() -> None:
    assert row_bytes(QuantType.Q4_K, 512) == 288
    assert row_bytes(QuantType.F16, 3) == 6
    for cols in (0, -256, 255):
        with pytest.raises(ValueError, match="not a multiple of 256"):
            row_bytes(QuantType.Q6_K, cols)


def test_refuses_what_is_not_rows_of_whole_blocks() -> None:
    with pytest.raises(ValueError, match="whole Q8_0 blocks"):
        dequantize(np.zeros((1, 33), np.uint8), QuantType.Q8_0)
    with pytest.raises(ValueError, match="uint8"):
        dequantize(np.zeros((1, 34), np.int8), QuantType.Q8_0)
    with pytest.raises(ValueError, match="uint8"):
        dequantize(np.zeros(34, np.uint8), QuantType.Q8_0)
