"""Attention of a pass's rows over the committed keys and, in a tree, over their own ancestors.

Keys are taken in chunks fixed by absolute position, and chunks are merged in position order. A
node's ancestors stand at their absolute positions and siblings never enter, so a node's result is
bit-equal to that of the same token after its path was committed, whatever shares the pass and
however the work is split over threads.
"""

# ruff: noqa: ANN001, ANN202  (numba inspects the kernels' signatures)
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from draftree.kernels.cpu import attention_chunk as chunk
from draftree.kernels.cpu.atomic import atomic_add
from draftree.kernels.cpu.attention_bytes import attend_bytes, round_queries
from draftree.kernels.cpu.attention_chunk import (
    CHUNK,
    attend_chunk,
    count_sinks,
    finish_query,
    lay_out,
    load_rows,
    merge_part,
    seen_by,
    set_bounds,
)
from draftree.kernels.cpu.block import TYPE_I8, multiply_kernel
from draftree.kernels.cpu.elementwise import head_strides
from draftree.kernels.cpu.jit import njit
from draftree.kernels.cpu.kernel import kernel
from draftree.kernels.cpu.kv_cache import KvCache, record_kv_commit, record_kv_write
from draftree.kernels.cpu.pass_args import COMMITTED, FIRST, NUM_TOKENS, PassArgs
from draftree.kernels.cpu.program import Argument, Program
from draftree.kernels.cpu.simd import load, load_i64, splat, store

__all__ = [
    "AttentionRows",
    "KvCache",
    "attention_scratch_len",
    "record_attention",
    "record_kv_commit",
    "record_kv_write",
]

_MAX_QUERIES = 96  # query vectors (rows x heads of a group) that share the loads of a chunk
_MAX_PARTS_LEN = 4_000_000  # float32 that chunks may leave for the merge
_FEW_QUERIES = 6  # that still share the loads of a chunk well
_ROW_ITEMS = 3  # per thread; with fewer, rows are split into more blocks
_FEW_ITEMS = 4  # per thread; with fewer, chunks are shared out too


