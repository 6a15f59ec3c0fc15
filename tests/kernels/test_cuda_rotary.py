"""Norms of heads and rotary positions on the GPU, against float64."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from draftree.kernels.cuda.compile import Gpu  # noqa: E402
from draftree.kernels.cuda.rotary import (  # noqa: E402
    head_norm_rope,
    head_norm_rope_pair,
    rope_table,
)
from draftree.kernels.reference.norm import rms_norm_reference  # noqa: E402
from draftree.kernels.reference.rope import rope_reference  # noqa: E402

EPS, NUM_POSITIONS = 1e-5, 3000


def ints(gpu: Gpu, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=gpu.place)


def frequencies(rotary_dim: int) -> np.ndarray:
    return 1e4 ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)


def heads_of(num_rows: int, num_heads: int, head_dim: int, gpu: Gpu, seed: int = 0):
    """Columns of a wider array of float32."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn((num_rows, 8 + num_heads * head_dim + 4), generator=generator) * 3
    return wide.to(gpu.place)[:, 8 : 8 + num_heads * head_dim]


def expect(x, head_dim, norm, rotary_dim, positions, interleaved) -> torch.Tensor:
    out = x.cpu().double().unflatten(1, (-1, head_dim))
    if norm is not None:
        out = rms_norm_reference(out, norm.cpu(), EPS)
    if rotary_dim:
        inv_freq = torch.from_numpy(frequencies(rotary_dim))
        out = rope_reference(out, positions.cpu(), inv_freq, interleaved)
    return out.flatten(1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(16, 16), (32, 8), (64, 64), (256, 64), (256, 0), (80, 80)]
)
@pytest.mark.parametrize("has_norm", [False, True])
def test_heads_equal_the_reference(
    head_dim: int, rotary_dim: int, interleaved: bool, has_norm: bool, any_gpu: Gpu
) -> None:
    x = heads_of(6, 5, head_dim, any_gpu)
    around = x.clone()
    norm = torch.linspace(0.5, 2, head_dim, device=any_gpu.place) if has_norm else None
    table = rope_table(frequencies(rotary_dim), NUM_POSITIONS, any_gpu) if rotary_dim else None
    positions = ints(any_gpu, 0, 1, 17, 2999, 17, 5)
    expected = expect(x, head_dim, norm, rotary_dim, positions, interleaved)
    options = {"interleaved": interleaved, "live": ints(any_gpu, 5)}
    head_norm_rope(x, head_dim, norm, EPS, table, positions, any_gpu, **options)
    torch.testing.assert_close(x.cpu().double()[:5], expected[:5], atol=3e-6, rtol=1e-6)
    assert torch.equal(x[5], around[5]), "a row that is not live was touched"


def test_pair_equals_one_after_the_other_and_rows_alone(any_gpu: Gpu) -> None:
    q, k = heads_of(9, 7, 64, any_gpu), heads_of(9, 3, 64, any_gpu, seed=1)
    norms = [torch.linspace(a, 2, 64, device=any_gpu.place) for a in (0.5, 1.0)]
    table = rope_table(frequencies(32), NUM_POSITIONS, any_gpu)
    positions = ints(any_gpu, *range(100, 109))
    options = {"interleaved": False, "live": ints(any_gpu, 9)}
    before = [q.clone(), k.clone()]
    head_norm_rope_pair(q, k, 64, *norms, EPS, table, positions, any_gpu, **options)
    for x, norm, together in zip(before, norms, (q, k), strict=True):
        alone = x.clone()
        head_norm_rope(alone, 64, norm, EPS, table, positions, any_gpu, **options)
        assert torch.equal(alone, together)
        for row in (0, 4, 8):
            one = x[row : row + 1].clone()
            head_norm_rope(one, 64, norm, EPS, table, positions[row:], any_gpu, **options)
            assert torch.equal(one[0], together[row])


def test_no_live_rows_change_nothing(any_gpu: Gpu) -> None:
    x = heads_of(3, 2, 32, any_gpu)
    before, table = x.clone(), rope_table(frequencies(32), 8, any_gpu)
    norm, positions = torch.ones(32, device=any_gpu.place), ints(any_gpu, 1, 2, 3)
    options = {"interleaved": False, "live": ints(any_gpu, 0)}
    head_norm_rope(x, 32, norm, EPS, table, positions, any_gpu, **options)
    assert torch.equal(x, before)


def test_table_is_exact_far_out(any_gpu: Gpu) -> None:
    table = rope_table(frequencies(64), 40000, any_gpu).cpu().double().numpy()
    for position in (0, 16383, 16384, 39999):
        angles = position * frequencies(64)
        np.testing.assert_allclose(table[position, :, 0], np.cos(angles), atol=6e-8)
        np.testing.assert_allclose(table[position, :, 1], np.sin(angles), atol=6e-8)


def test_wrong_shapes_are_refused(any_gpu: Gpu) -> None:
    x, table = heads_of(3, 2, 32, any_gpu), rope_table(frequencies(64), 8, any_gpu)
    positions, live = ints(any_gpu, 1, 2, 3), ints(any_gpu, 3)
    with pytest.raises(ValueError, match="64 rotary dims of heads of 32"):
        head_norm_rope(x, 32, None, EPS, table, positions, any_gpu, interleaved=False, live=live)
    with pytest.raises(ValueError, match="norm of 32"):
        norm = torch.ones(16, device=any_gpu.place)
        head_norm_rope(x, 32, norm, EPS, None, positions, any_gpu, interleaved=False, live=live)
    with pytest.raises(ValueError, match="float32 rows of 48"):
        head_norm_rope(x, 48, None, EPS, None, positions, any_gpu, interleaved=False, live=live)
