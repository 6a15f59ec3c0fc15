"""One chunk of 8-bit keys and values for some rows of a pass: the integer twin of attention_chunk.

Queries, transformed as keys are, and weights are rounded to 16 bits, each row by its own largest
number. Sums of products are
then exact integers, so neither their order nor what else is summed with a weight of zero matters:
rows share all products, whichever positions they see, and a tree's slots are summed as they lie.
"""

# ruff: noqa: ANN001, ANN201, ANN202  (numba inspects these signatures)
import numpy as np

from draftree.kernels.cpu import attention_chunk as chunk
from draftree.kernels.cpu.attention_chunk import CHUNK, find_range, next_block, seen_by
from draftree.kernels.cpu.block import BLOCK_COLS
from draftree.kernels.cpu.hadamard import hadamard_order, transform_row
from draftree.kernels.cpu.instruction import LANES
from draftree.kernels.cpu.jit import njit
from draftree.kernels.cpu.pairs import (
    PAIR_ROWS,
    load_integers,
    score_pairs,
    store_words,
    weigh_pairs,
)
from draftree.kernels.cpu.pass_args import COMMITTED, IS_TREE, NUM_TOKENS
from draftree.kernels.cpu.quads import WORD_TOP
from draftree.kernels.cpu.simd import (
    absolute,
    blend,
    exp,
    load,
    load_f32,
    load_i64,
    max_lanes,
    maximum,
    splat,
    store,
    store_f32,
    sum_lanes,
)
from draftree.kernels.cpu.word import load_u16, store_u16

_TOP = np.float32(WORD_TOP)
_MINUS_INFINITY = np.float32(-np.inf)
_ZERO = np.float32(0.0)
_LEAST = np.float32(-60.0)  # its power is nothing beside 1, and far from numbers that are slow
_FRESH, _MORE = np.int64(1), np.int64(0)  # typed: a literal would compile a callee once more


@njit
def round_queries(args, own, num_queries):
    """Scaled queries become 16-bit words in place; a query's scale lies behind its words."""
    head_dim = args[chunk.HEAD_DIM]
    for q in range(num_queries):
        row = load_i64(own + chunk.QUERIES) + 4 * q * head_dim
        transform_row(row, head_dim)
        top = splat(0.0)
        for c in range(row, row + 4 * head_dim, 64):
            top = maximum(absolute(load(c)), top)
        largest = max_lanes(top)
        factor = splat(_TOP / largest if largest > _ZERO else _ZERO)
        for d in range(0, head_dim, LANES):
            store_words(row + 2 * d, load(row + 4 * d) * factor)
        store_f32(row + 2 * head_dim, largest / _TOP / hadamard_order(head_dim))


@njit
def _score(args, own, kv_head, num_queries, first, end, out, out_row):
    """out[q, position - first]: integer products times the scales of the keys, in blocks of 32."""
    head_dim, capacity = args[chunk.HEAD_DIM], args[chunk.CAPACITY]
    a_row, tile, num_pairs = 4 * head_dim, LANES * head_dim, head_dim // 2
    all_scales = args[chunk.KEYS] + args[chunk.KV_HEADS] * capacity * head_dim
    slot = first % args[chunk.RING]
    for _ in range(first, end, BLOCK_COLS):
        at = kv_head * capacity + slot
        keys, scales = args[chunk.KEYS] + at * head_dim, all_scales + 4 * at
        later = args[chunk.VALUES] + at * args[chunk.VALUE_DIM]
        a, o = load_i64(own + chunk.QUERIES), out
        for q in range(0, num_queries, PAIR_ROWS):
            left = num_queries - q
            score_pairs(left, o, out_row, a, a_row, keys, tile, scales, num_pairs, later)
            o += PAIR_ROWS * out_row
            a += PAIR_ROWS * a_row
        out += 4 * BLOCK_COLS
        slot = next_block(args, slot)


@njit
def _weigh(args, own, num_queries, words, words_row, kv_head, first, count, is_fresh):
    """integers[q] (+)= words[q, :count] x values of the positions from first, two at a time; they
    lie side by side.
    """
    value_dim, out_row = args[chunk.VALUE_DIM], args[chunk.PART_BYTES]
    slot = kv_head * args[chunk.CAPACITY] + first % args[chunk.RING]
    values = args[chunk.VALUES] + slot * value_dim
    parts, num_pairs = load_i64(own + chunk.CHUNK_PARTS), (count + 1) // 2
    for q in range(0, num_queries, PAIR_ROWS):
        left = num_queries - q
        a, o = words + q * words_row, parts + q * out_row
        for d in range(0, value_dim, BLOCK_COLS):
            b, out = values + d, o + 4 * d
            weigh_pairs(left, out, out_row, a, words_row, b, value_dim, num_pairs, is_fresh)


