"""GPU matrix products with int8 activations: sums are exact, so every way to them has the same
bits, and float64 products of the same integers are as close as float32 additions allow.
"""

from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from draftree.kernels.cuda.compile import Gpu  # noqa: E402
from draftree.kernels.cuda.layout import (  # noqa: E402
    INT8_FORMATS,
    PackedMatrix,
    new_activations,
)
from draftree.kernels.cuda.linear import (  # noqa: E402
    linear,
    linear_row,
    new_workspace,
)
from draftree.kernels.cuda.prepare import plain, prepare  # noqa: E402
from draftree.kernels.quant.formats import QuantType  # noqa: E402
from tests.kernels.emulator import emulated_gpu  # noqa: E402
from tests.kernels.reference.int8 import quantize_rows_reference, round_rows_reference  # noqa: E402
from tests.kernels.test_cuda_linear import error, make, tokens, wait  # noqa: E402
from tests.kernels.test_cuda_linear_row import sources  # noqa: E402

every_format = pytest.mark.parametrize("qtype", INT8_FORMATS, ids=lambda q: q.name)


@pytest.fixture
def gpu(any_gpu: Gpu) -> Gpu:
    return any_gpu


def multiply(matrix: PackedMatrix, x: torch.Tensor, gpu: Gpu, **options) -> torch.Tensor:
    out = torch.full((x.shape[0], matrix.num_rows), float("nan"), device=gpu.place)
    workspace = new_workspace(matrix.num_rows, x.shape[0], gpu)
    into = new_activations(x.shape[0], matrix.num_cols, gpu, is_int8=True)
    linear(matrix, prepare(plain(x), into, gpu), out, workspace, gpu, **options)
    wait(gpu)
    assert not workspace.arrived.any(), "counters must be zero again for the next product"
    return out


@every_format
def test_products(qtype: QuantType, gpu: Gpu) -> None:
    shapes = [(300, 1536, 33), (1, 4864, 64), (1000, 5120, 24)] if gpu.is_real else [(140, 768, 9)]
    for num_rows, num_cols, num_tokens in shapes:
        matrix, weights = make(qtype, num_rows, num_cols, gpu)
        x = tokens(num_tokens, num_cols, gpu)
        x[:, 3] *= 30.0
        out, exact = multiply(matrix, x, gpu), round_rows_reference(x) @ weights.T
        assert error(out, exact) < 1e-6
        if num_rows > 1:  # a single product may be next to nothing
            assert max(error(row, wanted) for row, wanted in zip(out, exact, strict=True)) < 1e-6
        assert error(out, x.double() @ weights.T) < 0.05


@every_format
def test_a_token_is_batch_invariant(qtype: QuantType, gpu: Gpu) -> None:
    num_rows, num_cols, most = (5120, 2048, 64) if gpu.is_real else (300, 768, 16)
    matrix, _ = make(qtype, num_rows, num_cols, gpu)
    x = tokens(most, num_cols, gpu)
    together = multiply(matrix, x, gpu)
    for num_tokens in (1, 2, 8, 16, 24, 32, 48) if gpu.is_real else (1, 8):
        assert torch.equal(multiply(matrix, x[:num_tokens], gpu), together[:num_tokens])
    assert torch.equal(multiply(matrix, x[9:10], gpu)[0], together[9])
    assert torch.equal(multiply(matrix, x.flip(0), gpu).flip(0), together)


def test_bulk_copies_give_the_same_bits_under_the_emulator() -> None:
    old, new = emulated_gpu(80), emulated_gpu(90)
    matrix, _ = make(QuantType.Q4_K, 300, 1536, old)
    x = tokens(9, 1536, old)
    assert torch.equal(multiply(matrix, x, new), multiply(matrix, x, old))


