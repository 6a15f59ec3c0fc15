"""GPU matrix products against float64: every format, awkward shapes, any number of tokens."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from draftree.kernels.cuda.compile import Gpu  # noqa: E402
from draftree.kernels.cuda.compile import gpu as describe_gpu  # noqa: E402
from draftree.kernels.cuda.layout import PackedMatrix  # noqa: E402
from draftree.kernels.cuda.linear import (  # noqa: E402
    linear,
    new_activations,
    new_workspace,
    plan_linear,
    prepare,
)
from draftree.kernels.cuda.pack import pack  # noqa: E402
from draftree.kernels.cuda.prefill import prefill_linear, prepare_rows  # noqa: E402
from draftree.kernels.cuda.sample import random_raw  # noqa: E402
from draftree.kernels.quant.formats import QuantType, dequantize  # noqa: E402

pytestmark = pytest.mark.gpu
TOLERANCE = 1e-3  # activations rounded to 16 bits: several deviations


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return describe_gpu(0)


def make(qtype: QuantType, num_rows: int, num_cols: int, gpu: Gpu, seed: int = 0):
    """A packed matrix and its decoded weights in float64 on the device."""
    raw = random_raw(qtype, num_rows, num_cols, torch.Generator().manual_seed(seed)).numpy()
    weights = torch.from_numpy(dequantize(raw, qtype)).cuda().double()
    return pack(raw, qtype, gpu), weights


def multiply(matrix: PackedMatrix, x: torch.Tensor, gpu: Gpu, **options) -> torch.Tensor:
    out = torch.full((x.shape[0], matrix.num_rows), float("nan"), device="cuda")
    workspace = new_workspace(matrix.num_rows, x.shape[0], gpu)
    halves = prepare(x, new_activations(x.shape[0], matrix.num_cols, gpu), gpu)
    linear(matrix, halves, out, workspace, gpu, **options)
    torch.cuda.synchronize()
    assert not workspace.arrived.any(), "counters must be zero again for the next product"
    return out


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


def assert_product(out: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> None:
    """Each result within what rounding explains: a share of the root of the sum of squared
    terms.
    """
    x = x.double()
    size = weights**2 + (weights**2).mean(dim=1, keepdim=True)
    slack = (x**2 @ size.T).sqrt()
    wrong = (out.double() - x @ weights.T).abs() > TOLERANCE * slack
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} results are off"
    assert torch.isfinite(out).all()


def tokens(num_tokens: int, num_cols: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn((num_tokens, num_cols), device="cuda", generator=generator)
    return x * torch.exp(2 * torch.randn((num_tokens, 1), device="cuda", generator=generator))


@pytest.mark.parametrize("qtype", list(QuantType), ids=lambda q: q.name)
@pytest.mark.parametrize(("num_rows", "num_cols"), [(300, 1536), (128, 256), (1, 4864)])
def test_every_format(qtype: QuantType, num_rows: int, num_cols: int, gpu: Gpu) -> None:
    matrix, weights = make(qtype, num_rows, num_cols, gpu)
    for num_tokens in (1, 7, 33, 64):
        x = tokens(num_tokens, num_cols)
        assert_product(multiply(matrix, x, gpu), x, weights)


@pytest.mark.parametrize("qtype", [QuantType.Q8_0, QuantType.Q4_0, QuantType.Q5_0, QuantType.Q4_1])
@pytest.mark.parametrize(("num_rows", "num_cols"), [(576, 576), (897, 896), (3, 32), (130, 17408)])
def test_columns_that_are_not_whole_units(
    qtype: QuantType, num_rows: int, num_cols: int, gpu: Gpu
) -> None:
    matrix, weights = make(qtype, num_rows, num_cols, gpu)
    for num_tokens in (1, 13):
        x = tokens(num_tokens, num_cols)
        assert_product(multiply(matrix, x, gpu), x, weights)


@pytest.mark.parametrize(
    "qtype", [QuantType.Q4_K, QuantType.Q6_K, QuantType.BF16], ids=lambda q: q.name
)
@pytest.mark.parametrize(("num_rows", "num_cols"), [(5120, 5120), (640, 17408), (17408, 1024)])
def test_large(qtype: QuantType, num_rows: int, num_cols: int, gpu: Gpu) -> None:
    matrix, weights = make(qtype, num_rows, num_cols, gpu)
    x = tokens(24, num_cols)
    out = multiply(matrix, x, gpu)
    assert_product(out, x, weights)
    # Against the very activations that were multiplied, only float32 additions remain.
    halves, scale = prepare_rows(x, gpu)
    exact = halves.double()[:, :num_cols] * scale.double()[:, None] @ weights.T
    assert error(out, exact) < 3e-6


@pytest.mark.parametrize(
    "qtype", [QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.Q8_0, QuantType.F16]
)
@pytest.mark.parametrize(("num_rows", "num_cols"), [(5120, 2048), (300, 5120)])
def test_a_token_has_the_same_bits_in_any_company(
    qtype: QuantType, num_rows: int, num_cols: int, gpu: Gpu
) -> None:
    matrix, _ = make(qtype, num_rows, num_cols, gpu)
    x = tokens(64, num_cols)
    together = multiply(matrix, x, gpu)
    for num_tokens in (1, 2, 8, 16, 24, 32, 48, 64):
        assert torch.equal(multiply(matrix, x[:num_tokens], gpu), together[:num_tokens])
    for token in (1, 9, 31, 63):
        assert torch.equal(multiply(matrix, x[token : token + 1], gpu)[0], together[token])
    turned = multiply(matrix, x.flip(0), gpu).flip(0)
    assert torch.equal(turned, together)
    for _ in range(20):
        assert torch.equal(multiply(matrix, x[:24], gpu), together[:24])


def test_more_tokens_than_one_launch_takes(gpu: Gpu) -> None:
    matrix, weights = make(QuantType.Q4_K, 384, 512, gpu)
    x = tokens(150, 512)
    out = multiply(matrix, x, gpu)
    assert_product(out, x, weights)
    assert torch.equal(out[:64], multiply(matrix, x[:64], gpu))


@pytest.mark.parametrize("qtype", [QuantType.Q4_K, QuantType.Q6_K, QuantType.Q8_0, QuantType.BF16])
def test_large_and_small_values(qtype: QuantType, gpu: Gpu) -> None:
    matrix, weights = make(qtype, 256, 1024, gpu)
    x = tokens(8, 1024)
    x[0] *= 1e5
    x[1, 3] = 1e5
    x[2] *= 1e-20
    x[3] = 0.0
    x[4] *= 1e30
    out = multiply(matrix, x, gpu)
    assert_product(out, x, weights)
    assert not out[3].any()


def test_infinite_activations_spoil_their_own_token_only(gpu: Gpu) -> None:
    matrix, _ = make(QuantType.Q4_K, 256, 512, gpu)
    x = tokens(8, 512)
    clean = multiply(matrix, x, gpu)
    x[2, 7] = float("inf")
    spoiled = multiply(matrix, x, gpu)
    assert not torch.isfinite(spoiled[2]).any()
    for token in (0, 1, 3, 7):
        assert torch.equal(spoiled[token], clean[token])


def test_bias_and_addition(gpu: Gpu) -> None:
    matrix, _ = make(QuantType.Q4_K, 300, 2048, gpu)
    x, bias = tokens(5, 2048), torch.randn(300, device="cuda")
    plain = multiply(matrix, x, gpu)
    assert torch.equal(multiply(matrix, x, gpu, bias=bias), plain + bias)
    before = torch.randn((5, 300), device="cuda")
    out = before.clone()
    halves = prepare(x, new_activations(5, 2048, gpu), gpu)
    linear(matrix, halves, out, new_workspace(300, 5, gpu), gpu, bias=bias, add_to=True)
    assert torch.equal(out, before + (plain + bias))


@pytest.mark.parametrize("qtype", [QuantType.Q4_K, QuantType.Q6_K])
def test_copies_without_the_bulk_engine_give_the_same_bits(qtype: QuantType, gpu: Gpu) -> None:
    matrix, _ = make(qtype, 1000, 5120, gpu)
    x = tokens(24, 5120)
    expected = multiply(matrix, x, gpu)
    plan = plan_linear(matrix.format, 24, gpu)
    for stages in (2, plan.num_stages):
        other = replace(plan, use_bulk=False, num_stages=stages)
        assert torch.equal(multiply(matrix, x, gpu, plan=other, is_chained=False), expected)


def test_one_graph_serves_any_number_of_live_tokens(gpu: Gpu) -> None:
    matrix, _ = make(QuantType.Q4_K, 700, 2560, gpu)
    x = tokens(32, 2560)
    expected = multiply(matrix, x, gpu)
    live = torch.tensor([32], dtype=torch.int32, device="cuda")
    out = torch.zeros((32, 700), device="cuda")
    workspace, halves = new_workspace(700, 32, gpu), new_activations(32, 2560, gpu)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # compile and load outside the capture
        linear(matrix, prepare(x, halves, gpu, live=live), out, workspace, gpu, live=live)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        linear(matrix, prepare(x, halves, gpu, live=live), out, workspace, gpu, live=live)
    for count in (5, 32, 1, 17, 8, 0):
        live.fill_(count)
        out.fill_(-7.0)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out[:count], expected[:count])
        assert (out[count:] == -7.0).all()


def test_products_in_a_row_share_their_workspace(gpu: Gpu) -> None:
    first, _ = make(QuantType.Q4_K, 1024, 1024, gpu, seed=1)
    second, _ = make(QuantType.Q6_K, 1024, 1024, gpu, seed=2)
    workspace, x = new_workspace(1024, 16, gpu), tokens(16, 1024)
    middle, out = (torch.empty((16, 1024), device="cuda") for _ in range(2))
    expected = multiply(second, multiply(first, x, gpu), gpu)
    halves = [new_activations(16, 1024, gpu) for _ in range(2)]
    for _ in range(50):
        linear(first, prepare(x, halves[0], gpu), middle, workspace, gpu)
        linear(second, prepare(middle, halves[1], gpu), out, workspace, gpu)
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("qtype", [QuantType.Q4_K, QuantType.Q6_K, QuantType.Q4_1, QuantType.BF16])
def test_prefill(qtype: QuantType, gpu: Gpu) -> None:
    num_cols = 2048 if qtype.block_len == 256 else 1056
    matrix, weights = make(qtype, 1000, num_cols, gpu)
    x, bias = tokens(300, num_cols), torch.randn(1000, device="cuda")
    x[5] *= 1e5
    expected = x.double() @ weights.T + bias.double()
    out = torch.full((300, 1000), float("nan"), device="cuda")
    prefill_linear(matrix, x, out, gpu, bias=bias)
    assert error(out, expected) < 6e-4
    pieces = torch.ones_like(out)
    prefill_linear(matrix, x, pieces, gpu, bias=bias, add_to=True, slab_bytes=1 << 20)
    assert error(pieces - 1, expected) < 6e-4


def test_wrong_shapes_are_refused(gpu: Gpu) -> None:
    matrix, _ = make(QuantType.Q4_K, 128, 512, gpu)
    halves, workspace = new_activations(8, 256, gpu), new_workspace(128, 8, gpu)
    with pytest.raises(ValueError, match="columns"):
        linear(matrix, halves, torch.empty((8, 128), device="cuda"), workspace, gpu)
    with pytest.raises(ValueError, match="float32 rows of 128"):
        linear(matrix, halves, torch.empty((8, 64), device="cuda"), workspace, gpu)
    with pytest.raises(ValueError, match="float32 rows of 256"):
        prepare(torch.empty((8, 512), device="cuda"), halves, gpu)
    with pytest.raises(ValueError, match="multiple of 32"):
        pack(np.zeros((4, 80), np.uint8), QuantType.F16, gpu)
