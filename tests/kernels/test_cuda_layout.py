"""The GPU's weight layout, under the emulator: what packing writes, expanding reads back."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from benchmarks.random_raw import random_raw  # noqa: E402
from draftree.kernels.cuda.compile import Gpu  # noqa: E402
from draftree.kernels.cuda.layout import ROWS, stacked_format, unit_format  # noqa: E402
from draftree.kernels.cuda.linear import plan_linear  # noqa: E402
from draftree.kernels.cuda.pack import Uploader  # noqa: E402
from draftree.kernels.cuda.prefill import expand  # noqa: E402
from draftree.kernels.quant.formats import QuantType, dequantize  # noqa: E402
from tests.kernels.emulator import emulated_gpu  # noqa: E402

NATIVE = [
    *(QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.Q8_0, QuantType.Q4_0),
    *(QuantType.Q4_1, QuantType.Q5_0, QuantType.Q5_1, QuantType.F16, QuantType.BF16, QuantType.F32),
]


def make_raw(qtype: QuantType, num_rows: int, num_cols: int, seed: int = 1) -> np.ndarray:
    return random_raw(qtype, num_rows, num_cols, torch.Generator().manual_seed(seed)).numpy()


@pytest.mark.parametrize("qtype", NATIVE, ids=lambda qtype: qtype.name)
def test_units_decode_to_the_weights(qtype: QuantType) -> None:
    gpu = emulated_gpu()
    num_rows, num_cols = 150, 768 if qtype.block_len == 256 else 576
    raw = make_raw(qtype, num_rows, num_cols)
    matrix = Uploader(gpu).pack([(raw, qtype)])
    out = expand(matrix, 0, matrix.num_bands, gpu).numpy()
    weights = dequantize(raw, qtype).astype(np.float64)
    assert not out[num_rows:].any() and not out[:, num_cols:].any()
    scale = matrix.row_scale.numpy()[:num_rows, None]
    difference = out[:num_rows, :num_cols].astype(np.float64) * scale - weights
    assert np.linalg.norm(difference) < 4e-4 * np.linalg.norm(weights)
    largest = np.abs(weights).max(axis=1, keepdims=True)
    assert np.all(np.abs(difference) < 1.5e-3 * largest)
    if qtype in (QuantType.F16, QuantType.BF16):
        assert not difference.any()


def test_parts_of_a_stack_follow_each_other() -> None:
    gpu = emulated_gpu()
    kinds = ((QuantType.Q5_K, 130), (QuantType.Q4_K, 70), (QuantType.Q4_K, 3))
    parts = [(make_raw(qtype, rows, 512, rows), qtype) for qtype, rows in kinds]
    matrix = Uploader(gpu).pack(parts)
    assert matrix.format == unit_format(QuantType.Q5_K)
    out = (
        expand(matrix, 0, matrix.num_bands, gpu).numpy()[:203]
        * matrix.row_scale.numpy()[:203, None]
    )
    weights = np.concatenate([dequantize(raw, qtype) for raw, qtype in parts])
    assert np.linalg.norm(out - weights) < 4e-4 * np.linalg.norm(weights)


def test_slabs_of_any_size_give_the_same_units() -> None:
    gpu = emulated_gpu()
    parts = [(make_raw(QuantType.Q6_K, 300, 512), QuantType.Q6_K)]
    whole, pieces = Uploader(gpu).pack(parts), Uploader(gpu, slab_bytes=50_000).pack(parts)
    assert torch.equal(whole.units[0], pieces.units[0])  # the last band has rows that nobody reads
    first, second = (expand(matrix, 1, 1, gpu)[:44] for matrix in (whole, pieces))
    assert torch.equal(first, second)


def test_only_rows_that_fit_together_are_stacked() -> None:
    q4, q5, q6 = QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K
    assert stacked_format([q4, q4]) == unit_format(q4)
    assert stacked_format([q4, q5]) == unit_format(q5)
    assert stacked_format([QuantType.BF16, QuantType.F32]) == unit_format(QuantType.F16)
    assert stacked_format([q4, q6]) is None
    with pytest.raises(ValueError, match="stacked"):
        Uploader(emulated_gpu()).pack([(make_raw(q4, 4, 256), q4), (make_raw(q6, 4, 256), q6)])
    with pytest.raises(ValueError, match="stacked"):
        Uploader(emulated_gpu()).pack([(make_raw(q4, 4, 256), q4), (make_raw(q4, 4, 512), q4)])


def test_layouts_stay_within_their_bits() -> None:
    for qtype in QuantType:
        form = unit_format(qtype)
        bits_per_weight = 8 * form.unit_bytes / (ROWS * form.cols)
        assert bits_per_weight <= max(form.qtype.bits_per_weight + 0.125, 4.0)
        assert bits_per_weight <= 4.7 or qtype is not QuantType.Q4_K
        assert form.unit_bytes % 16 == 0, "units are copied 16 bytes at a time"


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("shared", [(101376, 102400), (166912, 167936), (232448, 233472)])
def test_every_format_and_number_of_tokens_has_a_plan_that_fits(
    shared: tuple[int, int], arch: int
) -> None:
    per_block, per_sm = shared
    device = Gpu(0, arch, 100, per_sm, per_block)
    for qtype in NATIVE:
        for num_tokens in range(1, 65):
            plan = plan_linear(unit_format(qtype), num_tokens, device)
            assert plan.num_stages >= 2
            assert plan.shared_bytes + 1024 < per_block
            assert 8 * plan.token_tiles >= min(num_tokens, 16), "small passes take one launch"
