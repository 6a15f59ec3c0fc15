"""The GPU's weight layout: the CUDA sources of packing and decoding, run by the emulator."""

import numpy as np
import pytest
import torch

from draftree.kernels.cuda.compile import Gpu
from draftree.kernels.cuda.layout import unit_format
from draftree.kernels.cuda.linear import plan_linear
from draftree.kernels.cuda.pack import pack
from draftree.kernels.cuda.prefill import expand
from draftree.kernels.cuda.sample import random_raw
from draftree.kernels.quant.formats import QuantType, dequantize
from tests.kernels.emulator import emulated_gpu

NATIVE = [
    *(QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.Q8_0, QuantType.Q4_0),
    *(QuantType.Q4_1, QuantType.Q5_0, QuantType.Q5_1, QuantType.F16, QuantType.BF16, QuantType.F32),
]


@pytest.mark.parametrize("qtype", NATIVE, ids=lambda qtype: qtype.name)
def test_units_decode_to_the_weights(qtype: QuantType) -> None:
    gpu = emulated_gpu()
    num_rows, num_cols = 150, 768 if qtype.block_len == 256 else 576
    raw = random_raw(qtype, num_rows, num_cols, torch.Generator().manual_seed(1)).numpy()
    matrix = pack(raw, qtype, gpu)
    out, scale = expand(matrix, 0, matrix.num_tiles, gpu).numpy(), matrix.row_scale.numpy()
    weights = dequantize(raw, qtype).astype(np.float64)
    assert not out[num_rows:].any() and not out[:, num_cols:].any()
    difference = out[:num_rows, :num_cols].astype(np.float64) * scale[:num_rows, None] - weights
    assert np.linalg.norm(difference) < 4e-4 * np.linalg.norm(weights)
    largest = np.abs(weights).max(axis=1, keepdims=True)
    assert np.all(np.abs(difference) < 1.5e-3 * largest)
    if qtype in (QuantType.F16, QuantType.BF16):
        assert not difference.any()


def test_layouts_stay_within_their_bits() -> None:
    assert unit_format(QuantType.Q4_K).bits_per_weight <= 4.7
    for qtype in QuantType:
        form = unit_format(qtype)
        assert form.bits_per_weight <= max(form.qtype.bits_per_weight + 0.125, 4.0)
        assert form.unit_bytes % 16 == 0, "units are copied 16 bytes at a time"


@pytest.mark.parametrize("shared", [(101376, 102400), (166912, 167936), (232448, 233472)])
def test_every_format_and_number_of_tokens_has_a_plan_that_fits(shared: tuple[int, int]) -> None:
    per_block, per_sm = shared
    device = Gpu(0, 90, 100, per_sm, per_block)
    for qtype in NATIVE:
        for num_tokens in range(1, 65):
            plan = plan_linear(unit_format(qtype), num_tokens, device)
            assert plan.num_stages >= 2
            assert plan.shared_bytes + 1024 < per_block
            assert 8 * plan.token_tiles >= min(num_tokens, 16), "small passes take one launch"
