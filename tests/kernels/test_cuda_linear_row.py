"""A product that makes its own row of activations has the bits of one that reads prepared ones."""

from collections.abc import Callable
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from draftree.kernels.cuda.compile import Gpu  # noqa: E402
from draftree.kernels.cuda.layout import new_activations  # noqa: E402
from draftree.kernels.cuda.linear import (  # noqa: E402
    can_own_row,
    linear,
    linear_row,
    new_workspace,
)
from draftree.kernels.cuda.prepare import (  # noqa: E402
    RowSource,
    gated_norm,
    norm,
    plain,
    prepare,
    sigmoid_mul,
    silu_mul,
)
from draftree.kernels.quant.formats import QuantType  # noqa: E402
from tests.kernels.emulator import emulated_gpu  # noqa: E402
from tests.kernels.test_cuda_linear import formats, make, sizes, tokens, wait  # noqa: E402

EPS, HEAD_DIM = 1e-6, 64


def sources(num_cols: int, gpu: Gpu) -> dict[str, Callable[[], RowSource]]:
    """By name; the rows of the last two are one of several, and copied on the way."""
    x, other = (tokens(3, num_cols, gpu) * scale for scale in (30.0, 1.0))
    weight = torch.linspace(0.5, 2.0, num_cols, device=gpu.place)
    rows = torch.tensor([2], dtype=torch.int32, device=gpu.place)
    copy = torch.zeros((3, num_cols), device=gpu.place)
    return {
        "plain": lambda: plain(x[:1]),
        "silu_mul": lambda: silu_mul(x[:1], other[:1]),
        "sigmoid_mul": lambda: sigmoid_mul(x[:1], other[:1]),
        "gated_norm": lambda: gated_norm(x[:1], other[:1], weight[:HEAD_DIM], EPS),
        "norm of a row": lambda: norm(x, weight, EPS, rows=rows),
        "norm and copy": lambda: norm(x[:1], weight, EPS, copy=copy[:1]),
    }


@pytest.mark.parametrize("name", list(sources(128, emulated_gpu())))
@formats(QuantType.Q4_K, QuantType.Q6_K, QuantType.Q8_0, QuantType.BF16)
def test_bits(name: str, qtype: QuantType, any_gpu: Gpu) -> None:
    gpu = any_gpu
    num_cols = 768 if qtype.block_len == 256 else 640  # of 128: an odd number of units
    (num_rows,) = sizes(gpu, (5000,), (300,))
    matrix, _ = make(qtype, num_rows, num_cols, gpu)
    source, bias = sources(num_cols, gpu)[name](), torch.randn(num_rows, device=gpu.place)
    workspace = new_workspace(1, gpu)
    expected, found = (torch.full((1, num_rows), 0.5, device=gpu.place) for _ in range(2))
    tiles = prepare(source, new_activations(1, num_cols, gpu), gpu)
    linear(matrix, tiles, expected, workspace, gpu, bias=bias, add_to=True)
    copied = None if source.copy is None else source.copy.clone()
    if source.copy is not None:
        source.copy.zero_()
    linear_row(matrix, source, found, workspace, gpu, bias=bias, add_to=True)
    wait(gpu)
    assert torch.equal(found, expected) and (workspace.partial == -1).all()
    assert copied is None or torch.equal(source.copy, copied)


@formats(QuantType.Q4_K)
def test_a_row_that_does_not_count(qtype: QuantType, any_gpu: Gpu) -> None:
    gpu = any_gpu
    matrix, _ = make(qtype, 300, 512, gpu)
    source, live = sources(512, gpu)["norm and copy"](), torch.zeros(1, dtype=torch.int32)
    out = torch.full((1, 300), -7.0, device=gpu.place)
    live = live.to(gpu.place)
    linear_row(matrix, source, out, new_workspace(1, gpu), gpu, live=live)
    wait(gpu)
    assert (out == -7.0).all() and source.copy is not None and not source.copy.any()


def test_wide_rows_are_made_beforehand() -> None:
    """By all blocks, a long row takes longer than by one kernel before."""
    large = replace(emulated_gpu(90), shared_per_block=232448)
    assert can_own_row(6144, large) and not can_own_row(17408, large)
    small = replace(emulated_gpu(86), shared_per_block=101376)
    assert can_own_row(4096, small) and not can_own_row(5120, small)


def test_several_rows_are_refused(any_gpu: Gpu) -> None:
    matrix, _ = make(QuantType.Q8_0, 128, 128, any_gpu)
    out = torch.zeros((2, 128), device=any_gpu.place)
    source = plain(tokens(2, 128, any_gpu))
    with pytest.raises(ValueError, match="a single row"):
        linear_row(matrix, source, out, new_workspace(8, any_gpu), any_gpu)
