"""Rows in a cache of keys and values on a GPU, written without its kernels."""

import numpy as np
import torch

from benchmarks.kv_coder import decode, encode, rotate, rotate_back
from draftree.kernels.cuda.kv_cache import CudaKv
from draftree.kernels.cuda.pass_args import COMMITTED, IS_TREE, NUM_TOKENS, CudaPassArgs

POISON = 0xFF  # a byte of what is not a number


def write_rows(k: torch.Tensor, v: torch.Tensor, cache: CudaKv, step: CudaPassArgs) -> None:
    """Rows [rows, heads * head_dim] or [rows, heads, head_dim] of the pass that the step holds."""
    count, committed, is_tree = (int(step.control[i]) for i in (NUM_TOKENS, COMMITTED, IS_TREE))
    slots = step.positions[:count].tolist()
    if is_tree:
        slots = list(range(committed, committed + count))
    parts = [_encode(rows[:count], cache, i) for i, rows in enumerate((k, v))]
    for i, slot in enumerate(slots):
        cache.put(tuple(part[:, i : i + 1] for part in parts), slot)


def fill(k: torch.Tensor, v: torch.Tensor, cache: CudaKv, start: int = 0) -> None:
    """Rows [rows, heads, head_dim] at the slots from start on."""
    if len(k):
        cache.put(tuple(_encode(rows, cache, i) for i, rows in enumerate((k, v))), start)


def rounded(rows: torch.Tensor, cache: CudaKv, side: int) -> torch.Tensor:
    """What the cache makes of keys (0) or values (1) [rows, heads, head_dim]."""
    form = (cache.shape.keys, cache.shape.values)[side]
    raw = _encode(rows, cache, side).numpy()
    found = decode(raw, cache.head_dim, form)
    found = rotate_back(found) if form.is_rotated else found
    return torch.from_numpy(found).transpose(0, 1)


def _encode(rows: torch.Tensor, cache: CudaKv, side: int) -> torch.Tensor:
    """uint8 [heads, rows, row_bytes]."""
    form = (cache.shape.keys, cache.shape.values)[side]
    heads = rows.reshape(len(rows), cache.num_kv_heads, cache.head_dim).transpose(0, 1)
    numbers = np.ascontiguousarray(heads.cpu().numpy())
    return torch.from_numpy(encode(rotate(numbers) if form.is_rotated else numbers, form))
