"""The convolution of a block draft on the CPU."""

import numpy as np
import pytest
import torch

from draftree.kernels.cpu.block_conv import record_block_conv
from draftree.kernels.cpu.pass_args import PassArgs
from draftree.kernels.cpu.program import Program
from tests.kernels.passes import poison, pool, randn, set_rows
from tests.kernels.reference.block_conv import block_conv_reference


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(("taps", "group_len"), [(1, 16), (2, 16), (3, 48)])
def test_equals_reference(taps: int, group_len: int, num_threads: int, is_added: bool) -> None:
    rng, width = np.random.default_rng(taps), 144
    x, base = randn(rng, 7, width), randn(rng, taps, width)
    own = randn(rng, 7, 2 * taps * width // group_len)[:, : taps * width // group_len]
    before = randn(rng, 7, width)
    out = before.copy() if is_added else poison(7, width)
    step, program = PassArgs(7, 1), Program(pool(num_threads))
    record_block_conv(program, step, x, own, base, out, is_added=is_added)
    set_rows(step, 5)
    program.run()
    arrays = (torch.from_numpy(np.ascontiguousarray(array)) for array in (x, own, base))
    expected = block_conv_reference(*arrays).numpy() + (before if is_added else 0.0)
    np.testing.assert_allclose(out[:5], expected[:5], rtol=1e-5, atol=1e-5)
    assert np.array_equal(out[5:], before[5:]) if is_added else np.isnan(out[5:]).all()


def test_later_rows_need_the_inputs() -> None:
    x, base = np.zeros((4, 32), np.float32), np.zeros((2, 32), np.float32)
    with pytest.raises(AssertionError, match="out must not be x"):
        own = np.zeros((4, 4), np.float32)
        record_block_conv(Program(pool(1)), PassArgs(4, 1), x, own, base, x, is_added=False)
