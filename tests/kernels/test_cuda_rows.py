"""Copies of rows on the GPU."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from draftree.kernels.cuda.compile import Gpu  # noqa: E402
from draftree.kernels.cuda.rows import (  # noqa: E402
    block_conv,
    copy_columns,
    gather_rows,
    norm_rows,
)
from tests.kernels.reference.block_conv import block_conv_reference  # noqa: E402
from tests.kernels.reference.norm import rms_norm_reference  # noqa: E402


def rows_of(num_rows: int, num_cols: int, gpu: Gpu) -> torch.Tensor:
    """Columns of a wider array."""
    wide = torch.arange(num_rows * (num_cols + 12), dtype=torch.float32, device=gpu.place)
    return wide.view(num_rows, -1)[:, 8 : 8 + num_cols]


@pytest.mark.parametrize("num_cols", [4, 1024, 1300])
@pytest.mark.parametrize("count", [0, 3, 5])
def test_copies_reach_live_rows_and_their_columns_only(
    num_cols: int, count: int, any_gpu: Gpu
) -> None:
    live = torch.tensor([count], dtype=torch.int32, device=any_gpu.place)
    x = rows_of(5, num_cols, any_gpu)
    into = torch.full((6, 3 * num_cols), -1.0, device=any_gpu.place)
    expected = into.clone()
    expected[:count, num_cols : 2 * num_cols] = x[:count]
    copy_columns(x, into, num_cols, any_gpu, live=live)
    assert torch.equal(into, expected)


def test_rows_are_gathered(any_gpu: Gpu) -> None:
    rows = torch.tensor([4, 0, 4, 99], dtype=torch.int32, device=any_gpu.place)
    live = torch.tensor([3], dtype=torch.int32, device=any_gpu.place)
    x = rows_of(5, 260, any_gpu)
    into = torch.full((4, 260), -1.0, device=any_gpu.place)
    gather_rows(x, rows, into, any_gpu, live=live)
    assert torch.equal(into[:3], x[[4, 0, 4]])
    assert (into[3] == -1.0).all()


@pytest.mark.parametrize("num_cols", [64, 1300])
def test_norms_reach_live_rows_only(num_cols: int, any_gpu: Gpu) -> None:
    live = torch.tensor([3], dtype=torch.int32, device=any_gpu.place)
    x, weight = torch.sin(rows_of(5, num_cols, any_gpu)), torch.rand(num_cols) + 0.5
    out = torch.full((5, num_cols), -1.0, device=any_gpu.place)
    norm_rows(x, weight.to(any_gpu.place), 1e-5, out, any_gpu, live=live)
    expected = rms_norm_reference(x.cpu(), weight, 1e-5)
    torch.testing.assert_close(out[:3].cpu(), expected[:3], rtol=2e-6, atol=1e-6)
    assert (out[3:] == -1.0).all()
    with pytest.raises(ValueError, match="weights"):
        norm_rows(x, weight[:-1].to(any_gpu.place), 1e-5, out, any_gpu, live=live)


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("taps", [1, 2, 3])
def test_rows_are_convolved(taps: int, is_added: bool, any_gpu: Gpu) -> None:
    live = torch.tensor([4], dtype=torch.int32, device=any_gpu.place)
    x, width = torch.sin(rows_of(5, 320, any_gpu)), 320
    own, base = torch.rand(5, taps * width // 16), torch.rand(taps, width)
    out = torch.full((5, width), -1.0, device=any_gpu.place)
    own, base = own.to(any_gpu.place), base.to(any_gpu.place)
    block_conv(x, own, base, out, any_gpu, live=live, is_added=is_added)
    expected = block_conv_reference(x.cpu(), own.cpu(), base.cpu()) - float(is_added)
    torch.testing.assert_close(out[:4].cpu(), expected[:4], rtol=1e-5, atol=1e-5)
    assert (out[4] == -1.0).all()
    with pytest.raises(ValueError, match="coefficients"):
        block_conv(x, own[:, :-1], base, out, any_gpu, live=live, is_added=is_added)


def test_wrong_shapes_are_refused(any_gpu: Gpu) -> None:
    live = torch.tensor([1], dtype=torch.int32, device=any_gpu.place)
    x, into = rows_of(5, 64, any_gpu), torch.zeros((5, 100), device=any_gpu.place)
    with pytest.raises(ValueError, match="float32 rows of 64"):
        copy_columns(x, into, 40, any_gpu, live=live)
    with pytest.raises(ValueError, match="16 bytes"):
        copy_columns(x, into, 2, any_gpu, live=live)
    with pytest.raises(ValueError, match="5 rows do not fit into 4"):
        copy_columns(x, into[:4], 0, any_gpu, live=live)
