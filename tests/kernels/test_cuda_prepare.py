"""Inputs of GPU matrix products against float64, in both forms, with odd widths and views."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from draftree.kernels.cuda import prepare as prepare_module  # noqa: E402
from draftree.kernels.cuda.compile import Gpu  # noqa: E402
from draftree.kernels.cuda.layout import (  # noqa: E402
    Activations,
    HalfRows,
    new_activations,
    new_half_rows,
)
from draftree.kernels.cuda.prepare import (  # noqa: E402
    RowPlan,
    gated_norm,
    norm,
    plain,
    plan_long,
    plan_row,
    prepare,
    sigmoid_mul,
    silu_mul,
)
from tests.kernels.emulator import emulated_gpu  # noqa: E402
from tests.kernels.reference.norm import (  # noqa: E402
    gated_norm_reference,
    rms_norm_reference,
)

EPS, HEAD_DIM = 1e-6, 32
OPS = ("plain", "norm", "silu_mul", "sigmoid_mul", "gated_norm")


def view(num_rows: int, num_cols: int, gpu: Gpu, seed: int = 0) -> torch.Tensor:
    """Random rows that are a slice of columns of a wider array."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn((num_rows, 4 + num_cols + 8), generator=generator)
    wide *= torch.logspace(-3, 3, num_rows)[:, None]
    return wide.to(gpu.place)[:, 4 : 4 + num_cols]


def make(num_rows: int, num_cols: int, gpu: Gpu, *, in_rows: bool) -> Activations | HalfRows:
    """Filled with what must not remain, or must."""
    new = new_half_rows if in_rows else new_activations
    into = new(num_rows, num_cols, gpu)
    into.halves.view(torch.uint8).fill_(0x7E)
    into.token_scale.fill_(-5.0)
    return into


def run(op: str, into: Activations | HalfRows, x, other, gpu: Gpu, **options) -> None:
    weight = torch.linspace(0.5, 2.0, into.num_cols, device=gpu.place)
    live = options.pop("live", None)
    if op == "plain":
        source = plain(x)
    elif op == "norm":
        source = norm(x, weight, EPS, **options)
    elif op == "gated_norm":
        source = gated_norm(x, other, weight[:HEAD_DIM].clone(), EPS)
    else:
        source = (silu_mul if op == "silu_mul" else sigmoid_mul)(x, other)
    prepare(source, into, gpu, live=live)


