"""Keys and values of attention layers, in pages: committing a path, copies.

A page holds PAGE positions of a layer; a table that all layers of a sequence share says which page
holds which positions, so that the cost of a pass follows the length of the text, and the pages of a
ring repeat. Slot = absolute position for committed tokens; the nodes of a tree take the slots after
them in node order. Rows are bytes here: a `KvFormat` says what they mean.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.pass_args import CudaPassArgs
from draftree.kernels.ops import KvState
from draftree.kernels.quant.kv_format import KEY_FORMATS, PAGE, VALUE_FORMATS, KvCode, KvFormat

CACHE_FILES = ("bits", "kv_format")
COMMIT_SOURCE = KernelSource("kv_commit_kernel", (*CACHE_FILES, "attention_cache"))
_THREADS = 256
_MOST_LAYERS = 512
_Arguments = tuple[torch.Tensor | int | None, ...]


@dataclass(frozen=True)
class KvShape:
    """What kernels of a cache are compiled for."""

    num_kv_heads: int
    head_dim: int
    key_format: KvFormat = KEY_FORMATS["f16"]
    value_format: KvFormat = VALUE_FORMATS["f16"]
    is_centred: bool = False

    def __post_init__(self) -> None:
        if self.head_dim % 8:
            raise ValueError(f"heads of {self.head_dim} dimensions do not fit: not a multiple of 8")
        codes = {self.keys.code, self.values.code} - {KvCode.HALF}
        if codes and self.head_dim not in (64, 128, 256):
            raise ValueError(f"heads of {self.head_dim} dimensions can only be kept as f16")

    @property
    def keys(self) -> KvFormat:
        return self.key_format.of(self.head_dim)

    @property
    def values(self) -> KvFormat:
        return self.value_format.of(self.head_dim)

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Of a key and of a value of one head."""
        return self.keys.row_bytes(self.head_dim), self.values.row_bytes(self.head_dim)

    @property
    def page_bytes(self) -> int:
        return PAGE * self.num_kv_heads * sum(self.row_bytes)

    @property
    def macros(self) -> tuple[tuple[str, int], ...]:
        keys, values = self.keys, self.values
        codes = ("KEY_CODE", int(keys.code)), ("VALUE_CODE", int(values.code))
        rotations = int(keys.is_rotated), int(values.is_rotated)
        rotated = ("KEYS_ROTATED", rotations[0]), ("VALUES_ROTATED", rotations[1])
        return *codes, *rotated, ("CENTRED", int(self.is_centred))


