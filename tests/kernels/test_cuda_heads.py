"""Queries and keys before rotation on a GPU, real or emulated, and scores by them, beside the
CPU's.
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from draftree.kernels.cpu.heads import CpuHeads  # noqa: E402
from draftree.kernels.cuda import heads as cuda_heads  # noqa: E402
from draftree.kernels.cuda.compile import Gpu  # noqa: E402
from draftree.kernels.cuda.heads import CudaHeads  # noqa: E402
from draftree.kernels.cuda.pass_args import CudaPassArgs  # noqa: E402
from draftree.kernels.cuda.rotary import RopeArgs  # noqa: E402
from draftree.kernels.heads import QUERY_LEN  # noqa: E402
from draftree.kernels.ops import HeadNorm, Heads  # noqa: E402

MAX_ROWS, SPARE = 24, 5  # a pass's grid covers rows that are not live


class Pair:
    """The same layers on both devices, whose rows each pass fills anew."""

    def __init__(self, num_layers: int, sizes: tuple[int, int, int], max_ctx: int, gpu: Gpu):
        *counts, dim = sizes
        self.gpu, self.rng = gpu, np.random.default_rng(max_ctx)
        self.step = CudaPassArgs(MAX_ROWS, 1, gpu)
        self.cpu, self.cuda = CpuHeads(max_ctx), CudaHeads(max_ctx, gpu)
        for layer in range(num_layers):
            weight = self.rng.random(dim, np.float32) + 0.5
            rows = [np.zeros((MAX_ROWS, count * dim), np.float32) for count in counts]
            wide = [torch.zeros((MAX_ROWS, 8 + count * dim), device=gpu.place) for count in counts]
            norm = HeadNorm(weight, 1e-5) if layer % 2 else None
            own = torch.tensor(weight).to(gpu.place) if layer % 2 else None
            self.cpu.add_layer(*(Heads(x, norm) for x in rows), dim)
            args = (RopeArgs(x[:, 4:-4], own, 1e-5, dim, None, False) for x in wide)
            self.cuda.add_layer(*args)

    def run(self, first: int, num_rows: int) -> None:
        for own, other in zip(self.cpu.layers, self.cuda.layers, strict=True):
            for host, device in zip(own._rows, (other.q, other.k), strict=True):
                host.x[:] = 2 * self.rng.normal(size=host.x.shape)
                device.x[:] = torch.from_numpy(host.x).to(self.gpu.place)
        self.step.set_chain([0] * num_rows, first)
        for layer in self.cuda.layers:
            layer.keep(min(num_rows + SPARE, MAX_ROWS), self.step, self.gpu)
        self.cuda.collect(first, num_rows)
        self.cpu.collect(first, num_rows)


@pytest.mark.parametrize("sizes", [(6, 2, 16), (9, 3, 80), (4, 1, 256)])
def test_live_rows_are_kept_where_they_belong(sizes: tuple[int, int, int], any_gpu: Gpu) -> None:
    pair = Pair(2, sizes, 40, any_gpu)
    for first, num_rows in ((0, 5), (5, 19), (24, 11)):
        pair.run(first, num_rows)
    for own, other in zip(pair.cpu.layers, pair.cuda.layers, strict=True):
        queries = other.queries.permute(1, 0, 2).cpu().numpy()
        assert queries.shape == (QUERY_LEN, *sizes[::2])
        assert np.allclose(own.queries, queries, rtol=1e-6, atol=1e-6)
        keys = other.keys.permute(1, 0, 2).cpu().numpy()
        assert np.allclose(own.keys, keys, rtol=1e-3) and (own.keys[:35] != 0).any(axis=2).all()
        assert not keys[35:].any(), "rows that are not live were kept"


def test_keys_beyond_half_floats_are_bounded(any_gpu: Gpu) -> None:
    pair = Pair(1, (2, 1, 16), 24, any_gpu)
    pair.run(0, 9)
    pair.cuda.layers[0].k.x[:] = 1e6
    pair.cuda.layers[0].keep(9, pair.step, any_gpu)
    assert (pair.cuda.layers[0].keys[:, :9] == 65504).all()


@pytest.mark.parametrize("num_asked", [3, 8, 13])
@pytest.mark.parametrize("group_bytes", [1, 2**26])
def test_scores_are_the_cpus(
    num_asked: int, group_bytes: int, any_gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_heads, "_GROUP_BYTES", group_bytes)
    pair = Pair(3, (6, 2, 32), 128, any_gpu)
    for first in range(0, 120, 24):
        pair.run(first, 24)
    expected = pair.cpu.score(120 - num_asked, 120)
    found = pair.cuda.score(120 - num_asked, 120)
    assert found.shape == (4,) and found.device == any_gpu.place
    assert np.allclose(found.cpu().numpy(), expected, rtol=1e-4)
