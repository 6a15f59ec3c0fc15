import numpy as np
import pytest
import torch

from draftree.kernels.cpu.elementwise import (
    record_copy_columns,
    record_gather_rows,
    record_sigmoid_mul,
    record_silu_mul,
)
from draftree.kernels.cpu.pass_args import PassArgs
from draftree.kernels.cpu.program import Program
from tests.kernels.passes import poison, pool, randn, set_rows

SIZES = [16, 63, 65, 300, 1536]


def _run(record, max_rows, num_rows, num_threads=2):
    step, program = PassArgs(max_rows, max_rows), Program(pool(num_threads))
    record(program, step)
    set_rows(step, num_rows)
    program.run()


@pytest.mark.parametrize("cols", SIZES)
def test_silu_mul(cols):
    rng = np.random.default_rng(cols)
    gate, up, out = 8 * randn(rng, 6, cols), randn(rng, 6, cols), poison(6, cols)
    _run(lambda p, s: record_silu_mul(p, s, gate, up, out), 6, 5)
    expected = torch.nn.functional.silu(torch.from_numpy(gate).double()) * torch.from_numpy(up)
    np.testing.assert_allclose(out[:5], expected[:5], rtol=1e-6, atol=1e-6)
    assert np.isnan(out[5:]).all()


def test_silu_is_right_far_from_zero():
    gate = np.array([[-200.0, -90.0, -50.0, 0.0, 50.0, 90.0, 200.0]], np.float32)
    out = poison(1, 7)
    _run(lambda p, s: record_silu_mul(p, s, gate, np.ones_like(gate), out), 1, 1)
    expected = torch.nn.functional.silu(torch.from_numpy(gate).double())
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-30)


def test_sigmoid_mul_with_gates_inside_heads():
    rng = np.random.default_rng(0)
    x, both = randn(rng, 5, 3 * 48), randn(rng, 5, 3 * 2 * 48)
    before, gate = x.copy(), both.reshape(5, 3, 2, 48)[:, :, 1]
    _run(lambda p, s: record_sigmoid_mul(p, s, x.reshape(5, 3, 48), gate), 5, 4)
    expected = before.reshape(5, 3, 48) * torch.sigmoid(torch.from_numpy(gate).double()).numpy()
    np.testing.assert_allclose(x[:4], expected.reshape(5, -1)[:4], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(x[4], before[4])


@pytest.mark.parametrize("cols", SIZES)
def test_gather_rows(cols):
    rng = np.random.default_rng(cols)
    x, out = randn(rng, 8, cols), poison(8, cols)
    step, program = PassArgs(8, 8), Program(pool(2))
    record_gather_rows(program, step, x, out)
    set_rows(step, 8)
    step.set_rows(np.array([7, 2, 2]))
    program.run()
    np.testing.assert_array_equal(out[:3], x[[7, 2, 2]])
    assert np.isnan(out[3:]).all()


def test_copy_columns():
    rng = np.random.default_rng(0)
    src, dst = randn(rng, 4, 65), poison(4, 200)
    _run(lambda p, s: record_copy_columns(p, s, src, dst, 65), 4, 3)
    np.testing.assert_array_equal(dst[:3, 65:130], src[:3])
    assert np.isnan(dst[:, :65]).all() and np.isnan(dst[:, 130:]).all() and np.isnan(dst[3]).all()


def test_columns_that_do_not_fit_are_refused():
    with pytest.raises(AssertionError, match="do not fit"):
        _run(lambda p, s: record_copy_columns(p, s, poison(2, 8), poison(2, 10), 4), 2, 1)
