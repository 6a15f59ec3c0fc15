"""One chunk of keys for some rows of a pass: scores, weights, weighted values; merging chunks.
Keys of 8 bits have another file.

`args` are the words of the attention operations (named here), `own` is a thread's scratch, which
starts with the addresses of its parts. All positions are absolute; a chunk's bounds are multiples
of CHUNK, and so is the length of a ring: the slots of a chunk lie side by side.
"""

# ruff: noqa: ANN001, ANN201, ANN202  (numba inspects these signatures)
import numpy as np

from draftree.kernels.cpu.block import (
    BLOCK_COLS,
    BLOCK_ROWS,
    CALL_WORDS,
    load_as,
    multiply,
    touched_rows,
)
from draftree.kernels.cpu.instruction import LANES
from draftree.kernels.cpu.jit import njit
from draftree.kernels.cpu.pass_args import COMMITTED, FIRST, IS_TREE, NUM_TOKENS, SINKS
from draftree.kernels.cpu.simd import (
    bits_to_float,
    blend,
    exp,
    fma,
    load,
    load_f32,
    load_i64,
    max_lanes,
    maximum,
    splat,
    store,
    store_f32,
    store_i64,
    sum_lanes,
)

CHUNK = 256
_MINUS_INFINITY = np.float32(-np.inf)
_ZERO, _ONE = np.int64(0), np.int64(1)  # typed: a literal would compile a callee once more

# Words of the operations' arguments.
CONTROL, DEPTHS, ANCESTORS, MAX_NODES, WINDOW, BIDIRECTIONAL = range(6)
Q, Q_ROW, Q_HEAD, OUT, OUT_ROW, OUT_HEAD = range(6, 12)
KEYS, VALUES, KV_TYPE, CAPACITY, HEAD_DIM, VALUE_DIM = range(12, 18)
KV_HEADS, GROUP, ROW_BLOCK, SCALE, MULTIPLY = range(18, 23)
SCRATCH, THREAD_BYTES, SCRATCH_THREADS, PARTS, SPLIT_ROWS, PART_BYTES, TREE_BYTES = range(23, 30)
RING = 30

# Offsets in a thread's scratch, in bytes: the call of `multiply`, then addresses.
QUERIES, WEIGHTS, _TREE_SCORES, CHUNK_PARTS, STATES, GATHERED, _BOUNDS = range(
    8 * CALL_WORDS, 8 * CALL_WORDS + 56, 8
)
_NUM_WORDS = CALL_WORDS + 8


def part_len(value_dim: int) -> int:
    """A query's result for a chunk: weighted values, maximum and sum of weights in all lanes."""
    return value_dim + 2 * LANES


def tree_cols(max_nodes: int) -> int:
    """Workspace for the scores of a tree's slots, which may start inside a block."""
    return (max_nodes + BLOCK_COLS - 1) // BLOCK_COLS * BLOCK_COLS + BLOCK_COLS


