"""Keys and values of one attention layer: where they lie, how rows are written, how a path is kept.

Slot = absolute position for committed tokens; the nodes of a tree take the slots after them in
node order. Sixteen keys lie side by side, so that one vector load brings the same dimension of
sixteen keys.
"""

# ruff: noqa: ANN001, ANN202  (numba inspects the kernels' signatures)
import numpy as np

from draftree.kernels.cpu.block import BLOCK_COLS, copy_element, scatter
from draftree.kernels.cpu.elementwise import head_strides, row_count
from draftree.kernels.cpu.kernel import kernel
from draftree.kernels.cpu.program import Program
from draftree.kernels.cpu.simd import LANES, load, load_i64, store, store_half
from draftree.kernels.cpu.step import COMMITTED, NUM_TOKENS, PATH_LEN, Step


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class KvCache:
    """keys [kv_heads, capacity / 16, head_dim, 16], values [kv_heads, capacity, value_dim].

    capacity counts positions, committed and tentative ones; it is rounded up to whole blocks.
    value_dim is head_dim rounded up likewise; what lies between is zero. dtype is float32 or
    float16.
    """

    def __init__(
        self,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: type[np.floating] = np.float32,
    ) -> None:
        assert head_dim % LANES == 0, f"head_dim {head_dim} is not a multiple of {LANES}"
        assert dtype in (np.float32, np.float16), "a cache holds float32 or float16"
        self.kv_heads, self.head_dim, self.dtype = kv_heads, head_dim, dtype
        self.capacity = round_up(capacity, BLOCK_COLS)
        self.value_dim = round_up(head_dim, BLOCK_COLS)
        self.keys = np.zeros((kv_heads, self.capacity // LANES, head_dim, LANES), dtype)
        self.values = np.zeros((kv_heads, self.capacity, self.value_dim), dtype)

    @property
    def is_half(self) -> bool:
        return self.dtype == np.float16

    def keys_by_position(self, kv_head: int) -> np.ndarray:
        """A copy of one head's keys as [capacity, head_dim], for looking at them."""
        return self.keys[kv_head].transpose(0, 2, 1).reshape(self.capacity, self.head_dim)

    def copy(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Slots start … end-1; of the keys whole tiles, so a few slots more."""
        tiles = self.keys[:, start // LANES : -(-end // LANES)]
        return tiles.copy(), self.values[:, start:end].copy()

    def put(self, parts: tuple[np.ndarray, ...], start: int, end: int) -> None:
        """Slots start … end-1 of a copy that began at start. The keys that a copy has before start
        are those that belong there; what follows end is not committed.
        """
        first, last = start // LANES, -(-end // LANES)
        self.keys[:, first:last] = parts[0][:, : last - first]
        self.values[:, start:end] = parts[1][:, : end - start]


@kernel
def _kv_write_kernel(args, ticket, thread, num_threads):
    num_rows, committed = load_i64(args[0]), load_i64(args[1])
    kv_heads, head_dim, value_dim, capacity = args[2], args[3], args[4], args[5]
    k, k_row, k_head = args[6], args[7], args[8]
    v, v_row, v_head = args[9], args[10], args[11]
    keys, values, is_half = args[12], args[13], args[14]
    size = 2 if is_half != 0 else 4
    first_tile = committed // LANES
    num_tiles = (committed + num_rows - 1) // LANES + 1 - first_tile
    total = kv_heads * num_tiles  # whole tiles, so that threads do not share cache lines
    for item in range(total * thread // num_threads, total * (thread + 1) // num_threads):
        head, tile = item // num_tiles, first_tile + item % num_tiles
        p_tile = keys + (head * capacity + tile * LANES) * head_dim * size
        begin = max(committed, tile * LANES)
        for slot in range(begin, min(committed + num_rows, (tile + 1) * LANES)):
            p_k = k + (slot - committed) * k_row + head * k_head
            p_v = v + (slot - committed) * v_row + head * v_head
            p_lane = p_tile + (slot - tile * LANES) * size
            p_value = values + (head * capacity + slot) * value_dim * size
            for d in range(0, head_dim, LANES):
                scatter(p_lane + d * LANES * size, LANES * size, is_half, load(p_k + 4 * d))
                if is_half != 0:
                    store_half(p_value + 2 * d, load(p_v + 4 * d))
                else:
                    store(p_value + 4 * d, load(p_v + 4 * d))


@kernel
def _kv_commit_kernel(args, ticket, thread, num_threads):
    path_len, committed, path = load_i64(args[0]), load_i64(args[1]), args[2]
    kv_heads, head_dim, value_dim, capacity = args[3], args[4], args[5], args[6]
    keys, values, is_half = args[7], args[8], args[9]
    size = 2 if is_half != 0 else 4
    for head in range(thread, kv_heads, num_threads):
        for j in range(path_len):  # a node never lies before its place on the path
            node = load_i64(path + 8 * j)
            if node == j:
                continue
            source, target = committed + node, committed + j
            p_from = keys + ((head * capacity + source // 16 * 16) * head_dim + source % 16) * size
            p_to = keys + ((head * capacity + target // 16 * 16) * head_dim + target % 16) * size
            v_from = values + (head * capacity + source) * value_dim * size
            v_to = values + (head * capacity + target) * value_dim * size
            for d in range(head_dim):
                copy_element(p_to + d * 16 * size, p_from + d * 16 * size, is_half)
                copy_element(v_to + d * size, v_from + d * size, is_half)


def record_kv_write(
    program: Program, step: Step, k: np.ndarray, v: np.ndarray, cache: KvCache
) -> None:
    """Row i of k and v [max_tokens, kv_heads * head_dim] goes to slot committed + i."""
    program.add(
        _kv_write_kernel,
        row_count(step, NUM_TOKENS),
        row_count(step, COMMITTED),
        cache.kv_heads,
        cache.head_dim,
        cache.value_dim,
        cache.capacity,
        k,
        *head_strides(k, cache.kv_heads, cache.head_dim),
        v,
        *head_strides(v, cache.kv_heads, cache.head_dim),
        cache.keys,
        cache.values,
        int(cache.is_half),
        reads=(k, v),
        writes=(cache.keys, cache.values),
    )


def record_kv_commit(program: Program, step: Step, cache: KvCache) -> None:
    """Move the nodes of step.path from slot committed + path[j] to slot committed + j."""
    program.add(
        _kv_commit_kernel,
        row_count(step, PATH_LEN),
        row_count(step, COMMITTED),
        step.path,
        cache.kv_heads,
        cache.head_dim,
        cache.value_dim,
        cache.capacity,
        cache.keys,
        cache.values,
        int(cache.is_half),
        reads=(cache.keys, cache.values),
        writes=(cache.keys, cache.values),
    )
