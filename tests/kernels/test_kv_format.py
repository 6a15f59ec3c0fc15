"""Formats of cached keys and values: sizes, bits, and what rounding costs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.kv_coder import _pack, _unpack, decode, encode, rotate, rotate_back
from draftree.kernels.quant.kv_format import BITS, KEY_FORMATS, VALUE_FORMATS, KvCode, KvFormat

FORMATS = sorted({*KEY_FORMATS.values(), *VALUE_FORMATS.values()}, key=repr)
DIMS = (64, 128, 256)
# Of the mean square of normal numbers: what rounding may cost, and must cost.
COSTS = {
    KvCode.HALF: (0.0, 1e-6),
    KvCode.BYTE: (1e-6, 1e-4),
    KvCode.NIBBLE: (4e-3, 1.2e-2),
    KvCode.FIVE: (1e-3, 3e-3),
    KvCode.LEVELS_4: (6e-3, 1.2e-2),
    KvCode.LEVELS_3: (2e-2, 4e-2),
}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.code.name)
def test_rounding_costs_what_the_bits_promise(form: KvFormat, dim: int) -> None:
    rows = normal(200, 3, dim) * np.float32(5.0)
    raw = encode(rows, form)
    assert raw.shape == (200, 3, form.row_bytes(dim)) and raw.shape[-1] % 16 == 0
    cost = np.mean((decode(raw, dim, form) - rows) ** 2) / np.mean(rows**2)
    least, most = COSTS[form.of(dim).code]
    assert least <= cost <= most


def test_a_token_of_a_large_model_takes_what_the_documents_say() -> None:
    """16 layers of 4 heads with 256 dimensions."""
    sizes = {
        name: 64 * (form.row_bytes(256) + VALUE_FORMATS[name].row_bytes(256))
        for name, form in KEY_FORMATS.items()
    }
    assert sizes == {"f16": 65536, "q8_0": 34816, "q4": 18432, "tq3_0": 14336}


@pytest.mark.parametrize("name", ["q4", "tq3_0"])
def test_heads_of_64_have_keys_of_five_bits_in_the_bytes_of_four(name: str) -> None:
    form = KEY_FORMATS[name]
    assert form.of(64).code is KvCode.FIVE and form.of(256) is form and form.of(64).is_rotated
    assert form.row_bytes(64) == KvFormat(KvCode.LEVELS_4, 64).row_bytes(64) == 48
    assert VALUE_FORMATS["q4"].row_bytes(64) == 48 and VALUE_FORMATS["tq3_0"].row_bytes(64) == 32
    assert VALUE_FORMATS["tq3_0"].group_of(64) == 16 and VALUE_FORMATS["tq3_0"].group_of(256) == 128


def test_keys_of_128_have_a_bit_more_than_the_name_says() -> None:
    q4, tq3 = KEY_FORMATS["q4"], KEY_FORMATS["tq3_0"]
    assert q4.of(128) == q4.of(64) and tq3.of(128).code is KvCode.LEVELS_4
    assert (q4.row_bytes(128), VALUE_FORMATS["q4"].row_bytes(128)) == (96, 80)
    assert (tq3.row_bytes(128), VALUE_FORMATS["tq3_0"].row_bytes(128)) == (80, 64)
    assert q4.is_centred(64, has_bias=False) and not q4.is_centred(128, has_bias=False)
    assert not KEY_FORMATS["q8_0"].is_centred(64, has_bias=False)


@pytest.mark.parametrize("code", [c for c in KvCode if c is not KvCode.HALF])
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_packing_loses_nothing(code: KvCode, seed: int) -> None:
    limit = 2 ** BITS[code]
    codes = np.random.default_rng(seed).integers(0, limit, (3, 64)).astype(np.uint8)
    assert np.array_equal(_unpack(_pack(codes, code), code), codes)


@pytest.mark.parametrize("dim", DIMS)
def test_rotation_keeps_products_and_spreads_large_numbers(dim: int) -> None:
    a, b = normal(5, dim), normal(5, dim, seed=1)
    a[:, 3] = 100.0
    turned = rotate(a)
    assert np.allclose((turned * rotate(b)).sum(-1), (a * b).sum(-1), rtol=1e-3, atol=1e-2)
    assert np.allclose(rotate_back(turned), a, atol=1e-3)
    assert np.abs(turned).max() < 30


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.code.name)
def test_nothing_stays_nothing_and_large_numbers_stay_finite(form: KvFormat) -> None:
    assert not decode(np.zeros((2, form.row_bytes(64)), np.uint8), 64, form).any()
    assert not decode(encode(np.zeros((2, 64), np.float32), form), 64, form).any()
    assert np.isfinite(decode(encode(np.full((1, 64), 6e4, np.float32), form), 64, form)).all()


@pytest.mark.parametrize(
    "form", [f for f in FORMATS if f.code in (KvCode.LEVELS_3, KvCode.LEVELS_4)]
)
def test_levels_keep_the_norm(form: KvFormat) -> None:
    rows = normal(50, 256)
    got = decode(encode(rows, form), 256, form)
    assert np.allclose(np.linalg.norm(got, axis=-1), np.linalg.norm(rows, axis=-1), rtol=2e-3)


def test_shapes_that_do_not_fit_are_known() -> None:
    assert KEY_FORMATS["f16"].can_hold(24) and not KEY_FORMATS["q4"].can_hold(96)
    assert VALUE_FORMATS["q4"].can_hold(96) and not VALUE_FORMATS["q8_0"].can_hold(80)