def thread_len(max_rows: int, group: int, max_nodes: int, head_dim: int, value_dim: int) -> int:
    """How many float32 of scratch a thread needs; `lay_out` says for what."""
    num_queries = -(-max_rows * group // BLOCK_ROWS) * BLOCK_ROWS
    per_query = head_dim + CHUNK + tree_cols(max_nodes) + 2 * part_len(value_dim)
    words = 2 * (_NUM_WORDS + 2 * max_rows)
    gathered = (max_nodes + BLOCK_ROWS) * value_dim  # and parts put aside
    return -(-(words + num_queries * per_query + gathered) // LANES) * LANES


@njit
def lay_out(args, own):
    """Write the addresses of the parts of a thread's scratch to its beginning."""
    num_queries = (args[ROW_BLOCK] * args[GROUP] + BLOCK_ROWS - 1) // BLOCK_ROWS * BLOCK_ROWS
    part_bytes = num_queries * args[PART_BYTES]
    place = own + 8 * _NUM_WORDS
    store_i64(own, args[MULTIPLY])
    store_i64(own + _BOUNDS, place)
    place += 16 * args[ROW_BLOCK]
    store_i64(own + QUERIES, place)
    place += num_queries * 4 * args[HEAD_DIM]
    store_i64(own + WEIGHTS, place)
    place += num_queries * 4 * CHUNK
    store_i64(own + _TREE_SCORES, place)
    place += num_queries * args[TREE_BYTES]
    store_i64(own + CHUNK_PARTS, place)
    store_i64(own + STATES, place + part_bytes)
    store_i64(own + GATHERED, place + 2 * part_bytes)


@njit
def load_rows(args, own, first_head, row, num_rows):
    """Scaled queries [rows x group, head_dim]."""
    group, head_dim = args[GROUP], args[HEAD_DIM]
    queries, scale = load_i64(own + QUERIES), splat(np.float32(bits_to_float(args[SCALE])))
    for q in range(num_rows * group):
        head = (first_head + q % group) * args[Q_HEAD]
        source = args[Q] + (row + q // group) * args[Q_ROW] + head
        for c in range(0, 4 * head_dim, 64):
            store(queries + 4 * q * head_dim + c, load(source + c) * scale)


@njit
def count_sinks(args):
    """Positions at the beginning that a window leaves."""
    return load_i64(args[CONTROL] + 8 * SINKS) if args[WINDOW] > 0 else _ZERO


@njit
def set_bounds(args, own, row, num_rows, is_rest):
    """The positions [begin, end) that each row sees: of the sinks, or else of the rest."""
    control = args[CONTROL]
    committed, window = load_i64(control + 8 * COMMITTED), args[WINDOW]
    is_tree, first = load_i64(control + 8 * IS_TREE) != 0, load_i64(control + 8 * FIRST)
    bounds = load_i64(own + _BOUNDS)
    for r in range(num_rows):
        position = committed + row + r
        end = position + 1
        if args[BIDIRECTIONAL] != 0:
            end = committed + load_i64(control + 8 * NUM_TOKENS)
        elif is_tree:
            position = committed + load_i64(args[DEPTHS] + 8 * (row + r))
            end = position + 1
        begin = max(first, position - window + 1) if window > 0 else first
        if is_rest == 0:
            end = max(min(count_sinks(args), begin), first)
            begin = first
        store_i64(bounds + 16 * r, begin)
        store_i64(bounds + 16 * r + 8, end)


@njit
def seen_by(own, num_rows):
    """The smallest range of positions that holds what the rows see."""
    bounds = load_i64(own + _BOUNDS)
    low, high = load_i64(bounds), load_i64(bounds + 8)
    for p in range(bounds + 16, bounds + 16 * num_rows, 16):
        low, high = min(low, load_i64(p)), max(high, load_i64(p + 8))
    return low, high


@njit
def find_range(own, row, base, limit):
    """What a row sees of [base, limit), counted from base."""
    bounds = load_i64(own + _BOUNDS) + 16 * row
    begin = max(load_i64(bounds), base)
    return begin - base, max(min(load_i64(bounds + 8), limit), begin) - base


@njit
def next_block(args, slot):
    """The slot 32 positions further; a division would take longer."""
    slot += BLOCK_COLS
    return slot if slot < args[RING] else 0


@njit
def _score(args, own, kv_head, num_queries, first, end, out, out_row):
    """out[q, position - first] for positions [first, end), in whole blocks of 32."""
    head_dim, kind = args[HEAD_DIM], args[KV_TYPE]
    step = 64 >> kind
    a, a_row, tile = load_i64(own + QUERIES), 4 * head_dim, head_dim * step
    slot = first % args[RING]
    for _ in range(first, end, BLOCK_COLS):
        keys = args[KEYS] + (kv_head * args[CAPACITY] + slot) // LANES * tile
        multiply(own, num_queries, kind, 1, out, out_row, a, a_row, keys, step, tile, head_dim)
        out += 4 * BLOCK_COLS
        slot = next_block(args, slot)


@njit
def _score_tree(args, own, kv_head, row, num_rows, base):
    """Scores of all slots of the tree, then each node's ancestors at their absolute positions."""
    control, group = args[CONTROL], args[GROUP]
    committed = load_i64(control + 8 * COMMITTED)
    scores, weights = load_i64(own + _TREE_SCORES), load_i64(own + WEIGHTS)
    end, stride = committed + load_i64(control + 8 * NUM_TOKENS), args[TREE_BYTES]
    shift = committed % BLOCK_COLS
    _score(args, own, kv_head, num_rows * group, committed - shift, end, scores, stride)
    for r in range(num_rows):
        ancestors = args[ANCESTORS] + 8 * (row + r) * args[MAX_NODES]
        depth = load_i64(args[DEPTHS] + 8 * (row + r))
        for d in range(max(0, base - committed), min(depth + 1, base + CHUNK - committed)):
            source = scores + 4 * (shift + load_i64(ancestors + 8 * d))
            target = weights + 4 * (committed + d - base)
            for q in range(r * group, (r + 1) * group):
                store_f32(target + 4 * q * CHUNK, load_f32(source + q * stride))


@njit
def _softmax(weights, begin, end, tail):
    """Scores [begin, end) become e^(score - maximum); the maximum and the sum go to tail."""
    low = splat(_MINUS_INFINITY)
    top, total, zero = low, splat(0.0), splat(0.0)
    for i in range(begin // 16 * 16, end, 16):
        value = blend(low, blend(load(weights + 4 * i), low, end - i), begin - i)
        top = maximum(value, top)
    top = splat(max_lanes(top))
    for i in range(begin // 16 * 16, end, 16):
        value = exp(load(weights + 4 * i) - top)
        value = blend(zero, blend(value, zero, end - i), begin - i)
        store(weights + 4 * i, value)
        total = total + value
    store(tail, top)
    store(tail + 64, splat(sum_lanes(total)))


@njit
def _weigh(args, own, first, num_queries, begin, end, values, kind):
    """parts[q] += weights[q, begin:end] x values[0 : end - begin] for queries from first."""
    value_dim, count = args[VALUE_DIM], end - begin
    w = load_i64(own + WEIGHTS) + 4 * (first * CHUNK + begin)
    out_row, w_row = args[PART_BYTES], 4 * CHUNK
    out = load_i64(own + CHUNK_PARTS) + first * out_row
    size = 4 >> kind
    step, half = value_dim * size, 16 * size
    if count > 0:
        for _ in range(0, value_dim, BLOCK_COLS):
            multiply(own, num_queries, kind, 0, out, out_row, w, w_row, values, step, half, count)
            values += 2 * half
            out += 4 * BLOCK_COLS


@njit
def _weigh_shared(args, own, kv_head, num_queries, base, limit):
    """Values at [base, limit) of a chunk; what all queries of a block see is shared."""
    group, kind = args[GROUP], args[KV_TYPE]
    step = args[VALUE_DIM] * (4 >> kind)
    values = args[VALUES] + (kv_head * args[CAPACITY] + base % args[RING]) * step
    for first in range(0, num_queries, BLOCK_ROWS):
        last = min(first + BLOCK_ROWS, num_queries)
        low, high = find_range(own, first // group, base, limit)
        for r in range(first // group + 1, (last - 1) // group + 1):
            begin, end = find_range(own, r, base, limit)
            low, high = max(low, begin), min(high, end)
        high = max(high, low)
        for q in range(first, last):
            begin, end = find_range(own, q // group, base, limit)
            end = min(low, end)
            _weigh(args, own, q, _ONE, begin, end, values + begin * step, kind)
        _weigh(args, own, first, last - first, low, high, values + low * step, kind)
        for q in range(first, last):
            begin, end = find_range(own, q // group, base, limit)
            begin = max(high, begin)
            _weigh(args, own, q, _ONE, begin, end, values + begin * step, kind)


@njit
def _weigh_ancestors(args, own, kv_head, row, r, base):
    """Values of the ancestors of row + r in the chunk, gathered once for its group of queries."""
    committed = load_i64(args[CONTROL] + 8 * COMMITTED)
    begin, end = find_range(own, r, max(base, committed), base + CHUNK)
    shift = max(base, committed) - base
    value_dim, target, kind = args[VALUE_DIM], load_i64(own + GATHERED), args[KV_TYPE]
    ancestors = args[ANCESTORS] + 8 * (row + r) * args[MAX_NODES]
    for i in range(begin + shift, end + shift):
        slot = (committed + load_i64(ancestors + 8 * (base + i - committed))) % args[RING]
        index = (kv_head * args[CAPACITY] + slot) * value_dim
        for c in range(index, index + value_dim, 16):
            store(target, load_as(args[VALUES] + c * (4 >> kind), kind))
            target += 64
    # The group's queries go together; those behind them that share their block are put back.
    gathered, group = load_i64(own + GATHERED), args[GROUP]
    others = load_i64(own + CHUNK_PARTS) + (r + 1) * group * args[PART_BYTES]
    kept = gathered + 4 * args[MAX_NODES] * value_dim
    num_others = touched_rows(group) - group if begin < end else 0
    _copy_values(kept, 4 * value_dim, others, args[PART_BYTES], num_others, value_dim)
    _weigh(args, own, r * group, group, begin + shift, end + shift, gathered, _ZERO)
    _copy_values(others, args[PART_BYTES], kept, 4 * value_dim, num_others, value_dim)


@njit
def _copy_values(target, target_row, source, source_row, num_rows, value_dim):
    for i in range(num_rows):
        for c in range(0, 4 * value_dim, 64):
            store(target + i * target_row + c, load(source + i * source_row + c))


@njit
def attend_chunk(args, own, kv_head, row, num_rows, base):
    """What positions [base, base + CHUNK) give for the queries of some rows: a part for each."""
    group, value_dim = args[GROUP], args[VALUE_DIM]
    num_queries, stride = num_rows * group, args[PART_BYTES]
    weights, parts = load_i64(own + WEIGHTS), load_i64(own + CHUNK_PARTS)
    committed, limit = load_i64(args[CONTROL] + 8 * COMMITTED), base + CHUNK
    is_tree = load_i64(args[CONTROL] + 8 * IS_TREE) != 0 and args[BIDIRECTIONAL] == 0
    low, high = seen_by(own, num_rows)
    has_nodes = is_tree and limit > committed and high > committed
    if is_tree:
        limit = min(limit, committed)
    for p in range(parts, parts + num_queries * stride, 64):
        store(p, splat(0.0))
    low, high = max(low, base) // BLOCK_COLS * BLOCK_COLS, min(high, limit)
    _score(args, own, kv_head, num_queries, low, high, weights + 4 * (low - base), 4 * CHUNK)
    if has_nodes:
        _score_tree(args, own, kv_head, row, num_rows, base)
    for q in range(num_queries):
        begin, end = find_range(own, q // group, base, base + CHUNK)
        if begin < end:
            tail = parts + q * stride + 4 * value_dim
            _softmax(weights + 4 * q * CHUNK, begin, end, tail)
    _weigh_shared(args, own, kv_head, num_queries, base, limit)
    if has_nodes:
        for r in range(num_rows):
            _weigh_ancestors(args, own, kv_head, row, r, base)
    return parts


@njit
def merge_part(state, part, value_dim):
    """Add the part of a later chunk to a query's state, which is laid out alike."""
    s_max, p_max = state + 4 * value_dim, part + 4 * value_dim
    if load_f32(p_max + 64) == np.float32(0.0):
        return
    if load_f32(s_max + 64) == np.float32(0.0):
        for c in range(0, 4 * value_dim + 128, 64):
            store(state + c, load(part + c))
        return
    top = maximum(load(s_max), load(p_max))
    s_scale, p_scale = exp(load(s_max) - top), exp(load(p_max) - top)
    for c in range(0, 4 * value_dim, 64):
        store(state + c, fma(load(part + c), p_scale, load(state + c) * s_scale))
    store(s_max + 64, fma(load(p_max + 64), p_scale, load(s_max + 64) * s_scale))
    store(s_max, top)


@njit
def finish_query(args, state, row, head):
    """Weighted values / sum of weights is the result of a row's head."""
    out = args[OUT] + row * args[OUT_ROW] + head * args[OUT_HEAD]
    total = load(state + 4 * args[VALUE_DIM] + 64)
    for c in range(0, 4 * args[HEAD_DIM], 64):
        store(out + c, load(state + c) / total)
