"""Attention of a pass's rows over the committed keys and, in a tree, over their own ancestors.

Keys are taken in chunks fixed by absolute position: scores, softmax weights and weighted values of a chunk, then chunks
merged in position order. A node's ancestors stand at their absolute positions and siblings never enter, so a node's
result is bit-equal to that of the same token after its path was committed, whatever shares the pass.
"""

# ruff: noqa: ANN001, ANN202  (numba inspects the kernels' signatures)
import numpy as np
from numba import njit

from draftree.kernels.cpu.atomic import atomic_add
from draftree.kernels.cpu.block import (
    BLOCK_COLS,
    BLOCK_ROWS,
    CALL_WORDS,
    multiply,
    multiply_kernel,
)
from draftree.kernels.cpu.elementwise import head_strides
from draftree.kernels.cpu.kernel import kernel
from draftree.kernels.cpu.kv_cache import KvCache, record_kv_commit, record_kv_write, round_up
from draftree.kernels.cpu.program import Program
from draftree.kernels.cpu.simd import (
    LANES,
    bits_to_float,
    blend,
    exp,
    fma,
    load,
    load_f32,
    load_half,
    load_i64,
    max_lanes,
    maximum,
    splat,
    store,
    store_f32,
    store_i64,
    sum_lanes,
)
from draftree.kernels.cpu.step import COMMITTED, IS_TREE, NUM_TOKENS, Step

__all__ = [
    "KvCache",
    "attention_scratch_len",
    "record_attention",
    "record_kv_commit",
    "record_kv_write",
]

CHUNK = 256  # keys; a chunk's bounds are multiples of it
_QUERIES = 96  # query vectors (rows x heads of a group) that share the loads of a chunk
_SPLIT_FLOATS = 4_000_000  # limit on what chunks may leave for the merge
_MINUS_INFINITY = np.float32(-np.inf)

# Words of the operations' arguments.
_CONTROL, _ANCESTORS, _MAX_NODES, _WINDOW, _BIDIRECTIONAL = range(5)
_Q, _Q_ROW, _Q_HEAD, _OUT, _OUT_ROW, _OUT_HEAD = range(5, 11)
_KEYS, _VALUES, _HALF, _CAPACITY, _HEAD_DIM, _VALUE_DIM = range(11, 17)
_KV_HEADS, _GROUP, _ROW_BLOCK, _SCALE, _SCRATCH, _THREAD_BYTES = range(17, 23)
_SCRATCH_THREADS, _PARTS, _SPLIT_ROWS, _DEPTHS, _MULTIPLY = range(23, 28)