@njit
def _softmax(row, begin, end, q_scale, scales, tail):
    """Scores [begin, end), of which the query's scale is still to come, become
    e^(score - maximum) times the scales of the values. Maximum and sum of the powers go to tail;
    the largest result is returned.
    """
    low, zero, factor, least = splat(_MINUS_INFINITY), splat(0.0), splat(q_scale), splat(_LEAST)
    first, last = begin // 16 * 16, end // 16 * 16
    store(row + 4 * first, blend(low, load(row + 4 * first), begin - first))
    if last < end:
        store(row + 4 * last, blend(load(row + 4 * last), low, end - last))
    top, total, largest = low, zero, zero
    for i in range(first, end, 16):
        top = maximum(load(row + 4 * i), top)
    top = splat(max_lanes(top))
    for i in range(first, end, 16):
        power = exp(maximum((load(row + 4 * i) - top) * factor, least))
        total = total + power
        scaled = power * load(scales + 4 * i)
        if i < begin or i + 16 > end:  # scales of other positions are anything
            scaled = blend(zero, blend(scaled, zero, end - i), begin - i)
        store(row + 4 * i, scaled)
        largest = maximum(scaled, largest)
    store(tail, top * factor)
    store(tail + 64, splat(sum_lanes(total)))
    return max_lanes(largest)


@njit
def _round_weights(row, low, begin, end, high, largest):
    """Weights [begin, end) become 16-bit words in place, and those of [low, high) beside them 0."""
    factor = splat(_TOP / largest if largest > _ZERO else _ZERO)
    for i in range(low, max(high, end), 16):
        value = splat(0.0)
        if largest > _ZERO and begin < i + 16 and i < end:
            value = load(row + 4 * i) * factor
        store_words(row + 2 * i, value)


@njit
def _place_nodes(args, chunk_scales, row, base, weights, num_queries, scales, start):
    """Scores of a node's ancestors go to their absolute positions, the scales of their values too.

    A node never lies before its place on a path, so nothing is overwritten that is still wanted.
    """
    committed = load_i64(args[chunk.CONTROL] + 8 * COMMITTED)
    ancestors = args[chunk.ANCESTORS] + 8 * row * args[chunk.MAX_NODES]
    depth, stride = load_i64(args[chunk.DEPTHS] + 8 * row), _row_bytes(args)
    for d in range(max(0, base - committed), min(depth + 1, base + CHUNK - committed)):
        position = committed + load_i64(ancestors + 8 * d)
        place, slot = 4 * (committed + d - base), position % args[chunk.RING]
        store_f32(chunk_scales + place, load_f32(scales + 4 * slot))
        for q in range(num_queries):
            score = load_f32(weights + q * stride + 4 * (position - start))
            store_f32(weights + q * stride + place, score)


@njit
def _move_nodes(args, row, base, weights, num_queries):
    """Words of ancestors go from their positions to their slots, behind the words of the chunk: to
    those of whole tiles, of which a ring holds some at its end and the others at its beginning.
    """
    committed = load_i64(args[chunk.CONTROL] + 8 * COMMITTED)
    num_nodes = load_i64(args[chunk.CONTROL] + 8 * NUM_TOKENS)
    ancestors = args[chunk.ANCESTORS] + 8 * row * args[chunk.MAX_NODES]
    depth, stride = load_i64(args[chunk.DEPTHS] + 8 * row), _row_bytes(args)
    first, last = max(0, base - committed), min(depth + 1, base + CHUNK - committed)
    shift = committed % LANES
    for words in range(weights, weights + num_queries * stride, stride):
        for c in range(0, 2 * (shift + num_nodes), 2 * LANES):
            store_words(words + 2 * CHUNK + c, splat(0.0))
        for d in range(first, last):
            place, node = words + 2 * (committed + d - base), load_i64(ancestors + 8 * d)
            store_u16(words + 2 * (CHUNK + shift + node), load_u16(place))
            store_u16(place, 0)