@pytest.mark.parametrize("name", list(sources(128, emulated_gpu())))
def test_an_own_row_has_the_same_bits(name: str, gpu: Gpu) -> None:
    for qtype in INT8_FORMATS if gpu.is_real else (QuantType.Q4_K,):
        matrix, _ = make(qtype, 300, 768, gpu)
        source, workspace = sources(768, gpu)[name](), new_workspace(300, 1, gpu)
        expected, found = (torch.full((1, 300), 0.5, device=gpu.place) for _ in range(2))
        tiles = prepare(source, new_activations(1, 768, gpu, is_int8=True), gpu)
        linear(matrix, tiles, expected, workspace, gpu, add_to=True)
        linear_row(matrix, source, found, workspace, gpu, add_to=True, is_int8=True)
        wait(gpu)
        assert torch.equal(found, expected) and not workspace.arrived.any()


def test_large_small_and_missing_values(gpu: Gpu) -> None:
    matrix, weights = make(QuantType.Q4_K, 40, 512, gpu)
    x = tokens(8, 512, gpu)
    clean = multiply(matrix, x, gpu)
    x[0] *= 1e30
    x[1] *= 1e-20
    x[2] = 0.0
    x[3, 256:] = 0.0
    x[4, 7] = float("inf")
    x[5, 300] = float("nan")
    out = multiply(matrix, x, gpu)
    for token in (0, 1, 3):
        assert error(out[token], round_rows_reference(x[token : token + 1])[0] @ weights.T) < 1e-6
    assert not out[2].any()
    assert not torch.isfinite(out[4]).any() and not torch.isfinite(out[5]).any()
    assert torch.equal(out[6:], clean[6:])


def test_prepared_bytes(gpu: Gpu) -> None:
    """Every integer, the sums over 32 columns and the scales lie where the product reads them."""
    num_tokens, num_cols = 11, 640
    x = tokens(num_tokens, num_cols, gpu)
    into = prepare(plain(x), new_activations(num_tokens, num_cols, gpu, is_int8=True), gpu)
    wait(gpu)
    tiles = into.halves.cpu()  # [blocks of 128 columns, tiles of 8 tokens, bytes]
    integers, scale = quantize_rows_reference(x.cpu())
    integers = integers.flatten(1)
    parts = tiles[..., :1024].view(torch.int8).view(*tiles.shape[:2], 2, 8, 4, 2, 4, 2)
    found = parts.permute(1, 3, 0, 2, 5, 7, 4, 6).reshape(16, -1)  # [token, column]
    assert torch.equal(found[:num_tokens].float(), integers)
    sums = tiles[..., 1024:1152].contiguous().view(torch.float16).view(*tiles.shape[:2], 8, 4, 2)
    sums = 2 * sums.double().sum(-1).permute(1, 2, 0, 3).reshape(16, -1)
    assert torch.equal(sums[:num_tokens], integers.double().view(num_tokens, -1, 32).sum(-1))
    scales = tiles[..., 1152:].contiguous().view(torch.float32).permute(1, 2, 0).reshape(16, -1)
    assert torch.equal(scales[:num_tokens, ::2], scale[..., 0])
    assert torch.equal(scales[:, ::2], scales[:, 1::2])


@pytest.mark.parametrize("qtype", [QuantType.Q8_0, QuantType.Q6_K], ids=lambda q: q.name)
def test_other_formats_are_refused(qtype: QuantType, gpu: Gpu) -> None:
    matrix, _ = make(qtype, 128, 256, gpu)
    into = new_activations(1, 256, gpu, is_int8=True)
    out, workspace = torch.zeros((1, 128), device=gpu.place), new_workspace(128, 1, gpu)
    row = plain(torch.zeros((1, 256), device=gpu.place))
    calls = partial(linear, matrix, into), partial(linear_row, matrix, row, is_int8=True)
    for call in calls:
        with pytest.raises(ValueError, match=f"{qtype.name} weights need activations of 16 bits"):
            call(out=out, workspace=workspace, gpu=gpu)
