"""Keys and values of one attention layer: where they lie, how rows are written, how a path is kept.

Slot = position, or its remainder in a ring; a tree's nodes follow the committed tokens. Sixteen
keys lie side by side, so that one vector load brings the same dimension of sixteen keys, or the
same two in eight bits: a cell of a key has two bytes or more. In eight bits, a key or value of one
head has a scale of its own, and keys are transformed (hadamard.py): they are large in few dims.
"""

# ruff: noqa: ANN001, ANN202  (numba inspects the kernels' signatures)
from collections.abc import Iterator

import numpy as np

from draftree.kernels.cpu.arena import lazy_zeros
from draftree.kernels.cpu.block import (
    BLOCK_COLS,
    TYPE_F16,
    TYPE_F32,
    TYPE_I8,
    copy_element,
    scatter,
    store_as,
)
from draftree.kernels.cpu.elementwise import head_strides, row_count
from draftree.kernels.cpu.hadamard import transform_row
from draftree.kernels.cpu.instruction import LANES
from draftree.kernels.cpu.jit import njit
from draftree.kernels.cpu.kernel import kernel
from draftree.kernels.cpu.pass_args import COMMITTED, NUM_TOKENS, PATH_LEN, PassArgs
from draftree.kernels.cpu.program import Program
from draftree.kernels.cpu.quads import WORD_STEP
from draftree.kernels.cpu.simd import (
    absolute,
    load,
    load_f32,
    load_i64,
    max_lanes,
    maximum,
    splat,
    store_f32,
)
from draftree.kernels.ops import KvState, Rope


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class KvCache(KvState):
    """keys [kv_heads, capacity / 16, head_dim / cell_len, 16, cell_len], values [kv_heads,
    capacity, value_dim]; cell_len is 2 for bytes, else 1.

    capacity counts positions, committed and speculative ones; it is rounded up to whole blocks,
    with room for those that are read, but do not count, behind a tree. A ring holds the last
    ring_len positions of any number; attention may look no further back.
    value_dim is head_dim rounded up likewise; what lies between is zero. dtype is float32, float16
    or int8; then key_scales and value_scales, float32 [kv_heads, capacity], follow keys and values
    in memory.

    rope: how keys are turned, once that is recorded.
    """

    centre: np.ndarray | None = None
    rope: Rope | None = None

    def __init__(
        self,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: type[np.number] = np.float32,
        ring_len: int = 0,
    ) -> None:
        """ring_len: a multiple of the chunks that attention takes keys in; 0: no ring."""
        assert head_dim % LANES == 0, f"head_dim {head_dim} is not a multiple of {LANES}"
        assert dtype in _TYPES, "a cache holds float32, float16 or int8"
        self.kv_heads, self.head_dim, self.dtype = kv_heads, head_dim, dtype
        self.capacity = round_up((ring_len or capacity) + WORD_STEP - 1, BLOCK_COLS)
        self.ring_len = ring_len or self.capacity  # without a ring, positions are below it
        self.value_dim = round_up(head_dim, BLOCK_COLS)
        self.type_word = _TYPES[dtype]
        self.sizes = kv_heads, head_dim, self.value_dim, self.capacity
        cell_len = 2 if dtype == np.int8 else 1
        shape = (kv_heads, self.capacity // LANES, head_dim // cell_len, LANES, cell_len)
        self.keys, self.key_scales = self._allocate(shape)
        self.values, self.value_scales = self._allocate((kv_heads, self.capacity, self.value_dim))

    def _allocate(self, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        num_bytes = int(np.prod(shape)) * np.dtype(self.dtype).itemsize
        num_scales = self.kv_heads * self.capacity if self.dtype == np.int8 else 0
        memory = lazy_zeros(num_bytes + 4 * num_scales)
        scales = memory[num_bytes:].view(np.float32).reshape(self.kv_heads, -1)
        return memory[:num_bytes].view(self.dtype).reshape(shape), scales

    def read_keys(self, end: int) -> np.ndarray:
        """Of positions 0 … end-1, but of bytes: float32 [kv_heads, end, head_dim]."""
        assert self.dtype != np.int8, "bytes have scales, and are transformed"
        tiles = self.copy(0, end)[0]
        heads, num_tiles, dim, lanes, _ = tiles.shape
        keys = tiles.swapaxes(2, 3).reshape(heads, num_tiles * lanes, dim)
        return keys[:, :end].astype(np.float32)

    def copy(self, start: int, end: int) -> tuple[np.ndarray, ...]:
        """Positions start … end-1; of the keys whole tiles, so a few more."""
        tiles = list(_runs(start // LANES, -(-end // LANES), self.ring_len // LANES))
        slots = list(_runs(start, end, self.ring_len))
        scales = (self.key_scales, self.value_scales) if self.dtype == np.int8 else ()
        pairs = (self.keys, tiles), *((array, slots) for array in (self.values, *scales))
        return tuple(
            np.concatenate([array[:, :0], *(array[:, run] for _, run in runs)], axis=1)
            for array, runs in pairs
        )

    def put(self, parts: tuple[np.ndarray, ...], start: int, end: int, first: int = 0) -> None:
        """Positions first … end-1 of a copy that began at start, and no others."""
        first = max(start, first)
        by_slot = (self.values, self.key_scales, self.value_scales)
        for source, slots in _runs(first, end, self.ring_len):
            for array, part in zip(by_slot, parts[1:], strict=False):
                array[:, slots] = part[:, first - start :][:, source]
        num_tiles, origin, low = self.ring_len // LANES, start // LANES, -(-first // LANES)
        for source, tiles in _runs(low, end // LANES, num_tiles):
            self.keys[:, tiles] = parts[0][:, low - origin :][:, source]
        for tile in (first // LANES, (end - 1) // LANES):
            lanes = slice(max(first - tile * LANES, 0), end - tile * LANES)
            self.keys[:, tile % num_tiles, :, lanes] = parts[0][:, tile - origin, :, lanes]


def _runs(start: int, end: int, length: int) -> Iterator[tuple[slice, slice]]:
    """Runs of the places start … end-1 of a ring: counted from start, and in the ring."""
    at = start
    while at < end:
        stop = min(end, at - at % length + length)
        yield slice(at - start, stop - start), slice(at % length, at % length + stop - at)
        at = stop


_TYPES = {np.float32: TYPE_F32, np.float16: TYPE_F16, np.int8: TYPE_I8}


@njit
def _scale_of(row, head_dim):
    """What the largest of a row is 127 of."""
    top = splat(0.0)
    for c in range(row, row + 4 * head_dim, 64):
        top = maximum(absolute(load(c)), top)
    return max_lanes(top) / np.float32(127.0)


@njit
def _inverse(scale):
    return np.float32(1.0) / scale if scale > np.float32(0.0) else np.float32(0.0)


@kernel
def _kv_write_kernel(args, ticket, thread, num_threads):
    num_rows, committed = load_i64(args[0]), load_i64(args[1])
    kv_heads, head_dim, value_dim, capacity = args[2], args[3], args[4], args[5]
    k, k_row, k_head = args[6], args[7], args[8]
    v, v_row, v_head = args[9], args[10], args[11]
    keys, values, kind, ring = args[12], args[13], args[14], args[15]
    size = 4 >> kind
    cell = max(size, 2)
    key_scales = keys + kv_heads * capacity * head_dim
    value_scales = values + kv_heads * capacity * value_dim
    k_factor, v_factor = splat(1.0), splat(1.0)
    first_tile = committed // LANES
    num_tiles = (committed + num_rows - 1) // LANES + 1 - first_tile
    total = kv_heads * num_tiles  # whole tiles, so that threads do not share cache lines
    for item in range(total * thread // num_threads, total * (thread + 1) // num_threads):
        head, tile = item // num_tiles, first_tile + item % num_tiles
        begin = max(committed, tile * LANES)
        wrapped = tile * LANES - tile * LANES % ring
        p_tile = keys + (head * capacity + tile * LANES - wrapped) * head_dim * size
        for position in range(begin, min(committed + num_rows, (tile + 1) * LANES)):
            p_k = k + (position - committed) * k_row + head * k_head
            p_v = v + (position - committed) * v_row + head * v_head
            slot, p_lane = position - wrapped, p_tile + (position - tile * LANES) * cell
            p_value = values + (head * capacity + slot) * value_dim * size
            if kind == TYPE_I8:
                transform_row(p_k, head_dim)
                k_scale, v_scale = _scale_of(p_k, head_dim), _scale_of(p_v, head_dim)
                store_f32(key_scales + 4 * (head * capacity + slot), k_scale)
                store_f32(value_scales + 4 * (head * capacity + slot), v_scale)
                k_factor, v_factor = splat(_inverse(k_scale)), splat(_inverse(v_scale))
            for d in range(0, head_dim, LANES):
                key, value = load(p_k + 4 * d) * k_factor, load(p_v + 4 * d) * v_factor
                scatter(p_lane + d * LANES * size, LANES * cell, kind, key)
                store_as(p_value + d * size, kind, value)


@kernel
def _kv_commit_kernel(args, ticket, thread, num_threads):
    path_len, committed, path = load_i64(args[0]), load_i64(args[1]), args[2]
    kv_heads, head_dim, value_dim, capacity = args[3], args[4], args[5], args[6]
    keys, values, kind, ring = args[7], args[8], args[9], args[10]
    size = 4 >> kind
    cell = max(size, 2)
    key_scales = keys + kv_heads * capacity * head_dim
    value_scales = values + kv_heads * capacity * value_dim
    for head in range(thread, kv_heads, num_threads):
        for j in range(path_len):  # a node never lies before its place on the path
            node = load_i64(path + 8 * j)
            if node == j:
                continue
            source, target = (committed + node) % ring, (committed + j) % ring
            p_from = keys + (head * capacity + source // 16 * 16) * head_dim * size
            p_to = keys + (head * capacity + target // 16 * 16) * head_dim * size
            p_from, p_to = p_from + source % 16 * cell, p_to + target % 16 * cell
            v_from = values + (head * capacity + source) * value_dim * size
            v_to = values + (head * capacity + target) * value_dim * size
            for c in range(0, head_dim * 16 * size, 16 * cell):
                copy_element(p_to + c, p_from + c, min(kind, TYPE_F16))
            for c in range(0, head_dim * size, 2):
                copy_element(v_to + c, v_from + c, TYPE_F16)
            if kind == TYPE_I8:
                for scales in (key_scales, value_scales):
                    row = scales + 4 * head * capacity
                    store_f32(row + 4 * target, load_f32(row + 4 * source))


def record_kv_write(
    program: Program, step: PassArgs, k: np.ndarray, v: np.ndarray, cache: KvCache
) -> None:
    """Row i of k and v [max_tokens, kv_heads * head_dim] goes to position committed + i. In eight
    bits the rows of k are left transformed.
    """
    program.add(
        _kv_write_kernel,
        *(row_count(step, NUM_TOKENS), row_count(step, COMMITTED), *cache.sizes),
        *(k, *head_strides(k, *cache.sizes[:2]), v, *head_strides(v, *cache.sizes[:2])),
        *(cache.keys, cache.values, cache.type_word, cache.ring_len),
        reads=(k, v),
        writes=(k, cache.keys, cache.values),
    )


def record_kv_commit(program: Program, step: PassArgs, cache: KvCache) -> None:
    """Move the nodes of step.path from slot committed + path[j] to slot committed + j."""
    program.add(
        _kv_commit_kernel,
        *(row_count(step, PATH_LEN), row_count(step, COMMITTED), step.path, *cache.sizes),
        *(cache.keys, cache.values, cache.type_word, cache.ring_len),
        reads=(cache.keys, cache.values),
        writes=(cache.keys, cache.values),
    )
