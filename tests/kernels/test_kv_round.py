"""The CPU rounds keys and values as the formats' plain coder does, each row by itself."""

import numpy as np
import pytest

from benchmarks.kv_coder import decode, encode, rotate, rotate_back
from draftree.kernels.cpu.kv_round import record_kv_round
from draftree.kernels.cpu.ops import CpuOps
from draftree.kernels.cpu.pass_args import PassArgs
from draftree.kernels.cpu.program import Program
from draftree.kernels.ops import Heads, Rope
from draftree.kernels.quant.kv_format import KEY_FORMATS, VALUE_FORMATS, KvFormat
from tests.kernels.passes import pool, randn, set_rows

FORMATS = sorted({*KEY_FORMATS.values(), *VALUE_FORMATS.values()}, key=repr)
HEADS, ROWS = 3, 40


def by_coder(x: np.ndarray, form: KvFormat) -> np.ndarray:
    """[rows, heads, head_dim] as a format returns it."""
    turned = rotate(x) if form.is_rotated else x
    got = decode(encode(turned, form), x.shape[-1], form)
    return rotate_back(got) if form.is_rotated else got


def run(x: np.ndarray, form: KvFormat, num_rows: int, threads: int = 2) -> np.ndarray:
    out = x.copy()
    step, program = PassArgs(len(x), 1), Program(pool(threads))
    record_kv_round(program, step, out, HEADS, form)
    set_rows(step, num_rows)
    program.run()
    return out


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"{form.code.name}-{form.is_rotated}")
def test_rounding_equals_the_coder(form: KvFormat, head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    x = randn(rng, ROWS, HEADS * head_dim) * rng.lognormal(0, 1, (ROWS, 1)).astype(np.float32)
    x[3], x[4, 5] = 0.0, 300.0
    got = run(x, form, ROWS - 2)
    np.testing.assert_array_equal(got[ROWS - 2 :], x[ROWS - 2 :])
    shape = ROWS - 2, HEADS, head_dim
    want = by_coder(x[: ROWS - 2].reshape(shape), form)
    if not form.group_len:
        want = x[: ROWS - 2].reshape(shape)  # 16 bits are rounded when they are written
    got = got[: ROWS - 2].reshape(shape)
    assert not got[3].any() and np.isfinite(got).all()
    # Sums in another order move a scale by one step of 16 bits now and then.
    is_same = np.isclose(got, want, rtol=2e-3, atol=1e-3 * np.abs(want).max(-1, keepdims=True))
    assert is_same.all(axis=-1).mean() > 0.98, is_same.all(axis=-1).mean()


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"{form.code.name}-{form.is_rotated}")
def test_a_row_depends_on_itself_alone(form: KvFormat) -> None:
    x = randn(np.random.default_rng(1), ROWS, HEADS * 128)
    together = run(x, form, ROWS)
    for row in (0, 17, ROWS - 1):
        alone = run(x[row : row + 1], form, 1, threads=1)
        np.testing.assert_array_equal(alone[0], together[row])


def keys_in_cache(k: np.ndarray, centre: np.ndarray | None, name: str, interleaved: bool):
    """The cache of keys [rows, heads * 64] that were turned and written, and its operations."""
    ops = CpuOps(
        pool(2),
        max_tokens=len(k),
        max_nodes=1,
        max_ctx=64,
        kv_dtype=np.float16,
        key_format=KEY_FORMATS[name],
        value_format=VALUE_FORMATS["f16"],
    )
    cache, inv_freq = ops.new_kv(HEADS, 64, centre), 1e4 ** (-np.arange(32) / 32)
    rows, values = ops.new_rows(k.shape[1]), ops.new_rows(k.shape[1])
    with ops.scope(), ops.capture() as program:
        rope = Rope(ops.rope_table(inv_freq), 64, interleaved)
        ops.rope_and_store_kv(None, Heads(rows, None), values, cache, rope)
    rows[:] = k
    ops.step.set_chain(np.zeros(len(k), np.int64), 0)
    program.run()
    return cache, ops


@pytest.mark.parametrize("interleaved", [True, False])
def test_what_keys_share_is_not_rounded(interleaved: bool) -> None:
    rng = np.random.default_rng(3)
    centre = 20 * randn(rng, HEADS * 64)
    k = randn(rng, ROWS, HEADS * 64) + centre
    exact, _ = keys_in_cache(k, None, "f16", interleaved)
    assert exact.centre is None
    want, errors = exact.read_keys(ROWS), []
    for start in (centre, np.zeros_like(centre)):
        cache, ops = keys_in_cache(k, start, "q4", interleaved)
        errors.append(np.abs(cache.read_keys(ROWS) - want).mean())
        ops.centre_keys(cache, 4, ROWS)
        np.testing.assert_allclose(cache.centre, k[4:].mean(axis=0), atol=0.5)
    assert errors[0] < 0.1 * errors[1], errors