@njit
def _weigh_nodes(args, own, num_queries, words, stride, kv_head):
    """What `_move_nodes` has laid out, in two parts where a ring ends between them."""
    committed = load_i64(args[chunk.CONTROL] + 8 * COMMITTED)
    first = committed // LANES * LANES
    count = committed - first + load_i64(args[chunk.CONTROL] + 8 * NUM_TOKENS)
    before = min(args[chunk.RING] - first % args[chunk.RING], count)
    _weigh(args, own, num_queries, words, stride, kv_head, first, before, _MORE)
    if before < count:
        words, first, count = words + 2 * before, first + before, count - before
        _weigh(args, own, num_queries, words, stride, kv_head, first, count, _MORE)


@njit
def _row_bytes(args):
    """Of a query's scores: those of the chunk, then those of the tree's slots."""
    return 4 * CHUNK + args[chunk.TREE_BYTES]


@njit
def attend_bytes(args, own, kv_head, row, num_rows, base):
    """What positions [base, base + CHUNK) give for the queries of some rows: a part for each."""
    group, value_dim, capacity = args[chunk.GROUP], args[chunk.VALUE_DIM], args[chunk.CAPACITY]
    num_queries, stride, part_bytes = num_rows * group, _row_bytes(args), args[chunk.PART_BYTES]
    weights, parts = load_i64(own + chunk.WEIGHTS), load_i64(own + chunk.CHUNK_PARTS)
    control = args[chunk.CONTROL]
    committed, num_nodes = load_i64(control + 8 * COMMITTED), load_i64(control + 8 * NUM_TOKENS)
    is_tree = load_i64(control + 8 * IS_TREE) != 0 and args[chunk.BIDIRECTIONAL] == 0
    low, high = seen_by(own, num_rows)
    has_nodes = is_tree and base + CHUNK > committed and high > committed
    low, high = max(low, base) // BLOCK_COLS * BLOCK_COLS, min(high, base + CHUNK)
    start, end_slot = base, high
    scales = args[chunk.VALUES] + args[chunk.KV_HEADS] * capacity * value_dim
    scales += 4 * kv_head * capacity
    base_scales = scales + 4 * (base % args[chunk.RING])
    chunk_scales = base_scales
    if is_tree:
        high = min(high, committed)
        end_slot = high
    if has_nodes:
        low = min(low, committed // BLOCK_COLS * BLOCK_COLS)
        start, end_slot = min(base, low), committed + num_nodes
        chunk_scales = load_i64(own + chunk.GATHERED)
        for i in range(max(low, base) - base, high - base, 16):
            store(chunk_scales + 4 * i, load(base_scales + 4 * i))
    _score(args, own, kv_head, num_queries, low, end_slot, weights + 4 * (low - start), stride)
    low = max(low, base)
    for r in range(num_rows):
        begin, end = find_range(own, r, base, base + CHUNK)
        first = weights + r * group * stride
        if has_nodes:
            _place_nodes(args, chunk_scales, row + r, base, first, group, scales, start)
        for q in range(r * group, (r + 1) * group):
            words, part = weights + q * stride, parts + q * part_bytes
            query = load_i64(own + chunk.QUERIES) + 4 * q * args[chunk.HEAD_DIM]
            largest = _ZERO
            store(part + 4 * value_dim + 64, splat(0.0))
            if begin < end:
                q_scale = load_f32(query + 2 * args[chunk.HEAD_DIM])
                tail = part + 4 * value_dim
                largest = _softmax(words, begin, end, q_scale, chunk_scales, tail)
            _round_weights(words, low - base, begin, end, max(high, base) - base, largest)
            store_f32(query + 2 * args[chunk.HEAD_DIM] + 4, largest / _TOP)
        if has_nodes:
            _move_nodes(args, row + r, base, first, group)
    count = max(high - low, 0)
    words = weights + 2 * (low - base)
    _weigh(args, own, num_queries, words, stride, kv_head, low, count, _FRESH)
    if has_nodes:
        _weigh_nodes(args, own, num_queries, weights + 2 * CHUNK, stride, kv_head)
    for q in range(num_queries):
        query = load_i64(own + chunk.QUERIES) + 4 * q * args[chunk.HEAD_DIM]
        factor = splat(load_f32(query + 2 * args[chunk.HEAD_DIM] + 4))
        for c in range(parts + q * part_bytes, parts + q * part_bytes + 4 * value_dim, 64):
            store(c, load_integers(c) * factor)
    return parts
