"""Queries and keys before rotation on the GPU, and the scores of a text by them: nothing but the
scores leaves it.

Passes write them by a kernel of their own (source/heads.cu); the arithmetic is torch's, a few calls
for several layers together, after the last pass.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch.nn.functional import avg_pool1d

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.pass_args import NUM_TOKENS, CudaPassArgs
from draftree.kernels.cuda.prepare import check_rows
from draftree.kernels.cuda.rotary import RopeArgs
from draftree.kernels.heads import CHUNK_LEN, POOL_LEN, QUERY_LEN, count_queries

_WARPS: Final = 8  # heads of a block
_GROUP_BYTES: Final = 64 * 2**20  # of float32 keys that are multiplied together


def heads_source(head_dim: int) -> KernelSource:
    macros = (("HEAD_DIM", head_dim), ("QUERY_LEN", QUERY_LEN))
    return KernelSource("heads_kernel", ("bits", "heads"), macros)


@dataclass(frozen=True)
class LayerHeads:
    """Of one attention layer: where it leaves its rows, and what is kept of them."""

    q: RopeArgs
    k: RopeArgs
    queries: torch.Tensor  # float32 [heads, QUERY_LEN, head_dim], of the last rows
    keys: torch.Tensor  # float16 [kv_heads, positions, head_dim]

    def keep(self, num_rows: int, step: CudaPassArgs, gpu: Gpu) -> None:
        """Part of a pass whose grid covers so many rows."""
        (num_heads, _, dim), (kv_heads, max_ctx, _) = self.queries.shape, self.keys.shape
        q, k = self.q, self.k
        check_rows(q.x, num_heads * dim)
        check_rows(k.x, kv_heads * dim)
        load_kernel(heads_source(dim), gpu).launch(
            (num_rows, -(-(num_heads + kv_heads) // _WARPS)),
            32 * _WARPS,
            *(step.word(NUM_TOKENS), step.positions),
            *(q.x, q.norm, float(q.eps), num_heads, q.x.stride(0)),
            *(k.x, k.norm, float(k.eps), kv_heads, k.x.stride(0)),
            *(self.queries, self.keys, max_ctx),
            is_chained=True,
        )


class CudaHeads:
    def __init__(self, max_ctx: int, gpu: Gpu) -> None:
        self.layers: list[LayerHeads] = []
        self._max_ctx, self._gpu = max_ctx, gpu

    def add_layer(self, q: RopeArgs, k: RopeArgs) -> LayerHeads:
        head_dim = k.head_dim
        num_heads, kv_heads = (heads.x.shape[1] // head_dim for heads in (q, k))
        queries = torch.zeros((num_heads, QUERY_LEN, head_dim), device=self._gpu.place)
        sizes = (kv_heads, self._max_ctx, head_dim)
        keys = torch.zeros(sizes, dtype=torch.float16, device=self._gpu.place)
        self.layers.append(LayerHeads(q, k, queries, keys))
        return self.layers[-1]

    def collect(self, first: int, num_rows: int) -> None:
        """All is in its place."""

    def score(self, num_text: int, length: int) -> torch.Tensor:
        count, place = count_queries(num_text, length), self._gpu.place
        positions = torch.arange(length, device=place)
        later = positions > positions[length - count :, None]
        best = torch.zeros(num_text, device=place)
        kv_heads, _, dim = self.layers[0].keys.shape
        size = max(1, _GROUP_BYTES // (4 * kv_heads * length * dim))
        for first in range(0, len(self.layers), size):
            group = self.layers[first : first + size]
            keys = torch.stack([layer.keys[:, :length] for layer in group]).float()
            queries = torch.stack([layer.queries[:, QUERY_LEN - count :] for layer in group])
            grouped = queries.reshape(len(group), kv_heads, -1, dim) * dim**-0.5
            logits = (grouped @ keys.transpose(2, 3)).view(-1, count, length)
            weights = logits.masked_fill_(later, float("-inf")).softmax(-1)
            best = torch.maximum(best, weights[..., :num_text].amax((0, 1)))
        smooth = avg_pool1d(best[None], POOL_LEN, 1, POOL_LEN // 2, count_include_pad=False)
        return num_text * avg_pool1d(smooth, CHUNK_LEN, CHUNK_LEN, ceil_mode=True)[0]