def expect(op: str, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    x, other = x.cpu().double(), other.cpu().double()
    weight = torch.linspace(0.5, 2.0, x.shape[1])
    if op == "norm":
        return rms_norm_reference(x, weight, EPS)
    if op == "gated_norm":
        heads = [a.unflatten(1, (-1, HEAD_DIM)) for a in (x, other)]
        return gated_norm_reference(*heads, weight[:HEAD_DIM], EPS).flatten(1)
    if op == "silu_mul":
        return torch.nn.functional.silu(x) * other
    return x * torch.sigmoid(other) if op == "sigmoid_mul" else x


def decode(into: Activations | HalfRows) -> torch.Tensor:
    """float64 [tokens, padded columns], and for tiles a check of the sums over 32 columns."""
    if isinstance(into, HalfRows):
        return (into.halves.double() * into.token_scale.double()[:, None]).cpu()
    halves = into.halves.cpu().view(torch.float16).double()  # [blocks, tiles, 1152]
    blocks, tiles, _ = halves.shape
    # [blocks, tiles, group, token, t, step, i]: column 32 group + 16 step + 4 t + i
    values = halves[..., :1024].reshape(blocks, tiles, 4, 8, 4, 2, 4).clone()
    values[..., :2] /= 16
    values = values.permute(1, 3, 0, 2, 5, 4, 6).reshape(tiles * 8, blocks * 128)
    sums = halves[..., 1024:].reshape(blocks, tiles, 8, 4, 2).sum(-1)  # [.., token, 32 columns]
    sums = 2 * sums.permute(1, 2, 0, 3).reshape(tiles * 8, blocks * 4)
    expected = values.unflatten(1, (-1, 32)).sum(-1)
    size = values.unflatten(1, (-1, 32)).abs().sum(-1)
    used = (into.token_scale.cpu() > 0) & torch.isfinite(values).all(1)
    assert ((sums - expected).abs() <= 2e-6 * size)[used].all()
    return values * into.token_scale.cpu().double()[:, None]


def used_bytes(into: Activations | HalfRows, token: int) -> tuple[torch.Tensor, ...]:
    """All that the products read of one token."""
    scale = into.token_scale[token].cpu()
    if isinstance(into, HalfRows):
        return into.halves[token].cpu().view(torch.int16), scale
    tile, row = into.halves[:, token // 8].cpu(), token % 8
    values = tile[:, :2048].reshape(-1, 4, 8, 64)[:, :, row]
    return values, tile[:, 2048:].reshape(-1, 8, 16)[:, row], scale


def same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("in_rows", [False, True])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_cols", [64, 352, 2560])
def test_values_equal_the_reference(op: str, num_cols: int, in_rows: bool, any_gpu: Gpu) -> None:
    x, other = view(11, num_cols, any_gpu), view(11, num_cols, any_gpu, seed=1)
    into = make(11, num_cols, any_gpu, in_rows=in_rows)
    run(op, into, x, other, any_gpu)
    out, expected = decode(into)[:11], expect(op, x, other)
    largest = expected.abs().amax(1, keepdim=True)
    error = (out[:, :num_cols] - expected).abs()
    # Rows that fit are not scaled, so their smallest values are multiples of 2^-24.
    assert (error <= 5e-4 * expected.abs() + 1e-7 * largest + (2.0**-25 if in_rows else 0.0)).all()
    assert not out[:, num_cols:].any()
    assert torch.equal(into.token_scale[:11].log2() % 1, torch.zeros(11, device=any_gpu.place))


def test_warpgroups_read_the_same_values_in_pieces(any_gpu: Gpu) -> None:
    gpu = any_gpu if any_gpu.is_real else emulated_gpu(90)
    if not gpu.has_warpgroups:
        pytest.skip("this GPU has no warpgroups")
    x = view(20, 352, gpu)
    forms = [new_activations(20, 352, gpu) for _ in range(2)]
    prepare(plain(x), forms[0], gpu)
    prepare(plain(x), forms[1], gpu.without_warpgroups())
    pieces, single = (form.halves.cpu().view(torch.int16) for form in forms)
    assert torch.equal(pieces[..., 1024:], single[..., 1024:]), "sums"
    assert torch.equal(forms[0].token_scale, forms[1].token_scale)
    # [.., group, 16 columns, two of four, token, t, 2] and [.., group, token, t, 16 columns, 4]
    shape = *pieces.shape[:2], 4
    of_pieces = pieces[..., :1024].reshape(*shape, 2, 2, 8, 4, 2).permute(0, 1, 2, 5, 6, 3, 4, 7)
    assert torch.equal(of_pieces, single[..., :1024].reshape(*shape, 8, 4, 2, 2, 2))


def test_plain_rows_are_scaled_only_if_they_must(any_gpu: Gpu) -> None:
    x = torch.ones((4, 64), device=any_gpu.place) * torch.tensor(
        [[1.0], [30000.0], [2.0**17], [2.0**-20]], device=any_gpu.place
    )
    into = make(4, 64, any_gpu, in_rows=True)
    run("plain", into, x, x, any_gpu)
    assert into.token_scale[:2].tolist() == [1.0, 1.0]
    assert into.token_scale[2] > 1.0 > into.token_scale[3]
    assert torch.equal(decode(into)[:, :64], x.cpu().double())


@pytest.mark.parametrize("op", OPS)
def test_a_row_is_batch_invariant(op: str, any_gpu: Gpu) -> None:
    x, other = view(16, 576, any_gpu), view(16, 576, any_gpu, seed=1)
    for in_rows in (False, True):
        together = make(16, 576, any_gpu, in_rows=in_rows)
        run(op, together, x, other, any_gpu)
        for row in (0, 7, 13, 15):
            alone = make(1, 576, any_gpu, in_rows=in_rows)
            run(op, alone, x[row : row + 1], other[row : row + 1], any_gpu)
            assert same(used_bytes(alone, 0), used_bytes(together, row))


@pytest.mark.parametrize("op", OPS)
def test_rows_that_are_not_live_stay_as_they_are(op: str, any_gpu: Gpu) -> None:
    x, other = view(16, 256, any_gpu), view(16, 256, any_gpu, seed=1)
    x[9:] = float("nan")
    for in_rows in (False, True):
        for count in (0, 9):
            into, before = (make(16, 256, any_gpu, in_rows=in_rows) for _ in range(2))
            live = torch.tensor([count], dtype=torch.int32, device=any_gpu.place)
            run(op, into, x, other, any_gpu, live=live)
            for row in range(16):
                assert same(used_bytes(into, row), used_bytes(before, row)) == (row >= count)


@pytest.mark.parametrize("in_rows", [False, True])
@pytest.mark.parametrize("op", ["silu_mul", "norm"])
def test_rows_wider_than_a_block(op: str, in_rows: bool, any_gpu: Gpu) -> None:
    x, other = view(2, 17408, any_gpu), view(2, 17408, any_gpu, seed=1)
    into = make(2, 17408, any_gpu, in_rows=in_rows)
    run(op, into, x, other, any_gpu)
    expected = expect(op, x, other)
    error = (decode(into)[:2] - expected).abs()
    assert (error <= 5e-4 * expected.abs() + 1e-7 * expected.abs().amax(1, keepdim=True)).all()


def test_norm_of_the_rows_that_an_index_names(any_gpu: Gpu) -> None:
    x = view(16, 576, any_gpu)
    rows = torch.tensor([15, 3, 3, 0, 99], dtype=torch.int32, device=any_gpu.place)
    live = torch.tensor([4], dtype=torch.int32, device=any_gpu.place)
    every, named = (make(16, 576, any_gpu, in_rows=False) for _ in range(2))
    run("norm", every, x, x, any_gpu)
    run("norm", named, x, x, any_gpu, rows=rows, live=live)
    for i, row in enumerate((15, 3, 3, 0)):
        assert same(used_bytes(named, i), used_bytes(every, row))
    assert named.token_scale[4] == -5.0


def test_large_small_and_no_values(any_gpu: Gpu) -> None:
    x = view(6, 256, any_gpu)
    x[0] *= 1e33
    x[1] *= 1e-20
    x[2] = 0.0
    x[3, 7] = float("inf")
    into = make(6, 256, any_gpu, in_rows=False)
    run("plain", into, x, x, any_gpu)
    out, expected = decode(into)[:6], x.cpu().double()
    for row in (0, 1, 2, 4, 5):
        assert (out[row] - expected[row]).norm() <= 5e-4 * expected[row].norm()
    assert torch.isinf(out[3, 7])
    gate = torch.tensor([-1e30, -100.0, -20.0, 0.0, 20.0, 100.0, 1e30, 1.0])
    gate = gate.repeat(1, 4).to(any_gpu.place)
    into = make(1, 32, any_gpu, in_rows=True)
    run("silu_mul", into, gate.clamp(-1e3, 1e3), torch.ones_like(gate), any_gpu)
    assert torch.isfinite(decode(into)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["plain", "silu_mul", "sigmoid_mul", "gated_norm"])
def test_clusters_give_the_bits_of_one_block(
    op: str, any_gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not any_gpu.is_real:
        pytest.skip("device: the emulator has no clusters")
    x, other = view(24, 17408, any_gpu), view(24, 17408, any_gpu, seed=1)
    together = make(24, 17408, any_gpu, in_rows=False)
    run(op, together, x, other, any_gpu)
    plan = RowPlan(1, 12, 6)
    monkeypatch.setattr(prepare_module, "plan_row", lambda *_, **__: plan)
    alone = make(24, 17408, any_gpu, in_rows=False)
    run(op, alone, x, other, any_gpu)
    for row in range(24):
        assert same(used_bytes(alone, row), used_bytes(together, row))


def test_plans_cover_any_width() -> None:
    for arch in (80, 90):
        device = Gpu(0, arch, 100, 102400, 101376)
        assert plan_row(5120, device) == (RowPlan(4, 5, 1) if arch >= 90 else RowPlan(1, 20, 1))
        for padded in range(256, 66000, 256):
            plan = plan_row(padded, device)
            assert plan.num_blocks * plan.num_warps * plan.num_slices * 256 >= padded
            assert plan.num_warps <= 32 and plan.num_blocks <= (1 if arch < 90 else 8)
            long = plan_long(padded)
            assert long.num_warps * long.num_slices * 256 >= padded
            assert long.num_warps <= 32 and long.num_blocks == 1


def test_wrong_shapes_are_refused(any_gpu: Gpu) -> None:
    x, into = view(4, 256, any_gpu), make(4, 256, any_gpu, in_rows=True)
    with pytest.raises(ValueError, match="float32 rows of 256"):
        prepare(plain(view(4, 512, any_gpu)), into, any_gpu)
    with pytest.raises(ValueError, match="do not fit"):
        prepare(plain(view(5, 256, any_gpu)), into, any_gpu)
    with pytest.raises(ValueError, match="16 bytes"):
        prepare(plain(torch.zeros((4, 258), device=any_gpu.place)[:, 1:257]), into, any_gpu)
    with pytest.raises(ValueError, match="4 rows do not go with 3"):
        prepare(silu_mul(x, x[:3]), into, any_gpu)
    with pytest.raises(ValueError, match="heads of 24"):
        prepare(gated_norm(x, x, torch.ones(24), EPS), into, any_gpu)
    with pytest.raises(ValueError, match="norm of 256"):
        prepare(norm(x, torch.ones(255), EPS), into, any_gpu)


@pytest.mark.parametrize("in_rows", [False, True])
def test_a_norm_copies_its_rows_on_the_way(any_gpu: Gpu, in_rows: bool) -> None:
    num_rows, num_cols, num_live = 5, 96, 3
    x = view(num_rows, num_cols, any_gpu)
    plain, copying = (make(num_rows, num_cols, any_gpu, in_rows=in_rows) for _ in range(2))
    wide = torch.full((num_rows, num_cols + 16), -7.0, device=any_gpu.place)
    copy, live = wide[:, 8 : 8 + num_cols], torch.tensor([num_live], dtype=torch.int32)
    live = live.to(any_gpu.place)
    run("norm", plain, x, None, any_gpu, live=live)
    run("norm", copying, x, None, any_gpu, live=live, copy=copy)
    assert torch.equal(copying.halves.view(torch.uint8), plain.halves.view(torch.uint8))
    assert torch.equal(copy[:num_live], x[:num_live])
    wide[:num_live, 8 : 8 + num_cols] = -7.0
    assert bool((wide == -7.0).all())  # nothing else was written
    with pytest.raises(ValueError, match="do not go with"):
        run("norm", copying, x, None, any_gpu, live=live, copy=copy[:2])