def _row_block(group: int) -> int:
    return max(1, _MAX_QUERIES // group)


def _thread_len(step: PassArgs, cache: KvCache, group: int) -> int:
    rows = _row_block(group)
    return chunk.thread_len(rows, group, step.max_nodes, cache.head_dim, cache.value_dim)


def _split_rows(step: PassArgs, cache: KvCache, num_heads: int) -> tuple[int, int]:
    """How many rows may leave one part per chunk, and how many float32 those take."""
    num_chunks = -(-cache.capacity // CHUNK) - (-step.max_nodes // CHUNK) + 1  # some twice: sinks
    per_row = num_heads * num_chunks * chunk.part_len(cache.value_dim)
    rows = max(1, min(step.max_nodes, _MAX_PARTS_LEN // per_row))
    return rows, rows * per_row


def attention_scratch_len(step: PassArgs, cache: KvCache, num_heads: int, num_threads: int) -> int:
    """How many float32 of scratch `record_attention` needs; layers of one shape can share them."""
    parts_len = _split_rows(step, cache, num_heads)[1]
    return parts_len + num_threads * _thread_len(step, cache, num_heads // cache.kv_heads)


@njit
def _count_items(args, num_threads):
    """Blocks of rows, rows of a block, chunks if they go to different threads (else 0), how many of
    those are of sinks, and the first of the others.
    """
    num_rows = load_i64(args[chunk.CONTROL] + 8 * NUM_TOKENS)
    committed, window = load_i64(args[chunk.CONTROL] + 8 * COMMITTED), args[chunk.WINDOW]
    first = load_i64(args[chunk.CONTROL] + 8 * FIRST)
    num_sinks = 0
    if window > 0:
        last = min(count_sinks(args), committed + num_rows - window)
        num_sinks = max(last + CHUNK - 1, 0) // CHUNK
        first = max(first, committed - window + 1)
    first_chunk = first // CHUNK
    num_blocks = (num_rows + args[chunk.ROW_BLOCK] - 1) // args[chunk.ROW_BLOCK]
    if num_threads > 1:  # a share for every thread, but not fewer queries than share a load of keys
        wanted = (_ROW_ITEMS * num_threads + args[chunk.KV_HEADS] - 1) // args[chunk.KV_HEADS]
        num_blocks = max(num_blocks, min(wanted, num_rows * args[chunk.GROUP] // _FEW_QUERIES))
    row_block = (num_rows + num_blocks - 1) // num_blocks
    num_blocks = (num_rows + row_block - 1) // row_block
    num_chunks = num_sinks + (committed + num_rows - 1) // CHUNK + 1 - first_chunk
    is_few = num_blocks * args[chunk.KV_HEADS] < _FEW_ITEMS * num_threads
    if num_threads == 1 or num_chunks == 1 or not is_few or num_rows > args[chunk.SPLIT_ROWS]:
        num_chunks = 0
    return num_blocks, row_block, num_chunks, num_sinks, first_chunk


@kernel
def _attention_kernel(args, ticket, thread, num_threads):
    num_threads = min(num_threads, args[chunk.SCRATCH_THREADS])
    if thread >= num_threads:
        return
    own = args[chunk.SCRATCH] + thread * args[chunk.THREAD_BYTES]
    lay_out(args, own)
    num_all, group = load_i64(args[chunk.CONTROL] + 8 * NUM_TOKENS), args[chunk.GROUP]
    kv_heads, num_bytes = args[chunk.KV_HEADS], args[chunk.PART_BYTES]
    num_blocks, row_block, num_chunks, num_sinks, first_chunk = _count_items(args, num_threads)
    per_block = max(num_chunks, 1)
    total = kv_heads * num_blocks * per_block
    states = load_i64(own + chunk.STATES)
    item = atomic_add(ticket, 1)
    while item < total:
        head = item // per_block % kv_heads * group
        row = (num_blocks - 1 - item // per_block // kv_heads) * row_block  # the longest first
        num_rows = min(row_block, num_all - row)
        load_rows(args, own, head, row, num_rows)
        if args[chunk.KV_TYPE] == TYPE_I8:
            round_queries(args, own, num_rows * group)
        for q in range(num_rows * group):
            store(states + (q + 1) * num_bytes - 64, splat(0.0))
        for is_rest in range(0 if num_sinks > 0 else 1, 2):
            set_bounds(args, own, row, num_rows, is_rest)
            begin, end = seen_by(own, num_rows)
            if num_chunks > 0:
                index = item % per_block
                begin = index * CHUNK
                if is_rest:
                    begin = (first_chunk + index - num_sinks) * CHUNK
                end = begin + CHUNK if is_rest == (index >= num_sinks) else begin
            for base in range(begin // CHUNK * CHUNK, end, CHUNK):
                if args[chunk.KV_TYPE] == TYPE_I8:
                    parts = attend_bytes(args, own, head // group, row, num_rows, base)
                else:
                    parts = attend_chunk(args, own, head // group, row, num_rows, base)
                for q in range(num_rows * group):
                    merge_part(states + q * num_bytes, parts + q * num_bytes, args[chunk.VALUE_DIM])
        for q in range(num_rows * group):
            state, at = states + q * num_bytes, (row + q // group) * kv_heads * group + head
            if num_chunks > 0:
                at = (at + q % group) * num_chunks + item % per_block
                target = args[chunk.PARTS] + at * num_bytes
                for c in range(0, num_bytes, 64):
                    store(target + c, load(state + c))
            else:
                finish_query(args, state, row + q // group, head + q % group)
        item = atomic_add(ticket, 1)


@kernel
def _attention_merge_kernel(args, ticket, thread, num_threads):
    num_threads = min(num_threads, args[chunk.SCRATCH_THREADS])
    num_chunks = _count_items(args, num_threads)[2]
    if thread >= num_threads or num_chunks == 0:
        return
    num_heads = args[chunk.KV_HEADS] * args[chunk.GROUP]
    num_bytes = args[chunk.PART_BYTES]
    num_all = load_i64(args[chunk.CONTROL] + 8 * NUM_TOKENS)
    for item in range(thread, num_all * num_heads, num_threads):
        state = args[chunk.PARTS] + item * num_chunks * num_bytes
        for index in range(1, num_chunks):
            merge_part(state, state + index * num_bytes, args[chunk.VALUE_DIM])
        finish_query(args, state, item // num_heads, item % num_heads)


class AttentionRows(NamedTuple):
    """Rows of one sequence: their queries, what they see, where the result goes."""

    step: PassArgs
    q: np.ndarray
    cache: KvCache
    out: np.ndarray  # [max_tokens, num_heads * head_dim]
    scratch: np.ndarray


def record_attention(
    program: Program,
    sequences: Sequence[AttentionRows],
    num_heads: int,
    scale: float,
    *,
    window: int = 0,
    bidirectional: bool = False,
) -> None:
    """out = softmax(q k scale) v over what each row sees, for each of the sequences.

    Causal rows see the committed keys and their ancestors (in a chain: all earlier rows) and
    themselves; bidirectional ones see the committed keys and all rows. With a window, keys from
    that far back on are hidden, but for the step's sinks; so are those before the pass's first
    position. A ring must hold all that a window and a pass's rows reach. Where there are sinks, a
    window must be longer than a tree is deep.
    """
    shape = num_heads, scale, window, bidirectional
    recorded = [(rows, _attention_arguments(rows, *shape)) for rows in sequences]
    for rows, args in recorded:
        reads = (rows.q, rows.cache.keys, rows.cache.values)
        program.add(_attention_kernel, *args, reads=reads, writes=(rows.out, rows.scratch))
    for rows, args in recorded:
        writes = (rows.out, rows.scratch)
        program.add(_attention_merge_kernel, *args, reads=(rows.scratch,), writes=writes)


def _attention_arguments(
    rows: AttentionRows, num_heads: int, scale: float, window: int, bidirectional: bool
) -> tuple[Argument, ...]:
    step, q, cache, out, scratch = rows
    head_dim, kv_heads = cache.head_dim, cache.kv_heads
    is_ring = cache.ring_len < cache.capacity
    assert not is_ring or cache.ring_len % CHUNK == 0, "the slots of a chunk must lie side by side"
    assert not is_ring or window > 0, "in a ring attention must be bounded"
    assert num_heads % kv_heads == 0, f"{num_heads} heads cannot share {kv_heads} key heads"
    group = num_heads // kv_heads
    split_rows, parts_len = _split_rows(step, cache, num_heads)
    thread_len = _thread_len(step, cache, group)
    num_threads = (scratch.size - parts_len) // thread_len
    assert num_threads >= 1, "the scratch is too small, see attention_scratch_len"
    assert scratch.dtype == np.float32 and scratch.flags.c_contiguous
    flat = scratch.reshape(-1)
    return (
        *(step.control, step.depths, step.ancestors, step.max_nodes, window, int(bidirectional)),
        *(q, *head_strides(q, num_heads, head_dim), out, *head_strides(out, num_heads, head_dim)),
        *(cache.keys, cache.values, cache.type_word, cache.capacity, head_dim, cache.value_dim),
        *(kv_heads, group, _row_block(group), float(scale), multiply_kernel.address),
        *(flat[parts_len:], 4 * thread_len, num_threads, flat, split_rows),
        *(4 * chunk.part_len(cache.value_dim), 4 * chunk.tree_cols(step.max_nodes)),
        cache.ring_len,
    )