class PageTable:
    """Which page holds which positions: int32 [positions / PAGE]. A ring of so many positions
    holds those that came last.
    """

    def __init__(self, capacity: int, gpu: Gpu, ring_len: int = 0) -> None:
        self.capacity = capacity
        count = -(-capacity // PAGE)
        self.num_pages = min(count, -(-ring_len // PAGE)) if ring_len else count
        pages = np.arange(count, dtype=np.int32) % self.num_pages
        self.pages = torch.from_numpy(pages).to(gpu.place)


class KeyAngles(NamedTuple):
    """How all layers' centres turn: what a query makes of a turned centre is its product with the
    cosines and sines of the key's position.
    """

    table: torch.Tensor  # float16 [positions, head_dim]: cosines, sines, zeros
    num_pairs: int
    interleaved: bool
    folded: torch.Tensor  # float32 [rows, heads * head_dim]: of the queries of the pass at hand


def key_angles(
    table: torch.Tensor, interleaved: bool, head_dim: int, num_rows: int, num_heads: int
) -> KeyAngles:
    """table: float32 [positions, pairs, 2], cosines and sines."""
    num_positions, pairs, _ = table.shape
    angles = table.new_zeros((-(-num_positions // PAGE) * PAGE, head_dim), dtype=torch.float16)
    angles[:num_positions, : 2 * pairs] = table.transpose(1, 2).flatten(1)
    folded = table.new_zeros((num_rows, num_heads * head_dim))
    return KeyAngles(angles, pairs, interleaved, folded)


class CudaKv(KvState):
    """One layer: bytes [pages, page_bytes], each page [keys, values][kv_heads][PAGE] rows. All
    zeros at first: every row is finite.

    centre: where keys are centred, what is taken from each before it turns, float32
    [kv_heads * head_dim]. Rounding errors follow what is left. Attention adds its part of the
    scores again, with `angles`, which its first recording brings.
    """

    def __init__(self, shape: KvShape, table: PageTable, gpu: Gpu) -> None:
        self.shape, self.table = shape, table
        size = (table.num_pages, shape.page_bytes)
        self.pool = torch.zeros(size, dtype=torch.uint8, device=gpu.place)
        self.centre: torch.Tensor | None = None
        self.angles: KeyAngles | None = None

    @property
    def num_kv_heads(self) -> int:
        return self.shape.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.shape.head_dim

    @property
    def capacity(self) -> int:
        return self.table.capacity

    @property
    def planes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values: uint8 [pages, kv_heads, PAGE, row_bytes]."""
        heads, (key_bytes, value_bytes) = self.num_kv_heads, self.shape.row_bytes
        keys, values = self.pool.split([PAGE * heads * n for n in (key_bytes, value_bytes)], dim=1)
        return (
            keys.view(-1, heads, PAGE, key_bytes),
            values.view(-1, heads, PAGE, value_bytes),
        )

    @property
    def args(self) -> tuple[torch.Tensor | int, ...]:
        """What kernels take, in this order: pool, table, page_bytes."""
        return self.pool, self.table.pages, self.shape.page_bytes

    @property
    def fold_args(self) -> _Arguments:
        """For the kernel that writes keys."""
        if self.angles is None:
            return None, None, 0
        return self.centre, self.angles.folded, self.angles.folded.stride(0)

    def score_args(self, first: int) -> _Arguments:
        """For attention of the pass's rows from the first on."""
        if self.angles is None:
            return None, None, 0
        return self.angles.table, self.angles.folded[first:], self.angles.folded.stride(0)

    @property
    def expand_args(self) -> _Arguments:
        if self.angles is None:
            return None, None, 0, 0
        table, num_pairs, interleaved, _ = self.angles
        return self.centre, table, num_pairs, int(interleaved)

    def rows(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of slots start … end-1: uint8 [kv_heads, end - start, row_bytes]."""
        first = start // PAGE
        pages = self.table.pages[first : -(-end // PAGE)].long()
        kept = slice(start - first * PAGE, end - first * PAGE)
        keys, values = (
            _words(plane)[pages].transpose(0, 1).flatten(1, 2)[:, kept].view(torch.uint8)
            for plane in self.planes
        )
        return keys, values

    def put(self, parts: tuple[torch.Tensor, ...], start: int) -> None:
        """Rows for the slots from start on."""
        slots = torch.arange(start, start + parts[0].shape[1], device=self.pool.device)
        pages = self.table.pages[slots // PAGE].long()
        for plane, part in zip(self.planes, parts, strict=True):
            rows = part.to(plane.device).contiguous()
            _words(plane)[pages, :, slots % PAGE] = _words(rows).transpose(0, 1)


class KvArena:
    """The caches of a sequence's layers, over one table, and a list of where they lie."""

    def __init__(
        self,
        capacity: int,
        gpu: Gpu,
        keys: KvFormat = KEY_FORMATS["f16"],
        values: KvFormat = VALUE_FORMATS["f16"],
        ring_len: int = 0,
    ) -> None:
        self.caches: list[CudaKv] = []
        self.table = PageTable(capacity, gpu, ring_len)
        self.entries = torch.zeros((_MOST_LAYERS, 3), dtype=torch.int64, device=gpu.place)
        self._formats, self._gpu = (keys, values), gpu

    @property
    def num_chunks(self) -> int:
        """Of 16 bytes, at most: one position in all heads' keys and values of a layer."""
        return max(cache.shape.page_bytes // PAGE // 16 for cache in self.caches)

    def new(self, num_kv_heads: int, head_dim: int, centre: torch.Tensor | None = None) -> CudaKv:
        """centre: of its keys, for now; None: they have none."""
        shape = KvShape(num_kv_heads, head_dim, *self._formats, centre is not None)
        cache = CudaKv(shape, self.table, self._gpu)
        cache.centre = None if centre is None else centre.clone()
        key_bytes, value_bytes = shape.row_bytes
        words = shape.page_bytes | num_kv_heads << 32, key_bytes | value_bytes << 32
        row = torch.tensor([cache.pool.data_ptr(), *words], dtype=torch.int64)
        self.entries[len(self.caches)] = row
        self.caches.append(cache)
        return cache


def _words(rows: torch.Tensor) -> torch.Tensor:
    """The same bytes as fewer numbers, which are copied faster."""
    return rows.view(torch.int64) if rows.shape[-1] % 8 == 0 else rows


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
        *(step.control, step.path, arena.entries, arena.table.pages),
        is_chained=True,
    )
