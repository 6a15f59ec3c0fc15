"""GPU matrix products against float64: every format, awkward shapes, any number of tokens."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from benchmarks.random_raw import random_raw  # noqa: E402
from draftree.kernels.cuda.compile import Gpu  # noqa: E402
from draftree.kernels.cuda.layout import PackedMatrix, new_activations  # noqa: E402
from draftree.kernels.cuda.linear import linear, new_workspace, plan_linear  # noqa: E402
from draftree.kernels.cuda.pack import Uploader  # noqa: E402
from draftree.kernels.cuda.prefill import prefill_linear, prepare_rows  # noqa: E402
from draftree.kernels.cuda.prepare import plain, prepare  # noqa: E402
from draftree.kernels.quant.formats import QuantType, dequantize  # noqa: E402
from tests.kernels.emulator import emulated_gpu  # noqa: E402

TOLERANCE = 1e-3  # activations rounded to 16 bits: several deviations
# What the emulator, which compiles for a second per kernel, has time for: one of each kind.
EMULATED = (QuantType.Q4_K, QuantType.Q6_K, QuantType.Q8_0, QuantType.Q5_1, QuantType.BF16)


def formats(*qtypes: QuantType) -> pytest.MarkDecorator:
    """A test on a GPU with all of these, under the emulator with those that it has time for."""
    cases = [pytest.param("emulated", q, id=f"emulated-{q.name}") for q in qtypes if q in EMULATED]
    marks = pytest.mark.gpu
    cases += [pytest.param("real", q, id=f"real-{q.name}", marks=marks) for q in qtypes]
    return pytest.mark.parametrize(("any_gpu", "qtype"), cases, indirect=["any_gpu"])


@pytest.fixture
def gpu(any_gpu: Gpu) -> Gpu:
    return any_gpu


def sizes(gpu: Gpu, large: tuple[int, ...], small: tuple[int, ...]) -> tuple[int, ...]:
    """The emulator has time for small matrices only."""
    return large if gpu.is_real else small


def wait(gpu: Gpu) -> None:
    if gpu.is_real:
        torch.cuda.synchronize()


def make(qtype: QuantType, num_rows: int, num_cols: int, gpu: Gpu, seed: int = 0):
    """A packed matrix and its decoded weights in float64 on the device."""
    raw = random_raw(qtype, num_rows, num_cols, torch.Generator().manual_seed(seed)).numpy()
    weights = torch.from_numpy(dequantize(raw, qtype)).to(gpu.place).double()
    uploader = Uploader(gpu)
    matrix = uploader.pack([(raw, qtype)])
    uploader.finish()
    return matrix, weights


def multiply(matrix: PackedMatrix, x: torch.Tensor, gpu: Gpu, **options) -> torch.Tensor:
    out = torch.full((x.shape[0], matrix.num_rows), float("nan"), device=gpu.place)
    workspace = new_workspace(x.shape[0], gpu)
    halves = prepare(plain(x), new_activations(x.shape[0], matrix.num_cols, gpu), gpu)
    linear(matrix, halves, out, workspace, gpu, **options)
    wait(gpu)
    assert (workspace.partial == -1).all(), "all parts must be taken before the next product"
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


def tokens(num_tokens: int, num_cols: int, gpu: Gpu) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((num_tokens, num_cols), generator=generator)
    return (x * torch.exp(2 * torch.randn((num_tokens, 1), generator=generator))).to(gpu.place)


@formats(*QuantType)
def test_every_format(qtype: QuantType, gpu: Gpu) -> None:
    shapes = [(300, 1536), (128, 256), (1, 4864)] if gpu.is_real else [(140, 768)]
    for num_rows, num_cols in shapes:
        matrix, weights = make(qtype, num_rows, num_cols, gpu)
        for num_tokens in sizes(gpu, (1, 7, 33, 64), (7,)):
            x = tokens(num_tokens, num_cols, gpu)
            assert_product(multiply(matrix, x, gpu), x, weights)


@formats(QuantType.Q8_0, QuantType.Q4_0, QuantType.Q5_0, QuantType.Q4_1)
def test_columns_that_are_not_whole_units(qtype: QuantType, gpu: Gpu) -> None:
    shapes = [(3, 32), (576, 576), (897, 896), (130, 17408)]
    for num_rows, num_cols in shapes if gpu.is_real else shapes[:2]:
        matrix, weights = make(qtype, num_rows, num_cols, gpu)
        for num_tokens in sizes(gpu, (1, 13), (3,)):
            x = tokens(num_tokens, num_cols, gpu)
            assert_product(multiply(matrix, x, gpu), x, weights)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "qtype", [QuantType.Q4_K, QuantType.Q6_K, QuantType.BF16], ids=lambda q: q.name
)
@pytest.mark.parametrize(("num_rows", "num_cols"), [(5120, 5120), (640, 17408), (17408, 1024)])
def test_large(qtype: QuantType, num_rows: int, num_cols: int, real_gpu: Gpu) -> None:
    matrix, weights = make(qtype, num_rows, num_cols, real_gpu)
    x = tokens(24, num_cols, real_gpu)
    out = multiply(matrix, x, real_gpu)
    assert_product(out, x, weights)
    # Against the very activations that were multiplied, only float32 additions remain.
    rows = prepare_rows(x, real_gpu)
    exact = rows.halves.double()[:, :num_cols] * rows.token_scale.double()[:, None] @ weights.T
    # (Quants of Q6_K times their scales are rounded to 11 bits, where they have more.)
    assert error(out, exact) < (2e-4 if qtype == QuantType.Q6_K else 3e-6)


@formats(QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.Q8_0, QuantType.BF16)
def test_a_token_is_batch_invariant(qtype: QuantType, gpu: Gpu) -> None:
    for shape in [(5120, 2048), (300, 5120)] if gpu.is_real else [(300, 1024)]:
        num_rows, num_cols = shape
        matrix, _ = make(qtype, num_rows, num_cols, gpu)
        most = 64 if gpu.is_real else 16
        x = tokens(most, num_cols, gpu)
        together = multiply(matrix, x, gpu)
        for num_tokens in sizes(gpu, (1, 2, 8, 16, 24, 32, 48, 64), (1, 8)):
            assert torch.equal(multiply(matrix, x[:num_tokens], gpu), together[:num_tokens])
        for token in sizes(gpu, (1, 9, 31, 63), (9,)):
            assert torch.equal(multiply(matrix, x[token : token + 1], gpu)[0], together[token])
        turned = multiply(matrix, x.flip(0), gpu).flip(0)
        assert torch.equal(turned, together)
        for _ in range(20 if gpu.is_real else 0):
            assert torch.equal(multiply(matrix, x[:24], gpu), together[:24])


def test_more_tokens_than_one_launch_takes(gpu: Gpu) -> None:
    matrix, weights = make(QuantType.Q4_K, 384, 512, gpu)
    x = tokens(*sizes(gpu, (150, 512), (70, 512)), gpu)
    out = multiply(matrix, x, gpu)
    assert_product(out, x, weights)
    assert torch.equal(out[:64], multiply(matrix, x[:64], gpu))


@formats(QuantType.Q4_K, QuantType.Q6_K, QuantType.Q8_0, QuantType.BF16)
def test_large_and_small_values(qtype: QuantType, gpu: Gpu) -> None:
    num_rows, num_cols = sizes(gpu, (256, 1024), (20, 512))
    matrix, weights = make(qtype, num_rows, num_cols, gpu)
    x = tokens(8, num_cols, gpu)
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
    x = tokens(8, 512, gpu)
    clean = multiply(matrix, x, gpu)
    x[2, 7] = float("inf")
    spoiled = multiply(matrix, x, gpu)
    assert not torch.isfinite(spoiled[2]).any()
    for token in (0, 1, 3, 7):
        assert torch.equal(spoiled[token], clean[token])


def test_bias_and_addition(gpu: Gpu) -> None:
    num_rows, num_cols = sizes(gpu, (300, 2048), (300, 512))
    matrix, _ = make(QuantType.Q4_K, num_rows, num_cols, gpu)
    x, bias = tokens(5, num_cols, gpu), torch.randn(num_rows, device=gpu.place)
    alone = multiply(matrix, x, gpu)
    assert torch.equal(multiply(matrix, x, gpu, bias=bias), alone + bias)
    before = torch.randn((5, num_rows), device=gpu.place)
    out = before.clone()
    halves = prepare(plain(x), new_activations(5, num_cols, gpu), gpu)
    linear(matrix, halves, out, new_workspace(5, gpu), gpu, bias=bias, add_to=True)
    assert torch.equal(out, before + (alone + bias))


@pytest.mark.gpu
@pytest.mark.parametrize("qtype", [QuantType.Q4_K, QuantType.Q6_K])
def test_copies_without_the_bulk_engine_give_the_same_bits(qtype: QuantType, real_gpu: Gpu) -> None:
    gpu = real_gpu.without_warpgroups()
    matrix, _ = make(qtype, 1000, 5120, gpu)
    x = tokens(24, 5120, gpu)
    expected = multiply(matrix, x, gpu)
    plan = plan_linear(matrix.format, 24, gpu)
    for stages in (2, plan.num_stages):
        other = replace(plan, use_bulk=False, num_stages=stages)
        assert torch.equal(multiply(matrix, x, gpu, plan=other, is_chained=False), expected)


@formats(*EMULATED, QuantType.Q4_0, QuantType.Q5_K)
def test_warpgroups_give_the_bits_of_single_warps(qtype: QuantType, any_gpu: Gpu) -> None:
    gpu = any_gpu if any_gpu.is_real else emulated_gpu(90)
    num_rows, num_cols = sizes(gpu, (2000, 5120), (140, 512))
    matrix, _ = make(qtype, num_rows, num_cols, gpu)
    x = tokens(64 if gpu.is_real else 40, num_cols, gpu)
    for count in (17, 24, 32, 48, 64) if gpu.is_real else (19, 40):
        expected = multiply(matrix, x[:count], gpu.without_warpgroups())
        assert torch.equal(multiply(matrix, x[:count], gpu), expected)


def test_bulk_copies_give_the_same_bits_under_the_emulator() -> None:
    old, new = emulated_gpu(80), emulated_gpu(90)
    matrix, _ = make(QuantType.Q6_K, 300, 1536, old)
    x = tokens(9, 1536, old)
    assert torch.equal(multiply(matrix, x, new), multiply(matrix, x, old))


def test_rows_past_the_live_ones_are_left_alone(gpu: Gpu) -> None:
    matrix, _ = make(QuantType.Q4_K, 300, 512, gpu)
    x = tokens(16, 512, gpu)
    expected = multiply(matrix, x, gpu)
    workspace, halves = new_workspace(16, gpu), new_activations(16, 512, gpu)
    for count in (5, 16, 9, 0):
        live = torch.tensor([count], dtype=torch.int32, device=gpu.place)
        out = torch.full((16, 300), -7.0, device=gpu.place)
        linear(matrix, prepare(plain(x), halves, gpu, live=live), out, workspace, gpu, live=live)
        assert torch.equal(out[:count], expected[:count])
        assert (out[count:] == -7.0).all()


@pytest.mark.gpu
def test_one_graph_serves_any_number_of_live_tokens(real_gpu: Gpu) -> None:
    matrix, _ = make(QuantType.Q4_K, 700, 2560, real_gpu)
    x = tokens(32, 2560, real_gpu)
    expected = multiply(matrix, x, real_gpu)
    live = torch.tensor([32], dtype=torch.int32, device="cuda")
    out = torch.zeros((32, 700), device="cuda")
    workspace, halves = new_workspace(32, real_gpu), new_activations(32, 2560, real_gpu)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # compile and load outside the capture
        linear(
            matrix,
            prepare(plain(x), halves, real_gpu, live=live),
            out,
            workspace,
            real_gpu,
            live=live,
        )
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        linear(
            matrix,
            prepare(plain(x), halves, real_gpu, live=live),
            out,
            workspace,
            real_gpu,
            live=live,
        )
    for count in (5, 32, 1, 17, 8, 0):
        live.fill_(count)
        out.fill_(-7.0)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out[:count], expected[:count])
        assert (out[count:] == -7.0).all()


def test_products_in_a_row_share_their_workspace(gpu: Gpu) -> None:
    size, num_tokens, rounds = sizes(gpu, (1024, 16, 50), (512, 8, 2))
    first, _ = make(QuantType.Q4_K, size, size, gpu, seed=1)
    second, _ = make(QuantType.Q6_K, size, size, gpu, seed=2)
    workspace, x = new_workspace(num_tokens, gpu), tokens(num_tokens, size, gpu)
    middle, out = (torch.empty((num_tokens, size), device=gpu.place) for _ in range(2))
    expected = multiply(second, multiply(first, x, gpu), gpu)
    halves = [new_activations(num_tokens, size, gpu) for _ in range(2)]
    for _ in range(rounds):
        linear(first, prepare(plain(x), halves[0], gpu), middle, workspace, gpu)
        linear(second, prepare(plain(middle), halves[1], gpu), out, workspace, gpu)
    wait(gpu)
    assert torch.equal(out, expected)


@formats(QuantType.Q4_K, QuantType.Q6_K, QuantType.Q4_1, QuantType.BF16)
def test_prefill(qtype: QuantType, gpu: Gpu) -> None:
    num_cols = 2048 if qtype.block_len == 256 else 1056
    num_rows, num_tokens = sizes(gpu, (1000, 300), (300, 70))
    matrix, weights = make(qtype, num_rows, num_cols, gpu)
    x, bias = tokens(num_tokens, num_cols, gpu), torch.randn(num_rows, device=gpu.place)
    x[5] *= 1e5
    expected = x.double() @ weights.T + bias.double()
    out = torch.full((num_tokens, num_rows), float("nan"), device=gpu.place)
    prefill_linear(matrix, x, out, gpu, bias=bias)
    assert error(out, expected) < 6e-4
    pieces = torch.ones_like(out)
    prefill_linear(matrix, x, pieces, gpu, bias=bias, add_to=True, slab_bytes=1 << 20)
    assert error(pieces - 1, expected) < 6e-4
    sums = torch.ones_like(out)
    prefill_linear(matrix, x, sums, gpu, add_to=True, slab_bytes=1 << 20)
    assert error(sums - 1 + bias, expected) < 6e-4
    # Without anything to add, products are written in place, beside what must stay.
    wide = torch.full((num_tokens, num_rows + 8), -7.0, device=gpu.place)
    prefill_linear(matrix, prepare_rows(x, gpu), wide[:, :num_rows], gpu, slab_bytes=1 << 20)
    for token in range(num_tokens):
        assert error(wide[token, :num_rows] + bias, expected[token]) < 2e-3
    assert (wide[:, num_rows:] == -7.0).all()


def test_rows_of_unusual_size_are_scaled_in_prefill(gpu: Gpu) -> None:
    matrix, weights = make(QuantType.Q4_K, 300, 512, gpu)
    x = tokens(12, 512, gpu)
    x[0] *= 1e6
    x[1] *= 1e-9
    x[2] = 0.0
    out = prefill_linear(matrix, x, torch.empty((12, 300), device=gpu.place), gpu)
    assert not out[2].any()
    sums = prefill_linear(matrix, x, torch.full_like(out, 3.0), gpu, add_to=True)
    for token in (0, 1, 3, 11):
        expected = x[token].double() @ weights.T
        assert error(out[token], expected) < 2e-3
        assert error(sums[token], expected + 3.0) < 2e-3
    assert (sums[2] == 3.0).all()


def test_wrong_shapes_are_refused(gpu: Gpu) -> None:
    matrix, _ = make(QuantType.Q4_K, 128, 512, gpu)
    halves, workspace = new_activations(8, 256, gpu), new_workspace(8, gpu)
    with pytest.raises(ValueError, match="columns"):
        linear(matrix, halves, torch.empty((8, 128), device=gpu.place), workspace, gpu)
    with pytest.raises(ValueError, match="float32 rows of 128"):
        linear(matrix, halves, torch.empty((8, 64), device=gpu.place), workspace, gpu)
    with pytest.raises(ValueError, match="float32 rows of 256"):
        prepare(plain(torch.empty((8, 512), device=gpu.place)), halves, gpu)
    with pytest.raises(ValueError, match="multiple of 32"):
        Uploader(gpu).pack([(np.zeros((4, 80), np.uint8), QuantType.F16)])


def test_a_small_workspace_is_refused(any_gpu: Gpu) -> None:
    matrix, _ = make(QuantType.Q8_0, 128, 128, any_gpu)
    x = prepare(plain(tokens(40, 128, any_gpu)), new_activations(40, 128, any_gpu), any_gpu)
    out = torch.zeros((40, 128), device=any_gpu.place)
    with pytest.raises(ValueError, match="workspace is too small for"):
        linear(matrix, x, out, new_workspace(8, any_gpu), any_gpu)
