"""Keys and values of attention layers as 16-bit floats: committing a path, copies.

Slot = absolute position for committed tokens; the nodes of a tree take the slots after them in node
order. One launch commits all layers of an arena.
"""

import numpy as np
import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.pass_args import CudaPassArgs
from draftree.kernels.ops import KvState

_THREADS = 256
_MOST_LAYERS = 512
COMMIT_SOURCE = KernelSource("kv_commit_kernel", ("bits", "attention_cache"))


class CudaKv(KvState):
    """One layer: halves [keys and values, kv_heads, capacity, head_dim], all finite."""

    def __init__(self, num_kv_heads: int, head_dim: int, capacity: int, gpu: Gpu) -> None:
        shape = (2, num_kv_heads, capacity, head_dim)
        self.halves = torch.zeros(shape, dtype=torch.float16, device=gpu.place)

    @property
    def num_kv_heads(self) -> int:
        return self.halves.shape[1]

    @property
    def capacity(self) -> int:
        return self.halves.shape[2]

    @property
    def head_dim(self) -> int:
        return self.halves.shape[3]

    @property
    def keys(self) -> torch.Tensor:
        return self.halves[0]

    @property
    def values(self) -> torch.Tensor:
        return self.halves[1]

    def snapshot(self, end: int, start: int = 0) -> tuple[np.ndarray, ...]:
        """Keys and values [kv_heads, end - start, head_dim] of committed positions."""
        return tuple(part[:, start:end].cpu().numpy().copy() for part in (self.keys, self.values))

    def restore(self, parts: tuple[np.ndarray, ...], start: int = 0, end: int = 0) -> None:
        """Put a copy that began at start back, up to end (0: all of it); no parts: the empty
        sequence.
        """
        for part, saved in zip((self.keys, self.values), parts, strict=bool(parts)):
            length = end - start if end else saved.shape[1]
            part[:, start : start + length].copy_(torch.from_numpy(saved[:, :length]))


class KvArena:
    """The caches of a sequence's layers, all of one capacity, and a table of where they lie."""

    def __init__(self, capacity: int, gpu: Gpu) -> None:
        self.caches: list[CudaKv] = []
        self.capacity = capacity
        self.table = torch.zeros((_MOST_LAYERS, 2), dtype=torch.int64, device=gpu.place)
        self._gpu = gpu

    @property
    def num_chunks(self) -> int:
        """Of 16 bytes, at most: one position in all heads' keys and values of a layer."""
        return max(2 * cache.num_kv_heads * cache.head_dim // 8 for cache in self.caches)

    def new(self, num_kv_heads: int, head_dim: int) -> CudaKv:
        if head_dim % 8:
            raise ValueError(f"heads of {head_dim} dimensions do not fit: not a multiple of 8")
        cache = CudaKv(num_kv_heads, head_dim, self.capacity, self._gpu)
        shape = 2 * num_kv_heads | head_dim // 8 << 32
        row = torch.tensor([cache.halves.data_ptr(), shape], dtype=torch.int64)
        self.table[len(self.caches)] = row
        self.caches.append(cache)
        return cache


def head_strides(x: torch.Tensor, head_dim: int) -> tuple[int, int, int]:
    """Number of heads of [rows, heads * head_dim] or a view of heads, strides of rows and heads."""
    heads, stride = (x.shape[1], x.stride(1)) if x.ndim == 3 else (x.shape[1] // head_dim, head_dim)
    width = x.shape[2] if x.ndim == 3 else x.shape[1] // max(1, heads)
    if x.dtype != torch.float32 or x.stride(-1) != 1 or width != head_dim:
        raise ValueError(f"expected float32 heads of {head_dim}, not {x.dtype} {tuple(x.shape)}")
    if x.data_ptr() % 16 or x.stride(0) % 4 or stride % 4:
        raise ValueError("rows and heads must start at multiples of 16 bytes")
    return heads, x.stride(0), stride


def kv_commit(arena: KvArena, step: CudaPassArgs, gpu: Gpu) -> None:
    """Move the nodes of step.path from slot committed + path[d] to committed + d, in all layers."""
    if not arena.caches:
        return
    load_kernel(COMMIT_SOURCE, gpu).launch(
        (-(-arena.num_chunks // _THREADS), len(arena.caches)),
        _THREADS,
        *(step.control, step.path, arena.table, arena.capacity),
        is_chained=True,
    )
