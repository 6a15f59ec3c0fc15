import numpy as np
import pytest
import torch

from draftree.kernels.cpu.norm import record_gated_norm, record_head_norm, record_rms_norm
from draftree.kernels.cpu.pass_args import NUM_ROWS, PassArgs
from draftree.kernels.cpu.program import Program
from tests.kernels.passes import poison, pool, randn, set_rows
from tests.kernels.reference.norm import gated_norm_reference, rms_norm_reference


def _rms_norm(x, weight, num_rows, num_threads=2, eps=1e-5):
    step, out, program = PassArgs(len(x), 1), poison(*x.shape), Program(pool(num_threads))
    record_rms_norm(program, step, x, weight, eps, out)
    set_rows(step, num_rows)
    program.run()
    return out


@pytest.mark.parametrize("cols", [16, 48, 63, 65, 576, 1030])
def test_rms_norm_equals_reference(cols):
    rng = np.random.default_rng(cols)
    x, weight = randn(rng, 9, cols), randn(rng, cols)
    out = _rms_norm(x, weight, num_rows=7)
    expected = rms_norm_reference(torch.from_numpy(x), torch.from_numpy(weight), 1e-5)
    np.testing.assert_allclose(out[:7], expected[:7], rtol=2e-6, atol=1e-6)
    assert np.isnan(out[7:]).all()


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_row_does_not_depend_on_the_others(num_threads):
    rng = np.random.default_rng(1)
    x, weight = randn(rng, 33, 65), randn(rng, 65)
    together = _rms_norm(x, weight, 33, num_threads)
    alone = [_rms_norm(x[i : i + 1].copy(), weight, 1)[0] for i in range(33)]
    np.testing.assert_array_equal(together, alone)


def test_rms_norm_in_place_with_its_own_row_count():
    rng = np.random.default_rng(2)
    x, weight = randn(rng, 6, 64), randn(rng, 64)
    expected = _rms_norm(x, weight, 3)[:3]
    before, step, program = x.copy(), PassArgs(6, 6), Program(pool(2))
    record_rms_norm(program, step, x, weight, 1e-5, x, NUM_ROWS)
    set_rows(step, 6)
    step.set_rows(np.arange(3))
    program.run()
    np.testing.assert_array_equal(x[:3], expected)
    np.testing.assert_array_equal(x[3:], before[3:])


@pytest.mark.parametrize("head_dim", [32, 64, 72, 128])
def test_head_norm_on_part_of_each_head(head_dim):
    """Queries and gates side by side in each head: only the queries are normalised."""
    rng = np.random.default_rng(head_dim)
    x, weight = randn(rng, 5, 3 * 2 * head_dim), randn(rng, head_dim)
    before = x.copy().reshape(5, 3, 2, head_dim)
    step, program = PassArgs(5, 1), Program(pool(2))
    view = x.reshape(5, 3, 2, head_dim)[:, :, 0]
    record_head_norm(program, step, view, 3, head_dim, weight, 1e-6)
    set_rows(step, 4)
    program.run()
    after = x.reshape(5, 3, 2, head_dim)
    expected = rms_norm_reference(torch.from_numpy(before[:, :, 0]), torch.from_numpy(weight), 1e-6)
    np.testing.assert_allclose(after[:4, :, 0], expected[:4], rtol=2e-6, atol=1e-6)
    np.testing.assert_array_equal(after[:, :, 1], before[:, :, 1])
    np.testing.assert_array_equal(after[4], before[4])


@pytest.mark.parametrize("head_dim", [32, 63, 128])
def test_gated_norm_equals_reference(head_dim):
    rng = np.random.default_rng(head_dim)
    x, z, weight = randn(rng, 4, 6 * head_dim), randn(rng, 4, 6 * head_dim), randn(rng, head_dim)
    step, out, program = PassArgs(4, 1), poison(4, 6 * head_dim), Program(pool(2))
    record_gated_norm(program, step, x, z, weight, 1e-6, 6, head_dim, out)
    set_rows(step, 3)
    program.run()
    heads = [torch.from_numpy(a).unflatten(1, (6, head_dim)) for a in (x, z)]
    expected = gated_norm_reference(*heads, torch.from_numpy(weight), 1e-6).flatten(1)
    np.testing.assert_allclose(out[:3], expected[:3], rtol=3e-6, atol=1e-6)
    assert np.isnan(out[3:]).all()
