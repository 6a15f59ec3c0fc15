"""What the CPU records for operations that share their rows."""

import numpy as np
import pytest

from draftree.kernels.ops import LayerStore
from draftree.kernels.quant.formats import QuantType
from tests.tiny import new_ops


def test_products_of_the_same_rows_share_one_quantised_copy_in_every_scope() -> None:
    ops, rng = new_ops(exact=False, num_threads=1), np.random.default_rng(0)
    raw = np.zeros((32, 2 * 34), np.uint8)
    raw.reshape(32, 2, 34)[:, :, :2] = np.array([1.0], np.float16).view(np.uint8)
    raw.reshape(32, 2, 34)[:, :, 2:] = rng.integers(0, 256, (32, 2, 32))
    weight, float_weight = (
        ops.pack(raw, QuantType.Q8_0),
        ops.pack(np.ones((32, 64), np.float32).view(np.uint8), QuantType.F32),
    )
    x = ops.new_rows(64)
    with ops.scope(), ops.capture() as program:
        rows, outs = ops.matmul_input(x), []
        ops.linear(rows, float_weight, bias=None)
        assert program._names == ["linear"], "float weights read the rows as they are"
        for _ in range(2):
            with ops.scope():
                outs.append(ops.linear(rows, weight, bias=None, add_to=ops.new_rows(32)))
    assert program._names == ["linear", "quantize", "linear", "linear"]
    x[:3] = rng.standard_normal((3, 64))
    ops.step.set_chain(np.zeros(3, np.int64), 0)
    program.run()
    assert np.array_equal(outs[0], outs[1]) and outs[0][:3].any()


def test_states_of_another_device_are_refused() -> None:
    ops = new_ops(exact=True, num_threads=1)
    with pytest.raises(TypeError, match="expected a DeltaState of this device, not LayerStore"):
        ops.snapshot(LayerStore(), 0, 1)
