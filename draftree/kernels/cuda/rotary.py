"""Norms of heads and rotary positions, in place, for queries and keys in one launch.

x is float32 [rows, num_heads * head_dim], perhaps a view of a wider buffer. Cosines and sines come
from a table made in float64, so they depend on the position alone.
"""

import numpy as np
import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.prepare import check_rows

_WARPS = 8  # heads of a block
_SLAB = 16384  # positions whose angles the host has at a time
MOST_HEAD_DIM = 512


def rope_table(inv_freq: np.ndarray, num_positions: int, gpu: Gpu) -> torch.Tensor:
    """float32 [num_positions, rotary_dim / 2, 2]: cosine and sine of position * inv_freq."""
    table = torch.empty((num_positions, len(inv_freq), 2), device=gpu.place)
    for first in range(0, num_positions, _SLAB):
        positions = np.arange(first, min(first + _SLAB, num_positions), dtype=np.float64)
        angles = np.outer(positions, np.asarray(inv_freq, dtype=np.float64))
        slab = np.stack((np.cos(angles), np.sin(angles)), axis=-1).astype(np.float32)
        table[first : first + len(slab)] = torch.from_numpy(slab)
    return table


def rotary_source(head_dim: int) -> KernelSource:
    return KernelSource("rotary_kernel", ("bits", "rotary"), (("HEAD_DIM", head_dim),))


def head_norm_rope_pair(
    q: torch.Tensor,
    k: torch.Tensor | None,
    head_dim: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    table: torch.Tensor | None,
    positions: torch.Tensor,
    gpu: Gpu,
    *,
    interleaved: bool,
    live: torch.Tensor,
) -> None:
    """Each head / sqrt(mean of squares + eps) * norm, where there is one, then turned by the angles
    of the row's position (int32 [rows]), where there is a table. Rows from live on are left alone.
    """
    heads = [0 if x is None else x.shape[1] // head_dim for x in (q, k)]
    half = 0 if table is None else table.shape[1]
    for x, num_heads in zip((q, k), heads, strict=True):
        if x is not None:
            check_rows(x, num_heads * head_dim)
    if 2 * half > head_dim or head_dim > MOST_HEAD_DIM:
        raise ValueError(f"{2 * half} rotary dims of heads of {head_dim} are not supported")
    for norm in (q_norm, k_norm):
        if norm is not None and norm.shape != (head_dim,):
            raise ValueError(f"a norm of {head_dim} values is expected")
    load_kernel(rotary_source(head_dim), gpu).launch(
        (q.shape[0], -(-sum(heads) // _WARPS)),
        32 * _WARPS,
        *(q, q_norm, k, k_norm, table, positions, live, float(eps)),
        *(heads[0], q.stride(0), heads[1], 0 if k is None else k.stride(0)),
        *(half, int(interleaved)),
        is_chained=True,
    )


def head_norm_rope(
    x: torch.Tensor,
    head_dim: int,
    norm: torch.Tensor | None,
    eps: float,
    table: torch.Tensor | None,
    positions: torch.Tensor,
    gpu: Gpu,
    *,
    interleaved: bool,
    live: torch.Tensor,
) -> None:
    """The same for queries or keys alone."""
    pair = x, None, head_dim, norm, None
    head_norm_rope_pair(*pair, eps, table, positions, gpu, interleaved=interleaved, live=live)
