"""One attention layer on a GPU, real or emulated, over a poisoned cache; what it should give."""

from collections.abc import Sequence

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from benchmarks.kv_coder import rotate  # noqa: E402
from draftree.kernels.cuda.attention import (  # noqa: E402
    attention,
    new_attention_workspace,
)
from draftree.kernels.cuda.attention_prefill import (  # noqa: E402
    prefill_attention,
)
from draftree.kernels.cuda.compile import Gpu  # noqa: E402
from draftree.kernels.cuda.kv_cache import KvArena  # noqa: E402
from draftree.kernels.cuda.pass_args import CudaPassArgs  # noqa: E402
from draftree.kernels.quant.kv_format import KEY_FORMATS, VALUE_FORMATS  # noqa: E402
from tests.kernels.cuda_cache import POISON, fill, rounded, write_rows  # noqa: E402
from tests.kernels.passes import Tree  # noqa: E402
from tests.kernels.reference.attention import (  # noqa: E402
    attention_reference,
)

MAX_ROWS, MAX_NODES = 160, 64
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v: [rows, heads, head_dim]


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Layer:
    """One attention layer over a poisoned cache; short segments, so that few keys make many."""

    def __init__(
        self,
        gpu: Gpu,
        heads: int,
        kv_heads: int,
        dim: int,
        *,
        capacity: int = 800,
        segment_len: int = 128,
        wide_from: int = 256,
        window: int = 0,
        bidirectional: bool = False,
        formats: tuple[str, str] = ("f16", "f16"),
        ring_len: int = 0,
    ) -> None:
        self.gpu, self.shape = gpu, (heads, kv_heads, dim)
        self.step = CudaPassArgs(MAX_ROWS, MAX_NODES, gpu)
        names = KEY_FORMATS[formats[0]], VALUE_FORMATS[formats[1]]
        self.arena = KvArena(capacity, gpu, *names, ring_len)
        self.arena.table.pages.copy_(self.arena.table.pages.max() - self.arena.table.pages)
        self.cache = self.arena.new(kv_heads, dim)
        self.cache.pool.fill_(POISON)
        self.workspace = new_attention_workspace(
            *(MAX_NODES, heads, self.cache.shape, capacity - MAX_NODES, gpu),
            segment_len=segment_len,
            wide_from=wide_from,
        )
        self.workspace.partial.fill_(float("nan"))
        self.workspace.stats.fill_(float("nan"))
        self.window, self.bidirectional = window, bidirectional

    def rows(self, seed: int, count: int) -> Rows:
        """Keys and values that half floats hold exactly."""
        heads, kv_heads, dim = self.shape
        q, k, v = (
            randn(seed + i, count, n, dim) for i, n in enumerate((heads, kv_heads, kv_heads))
        )
        return 3 * q, k.half().float(), v.half().float()

    def fill(self, rows: Rows) -> None:
        """Committed keys and values, without a pass."""
        fill(*rows[1:], self.cache)

    def rounded(self, rows: Rows) -> Rows:
        """With keys and values as the cache holds them."""
        return rows[0], *(rounded(part, self.cache, i) for i, part in enumerate(rows[1:]))

    def chain(self, rows: Rows, committed: int) -> torch.Tensor:
        self.step.set_chain(np.zeros(len(rows[0]), np.int32), committed)
        return self.run(rows)

    def tree(self, tree: Tree, rows: Rows, committed: int) -> torch.Tensor:
        nodes = np.zeros(len(tree), np.int32)
        self.step.set_tree(nodes, np.array(tree.parents), tree.depths, committed)
        return self.run(rows)

    def run(self, rows: Rows) -> torch.Tensor:
        """The grid covers more rows than are live; rows lie in wider ones."""
        heads, _, dim = self.shape
        count = len(rows[0])
        q, k, v = (self.widen(part, count + 3) for part in rows)
        if self.cache.shape.keys.is_rotated:
            q[:count] = torch.from_numpy(rotate(rows[0].numpy()))
        write_rows(k, v, self.cache, self.step)
        wide = torch.full((count + 3, heads * dim + 4), float("nan"), device=self.gpu.place)
        options = {"window": self.window, "bidirectional": self.bidirectional}
        where = (self.cache, self.step, wide[:, 4:], self.workspace, self.gpu)
        attention(q, *where, **options)
        assert wide[count:].isnan().all() and wide[:, :4].isnan().all()
        return wide[:count, 4:].reshape(count, heads, dim).cpu()

    def widen(self, part: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Heads with a gap after each, as a view [rows, heads, head_dim]."""
        count, heads, dim = part.shape
        wide = torch.full((num_rows, heads, dim + 8), float("nan"), device=self.gpu.place)
        wide[:count, :, :dim] = part
        return wide[:, :, :dim]


def join(*parts: Rows) -> Rows:
    q, k, v = (torch.cat(same) for same in zip(*parts, strict=True))
    return q, k, v


def pick(rows: Rows, which: Sequence[int]) -> Rows:
    q, k, v = (part[list(which)] for part in rows)
    return q, k, v


def expect(before: Rows, rows: Rows, mask: torch.Tensor) -> torch.Tensor:
    _, k, v = join(before, rows)
    return attention_reference(rows[0].double(), k, v, mask, rows[0].shape[-1] ** -0.5).float()


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Queries and weights are rounded to half floats, scores reach 20."""
    error = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 6e-3 and error.mean() < 2e-3


def long_chain(layer: Layer, rows: Rows, committed: int, window: int = 0) -> torch.Tensor:
    (heads, _, dim), count = layer.shape, len(rows[0])
    if not committed:
        layer.cache.pool.zero_()  # a first pass covers more rows than are live: those are finite
    layer.step.set_chain(np.zeros(count, np.int32), committed)
    write_rows(*rows[1:], layer.cache, layer.step)
    out = torch.full((count + 2, heads * dim), float("nan"), device=layer.gpu.place)
    is_rotated = layer.cache.shape.keys.is_rotated
    q = torch.from_numpy(rotate(rows[0].numpy())) if is_rotated else rows[0]
    q = layer.widen(q, count + 2)
    prefill_attention(q, layer.cache, layer.step, out, layer.gpu, window=window)
    assert out[count:].isnan().all() or not committed
    return out[:count].reshape(count, heads, dim).cpu()