def _row_block(group: int) -> int:
    return max(1, _QUERIES // group)


def _thread_floats(max_nodes: int, head_dim: int, value_dim: int, group: int) -> int:
    """Scratch of one thread: queries, weights, tree scores, chunk and running sums, gathered values."""
    num_queries = round_up(_row_block(group) * group, BLOCK_ROWS)
    per_query = head_dim + CHUNK + _tree_cols(max_nodes) + 2 * _state_len(value_dim)
    return round_up(2 * CALL_WORDS + num_queries * per_query + max_nodes * value_dim, LANES)


def _tree_cols(max_nodes: int) -> int:
    return round_up(max_nodes, BLOCK_COLS) + BLOCK_COLS


def _state_len(value_dim: int) -> int:
    """Weighted sum of values, then the maximum and the sum of weights in all lanes."""
    return value_dim + 2 * LANES


def _split_rows(max_nodes: int, num_heads: int, capacity: int, value_dim: int) -> int:
    """How many rows may leave one part per chunk, so that chunks can go to different threads."""
    per_row = num_heads * (capacity // CHUNK + 1) * _state_len(value_dim)
    return max(1, min(max_nodes, _SPLIT_FLOATS // per_row))


def attention_scratch_len(step: Step, cache: KvCache, num_heads: int, num_threads: int) -> int:
    """How many float32 of scratch `record_attention` needs; layers of one shape can share them."""
    group = num_heads // cache.kv_heads
    rows = _split_rows(step.max_nodes, num_heads, cache.capacity, cache.value_dim)
    parts = rows * num_heads * (cache.capacity // CHUNK + 1) * _state_len(cache.value_dim)
    return parts + num_threads * _thread_floats(
        step.max_nodes, cache.head_dim, cache.value_dim, group
    )


@njit(inline="always")
def _is_tree(args):
    return load_i64(args[_CONTROL] + 8 * IS_TREE) != 0 and args[_BIDIRECTIONAL] == 0


@njit(inline="always")
def _row_bounds(args, row):
    """First and one past the last absolute position that a row sees."""
    committed = load_i64(args[_CONTROL] + 8 * COMMITTED)
    position = committed + row
    if _is_tree(args):
        position = committed + load_i64(args[_DEPTHS] + 8 * row)
    end = position + 1
    if args[_BIDIRECTIONAL] != 0:
        end = committed + load_i64(args[_CONTROL] + 8 * NUM_TOKENS)
    begin = np.int64(0)
    if args[_WINDOW] > 0:
        begin = max(begin, position - args[_WINDOW] + 1)
    return begin, end


@njit(inline="always")
def _clip(position, base):
    return min(max(position - base, 0), CHUNK)


@njit(inline="always")
def _is_split(args, num_threads):
    """Whether chunks go to different threads; the same answer in both operations of a pass."""
    num_rows = load_i64(args[_CONTROL] + 8 * NUM_TOKENS)
    num_blocks = (num_rows + args[_ROW_BLOCK] - 1) // args[_ROW_BLOCK]
    last = load_i64(args[_CONTROL] + 8 * COMMITTED) + num_rows - 1
    is_few = num_blocks * args[_KV_HEADS] < 4 * num_threads
    return num_threads > 1 and is_few and num_rows <= args[_SPLIT_ROWS] and last >= CHUNK


@njit(inline="always")
def _merge(state, part, value_dim):
    """Add a later part (weighted values, maximum, sum of weights) to the state, both in scratch."""
    s_max, s_sum = state + 4 * value_dim, state + 4 * value_dim + 64
    p_max, p_sum = part + 4 * value_dim, part + 4 * value_dim + 64
    if load_f32(p_sum) == np.float32(0.0):
        return
    if load_f32(s_sum) == np.float32(0.0):
        for c in range(0, 4 * value_dim + 128, 64):
            store(state + c, load(part + c))
        return
    top = maximum(load(s_max), load(p_max))
    s_scale, p_scale = exp(load(s_max) - top), exp(load(p_max) - top)
    for c in range(0, 4 * value_dim, 64):
        store(state + c, fma(load(part + c), p_scale, load(state + c) * s_scale))
    store(s_sum, fma(load(p_sum), p_scale, load(s_sum) * s_scale))
    store(s_max, top)


@njit(inline="always")
def _finish(args, state, row, head):
    out = args[_OUT] + row * args[_OUT_ROW] + head * args[_OUT_HEAD]
    total = load(state + 4 * args[_VALUE_DIM] + 64)
    for c in range(0, 4 * args[_HEAD_DIM], 64):
        store(out + c, load(state + c) / total)


@njit
def _score(call, args, kv_head, num_queries, queries, first_slot, end_slot, out, out_row):
    """out[q, slot - first_slot] for slots from first_slot (a multiple of 32) to end_slot, rounded up."""
    head_dim, is_half = args[_HEAD_DIM], args[_HALF]
    step = 32 if is_half != 0 else 64
    q_row, next_tile = 4 * head_dim, head_dim * step
    keys = args[_KEYS] + (kv_head * args[_CAPACITY] + first_slot) // LANES * next_tile
    for _ in range(first_slot, end_slot, BLOCK_COLS):
        multiply(
            call, num_queries, is_half, 1, out, out_row, queries, q_row, keys, step, next_tile, head_dim
        )
        keys += 2 * next_tile
        out += 4 * BLOCK_COLS


@njit
def _softmax(weights, begin, end, part_tail):
    """Scores [begin, end) become e^(score - maximum); the maximum and the sum go to part_tail."""
    top = splat(_MINUS_INFINITY)
    low = splat(_MINUS_INFINITY)
    for i in range(begin // 16 * 16, end, 16):
        value = blend(low, blend(load(weights + 4 * i), low, end - i), begin - i)
        top = maximum(value, top)
    top = splat(max_lanes(top))
    total, zero = splat(0.0), splat(0.0)
    for i in range(begin // 16 * 16, end, 16):
        value = exp(load(weights + 4 * i) - top)
        value = blend(zero, blend(value, zero, end - i), begin - i)
        store(weights + 4 * i, value)
        total = total + value
    store(part_tail, top)
    store(part_tail + 64, splat(sum_lanes(total)))


@njit
def _weigh(call, num_queries, weights, begin, end, values, value_dim, is_half, out, out_row):
    """out[q] += weights[q, begin:end] x values[begin:end]."""
    if end <= begin:
        return
    size = 2 if is_half != 0 else 4
    step, w = value_dim * size, weights + 4 * begin
    values += begin * step
    for _ in range(0, value_dim, BLOCK_COLS):
        multiply(
            call, num_queries, is_half, 0, out, out_row, w, 4 * CHUNK, values, step, 16 * size, end - begin
        )
        values += BLOCK_COLS * size
        out += 4 * BLOCK_COLS


@njit
def _weigh_shared(call, args, row, num_queries, base, shared_end, weights, values, out, out_row):
    """Weighted values of a chunk's committed (or chain) positions; queries that see the same share the loads."""
    group, value_dim, is_half = args[_GROUP], args[_VALUE_DIM], args[_HALF]
    for first in range(0, num_queries, BLOCK_ROWS):
        count = min(BLOCK_ROWS, num_queries - first)
        low, high = np.int64(0), np.int64(CHUNK)
        for q in range(first, first + count):
            begin, end = _row_bounds(args, row + q // group)
            low = max(low, _clip(begin, base))
            high = min(high, _clip(min(end, shared_end), base))
        high = max(high, low)
        for q in range(first, first + count):
            begin, end = _row_bounds(args, row + q // group)
            begin, end = _clip(begin, base), _clip(min(end, shared_end), base)
            w, o = weights + q * 4 * CHUNK, out + q * out_row
            _weigh(call, 1, w, begin, min(low, end), values, value_dim, is_half, o, out_row)
        w, o = weights + first * 4 * CHUNK, out + first * out_row
        _weigh(call, count, w, low, high, values, value_dim, is_half, o, out_row)
        for q in range(first, first + count):
            begin, end = _row_bounds(args, row + q // group)
            begin, end = _clip(begin, base), _clip(min(end, shared_end), base)
            w, o = weights + q * 4 * CHUNK, out + q * out_row
            _weigh(call, 1, w, max(high, begin), end, values, value_dim, is_half, o, out_row)


@njit
def _gather_scores(args, row, base, raw, weights):
    """Put the scores of a node's ancestors, computed by slot, at their absolute positions."""
    committed = load_i64(args[_CONTROL] + 8 * COMMITTED)
    depth = load_i64(args[_DEPTHS] + 8 * row)
    ancestors = args[_ANCESTORS] + 8 * row * args[_MAX_NODES]
    for d in range(max(0, base - committed), min(depth + 1, base + CHUNK - committed)):
        slot = committed % BLOCK_COLS + load_i64(ancestors + 8 * d)
        store_f32(weights + 4 * (committed + d - base), load_f32(raw + 4 * slot))


@njit
def _weigh_ancestors(call, args, kv_head, row, base, shared_end, weights, values, out, out_row):
    """Weighted values of a node's ancestors that lie in the chunk, for the queries of one group."""
    begin, end = _row_bounds(args, row)
    begin, end = _clip(max(begin, shared_end), base), _clip(end, base)
    committed = load_i64(args[_CONTROL] + 8 * COMMITTED)
    value_dim, is_half = args[_VALUE_DIM], args[_HALF]
    ancestors = args[_ANCESTORS] + 8 * row * args[_MAX_NODES]
    for i in range(begin, end):
        slot = committed + load_i64(ancestors + 8 * (base + i - committed))
        index = (kv_head * args[_CAPACITY] + slot) * value_dim
        for c in range(0, value_dim, 16):
            if is_half != 0:
                value = load_half(args[_VALUES] + 2 * (index + c))
            else:
                value = load(args[_VALUES] + 4 * (index + c))
            store(values + 4 * ((i - begin) * value_dim + c), value)
    for q in range(args[_GROUP]):
        w, o = weights + 4 * (q * CHUNK + begin), out + q * out_row
        _weigh(call, 1, w, 0, end - begin, values, value_dim, 0, o, out_row)


@njit
def _attend_chunk(call, args, kv_head, row, num_rows, base, queries, weights, raw, gathered, parts, part_row):
    """One chunk for the query vectors of some rows: parts[q] = weighted values, maximum, sum of weights."""
    group, value_dim = args[_GROUP], args[_VALUE_DIM]
    committed = load_i64(args[_CONTROL] + 8 * COMMITTED)
    num_queries = num_rows * group
    w_row = 4 * CHUNK
    is_tree = _is_tree(args)
    shared_end = base + CHUNK
    if is_tree:
        shared_end = min(shared_end, committed)
    low, high = base + CHUNK, base
    for r in range(num_rows):
        begin, end = _row_bounds(args, row + r)
        low, high = min(low, max(begin, base)), max(high, min(end, shared_end))
    for q in range(num_queries):
        part = parts + q * part_row
        for c in range(0, 4 * value_dim + 128, 64):
            store(part + c, splat(0.0))
    first = low // BLOCK_COLS * BLOCK_COLS
    _score(call, args, kv_head, num_queries, queries, first, high, weights + 4 * (first - base), w_row)
    if is_tree and base + CHUNK > committed:
        first = committed // BLOCK_COLS * BLOCK_COLS
        end = committed + load_i64(args[_CONTROL] + 8 * NUM_TOKENS)
        tree_row = 4 * ((args[_MAX_NODES] + BLOCK_COLS - 1) // BLOCK_COLS + 1) * BLOCK_COLS
        _score(call, args, kv_head, num_queries, queries, first, end, raw, tree_row)
        for q in range(num_queries):
            _gather_scores(args, row + q // group, base, raw + q * tree_row, weights + q * w_row)
    for q in range(num_queries):
        begin, end = _row_bounds(args, row + q // group)
        begin, end = _clip(begin, base), _clip(end, base)
        if begin < end:
            _softmax(weights + q * w_row, begin, end, parts + q * part_row + 4 * value_dim)
    size = 2 if args[_HALF] != 0 else 4
    slot = kv_head * args[_CAPACITY] + base
    p_values = args[_VALUES] + slot * value_dim * size
    _weigh_shared(call, args, row, num_queries, base, shared_end, weights, p_values, parts, part_row)
    if is_tree and base + CHUNK > committed:
        for r in range(num_rows):
            w, o = weights + r * group * w_row, parts + r * group * part_row
            _weigh_ancestors(call, args, kv_head, row + r, base, shared_end, w, gathered, o, part_row)


@njit
def _load_queries(args, kv_head, row, num_rows, queries):
    """Scaled queries [rows x group, head_dim] of one group of heads."""
    group, head_dim = args[_GROUP], args[_HEAD_DIM]
    scale = splat(np.float32(bits_to_float(args[_SCALE])))
    for q in range(num_rows * group):
        head = kv_head * group + q % group
        source = args[_Q] + (row + q // group) * args[_Q_ROW] + head * args[_Q_HEAD]
        for c in range(0, 4 * head_dim, 64):
            store(queries + q * 4 * head_dim + c, load(source + c) * scale)


@kernel
def _attention_kernel(args, ticket, thread, num_threads):
    group, head_dim, value_dim = args[_GROUP], args[_HEAD_DIM], args[_VALUE_DIM]
    row_block, num_all = args[_ROW_BLOCK], load_i64(args[_CONTROL] + 8 * NUM_TOKENS)
    committed = load_i64(args[_CONTROL] + 8 * COMMITTED)
    if thread >= args[_SCRATCH_THREADS]:
        return
    state_row = 4 * (value_dim + 32)
    capacity_q = (row_block * group + BLOCK_ROWS - 1) // BLOCK_ROWS * BLOCK_ROWS
    tree_cols = ((args[_MAX_NODES] + BLOCK_COLS - 1) // BLOCK_COLS + 1) * BLOCK_COLS
    call = args[_SCRATCH] + thread * args[_THREAD_BYTES]
    store_i64(call, args[_MULTIPLY])
    queries = call + 8 * CALL_WORDS
    weights = queries + capacity_q * 4 * head_dim
    raw = weights + capacity_q * 4 * CHUNK
    parts = raw + capacity_q * 4 * tree_cols
    states = parts + capacity_q * state_row
    gathered = states + capacity_q * state_row
    num_blocks = (num_all + row_block - 1) // row_block
    row_block = (num_all + num_blocks - 1) // num_blocks
    all_chunks = (committed + num_all - 1) // CHUNK + 1
    is_split = _is_split(args, num_threads)
    per_block = all_chunks if is_split else 1
    total = args[_KV_HEADS] * num_blocks * per_block
    while True:
        item = atomic_add(ticket, 1)
        if item >= total:
            break
        kv_head = item // per_block % args[_KV_HEADS]
        row = (num_blocks - 1 - item // per_block // args[_KV_HEADS]) * row_block
        num_rows = min(row_block, num_all - row)
        _load_queries(args, kv_head, row, num_rows, queries)
        low, high = np.int64(1) << 60, np.int64(0)
        for r in range(num_rows):
            begin, end = _row_bounds(args, row + r)
            low, high = min(low, begin), max(high, end)
        if is_split:
            chunk = item % per_block
            part_row = 4 * 0 + all_chunks * state_row
            target = args[_PARTS] + ((row * args[_KV_HEADS] * group + kv_head * group) * all_chunks + chunk) * state_row
            _attend_chunk(call, args, kv_head, row, num_rows, chunk * CHUNK, queries, weights, raw, gathered, parts, state_row)
            for q in range(num_rows * group):
                place = (q // group * args[_KV_HEADS] * group + q % group) * part_row
                for c in range(0, state_row, 64):
                    store(target + place + c, load(parts + q * state_row + c))
            continue
        for q in range(num_rows * group):
            store(states + q * state_row + 4 * value_dim + 64, splat(0.0))
        for chunk in range(low // CHUNK, (high - 1) // CHUNK + 1):
            _attend_chunk(call, args, kv_head, row, num_rows, chunk * CHUNK, queries, weights, raw, gathered, parts, state_row)
            for q in range(num_rows * group):
                _merge(states + q * state_row, parts + q * state_row, value_dim)
        for q in range(num_rows * group):
            _finish(args, states + q * state_row, row + q // group, kv_head * group + q % group)


@kernel
def _attention_merge_kernel(args, ticket, thread, num_threads):
    if thread >= args[_SCRATCH_THREADS] or not _is_split(args, num_threads):
        return
    value_dim, num_heads = args[_VALUE_DIM], args[_KV_HEADS] * args[_GROUP]
    num_all = load_i64(args[_CONTROL] + 8 * NUM_TOKENS)
    all_chunks = (load_i64(args[_CONTROL] + 8 * COMMITTED) + num_all - 1) // CHUNK + 1
    state_row = 4 * (value_dim + 32)
    for item in range(thread, num_all * num_heads, min(num_threads, args[_SCRATCH_THREADS])):
        state = args[_PARTS] + item * all_chunks * state_row
        for chunk in range(1, all_chunks):
            _merge(state, state + chunk * state_row, value_dim)
        _finish(args, state, item // num_heads, item % num_heads)


def record_attention(
    program: Program,
    step: Step,
    q: np.ndarray,
    cache: KvCache,
    num_heads: int,
    scale: float,
    out: np.ndarray,
    scratch: np.ndarray,
    *,
    window: int = 0,
    bidirectional: bool = False,
) -> None:
    """out [max_tokens, num_heads * head_dim] = softmax(q k scale) v over the keys that each row sees.

    Causal rows see the committed keys and their ancestors (in a chain: all earlier rows) and themselves;
    bidirectional ones see the committed keys and all rows. A key further back than window - 1 is hidden.
    """
    head_dim, kv_heads = cache.head_dim, cache.kv_heads
    assert num_heads % kv_heads == 0, f"{num_heads} heads cannot share {kv_heads} key heads"
    group = num_heads // kv_heads
    rows = _split_rows(step.max_nodes, num_heads, cache.capacity, cache.value_dim)
    parts_len = rows * num_heads * (cache.capacity // CHUNK + 1) * _state_len(cache.value_dim)
    thread_len = _thread_floats(step.max_nodes, head_dim, cache.value_dim, group)
    num_threads = (scratch.size - parts_len) // thread_len
    assert scratch.dtype == np.float32 and scratch.flags.c_contiguous and num_threads >= 1
    flat = scratch.reshape(-1)
    args = (
        *(step.control, step.ancestors, step.max_nodes, window, int(bidirectional)),
        *(q, *head_strides(q, num_heads, head_dim), out, *head_strides(out, num_heads, head_dim)),
        *(cache.keys, cache.values, int(cache.is_half), cache.capacity, head_dim, cache.value_dim),
        *(kv_heads, group, _row_block(group), float(scale), flat[parts_len:], 4 * thread_len),
        *(num_threads, flat, rows, step.depths, multiply_kernel.address),
    )
    reads = (q, cache.keys, cache.values)
    program.add(_attention_kernel, *args, reads=reads, writes=(out, flat))
    program.add(_attention_merge_kernel, *args, reads=(flat,), writes=(out, flat))
