"""Norms of heads and rotary positions, in one launch: queries in place, keys on their way into the
cache, and values with them.

Rows are float32 [rows, num_heads * head_dim], perhaps views of wider buffers. Cosines and sines
come from a table made in float64, so they depend on the position alone.
"""

from typing import NamedTuple

import numpy as np
import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.kv_cache import CACHE_FILES, CudaKv, KvShape
from draftree.kernels.cuda.pass_args import CudaPassArgs
from draftree.kernels.cuda.prepare import check_rows

_WARPS = 8  # heads of a block
_SLAB = 16384  # positions whose angles the host has at a time
MOST_HEAD_DIM = 512


class RopeArgs(NamedTuple):
    """Queries or keys to be normed, where there is a norm, and turned, where there is a table."""

    x: torch.Tensor
    norm: torch.Tensor | None
    eps: float
    head_dim: int
    table: torch.Tensor | None
    interleaved: bool

    def first(self, num_rows: int) -> "RopeArgs":
        return self._replace(x=self.x[:num_rows])


def rope_table(inv_freq: np.ndarray, num_positions: int, gpu: Gpu) -> torch.Tensor:
    """float32 [num_positions, rotary_dim / 2, 2]: cosine and sine of position * inv_freq."""
    table = torch.empty((num_positions, len(inv_freq), 2), device=gpu.place)
    for first in range(0, num_positions, _SLAB):
        positions = np.arange(first, min(first + _SLAB, num_positions), dtype=np.float64)
        angles = np.outer(positions, np.asarray(inv_freq, dtype=np.float64))
        slab = np.stack((np.cos(angles), np.sin(angles)), axis=-1).astype(np.float32)
        table[first : first + len(slab)] = torch.from_numpy(slab)
    return table


def rotary_source(shape: KvShape) -> KernelSource:
    files = (*CACHE_FILES, "kv_code", "attention_cache", "rotary")
    macros = (("HEAD_DIM", shape.head_dim), *shape.macros)
    return KernelSource("rotary_kernel", files, macros)


def rope_and_store_kv(
    q: RopeArgs | None, k: RopeArgs, v: torch.Tensor, cache: CudaKv, step: CudaPassArgs, gpu: Gpu
) -> None:
    """Each head / sqrt(mean of squares + eps) * norm, then turned by the angles of the row's
    position. Keys and values of a committed pass go to their positions, those of a tree's node i to
    slot committed + i; the rows of k stay as they are. Queries are rotated like the keys, where the
    cache's format rotates them. A cache's centre is taken from keys before they are turned.
    """
    q = q or k._replace(x=k.x[:, :0])  # no heads
    head_dim, half = cache.head_dim, 0 if k.table is None else k.table.shape[1]
    q_heads, kv_heads = q.x.shape[1] // head_dim, cache.num_kv_heads
    if 2 * half > head_dim or head_dim > MOST_HEAD_DIM:
        raise ValueError(f"{2 * half} rotary dims of heads of {head_dim} are not supported")
    for turn in (q, k):
        if turn.norm is not None and turn.norm.shape != (head_dim,):
            raise ValueError(f"a norm of {head_dim} values is expected")
        is_alike = turn.table is k.table and turn.interleaved == k.interleaved
        if not is_alike or turn.head_dim != head_dim:
            raise ValueError("queries and keys must be turned alike, in heads of the cache's size")
    for x, num_heads in ((q.x, q_heads), (k.x, kv_heads), (v, kv_heads)):
        check_rows(x, num_heads * head_dim)
    if not len(q.x) == len(k.x) == len(v):
        raise ValueError("queries, keys and values must have the same rows")
    load_kernel(rotary_source(cache.shape), gpu).launch(
        (len(v), -(-(q_heads + 2 * kv_heads) // _WARPS)),
        32 * _WARPS,
        *(step.control, step.positions),
        *(q.x, q.norm, float(q.eps), q_heads, q.x.stride(0)),
        *(k.x, k.norm, float(k.eps), k.x.stride(0), v, v.stride(0)),
        *(*cache.args, kv_heads, *cache.shape.row_bytes, k.table, half, int(k.interleaved)),
        *cache.fold_args,
        shared_bytes=4 * _WARPS * head_dim,
        is_chained=True,
    )
