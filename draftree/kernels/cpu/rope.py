"""Rotary position embedding of query and key heads, in place at the step's positions.

Cosines and sines come from a table made once in float64, so they do not depend on who shares the
pass. Both ways of pairing are here: dimension i with i + half, and neighbours (2i, 2i + 1).
"""

# ruff: noqa: ANN001, ANN202  (numba inspects the kernels' signatures)
import numpy as np

from draftree.kernels.cpu.elementwise import head_strides, row_count
from draftree.kernels.cpu.kernel import kernel
from draftree.kernels.cpu.pass_args import NUM_TOKENS, PassArgs
from draftree.kernels.cpu.program import Program
from draftree.kernels.cpu.simd import (
    even_lanes,
    load_first,
    load_i64,
    odd_lanes,
    store_first,
    zip_high,
    zip_low,
)


def rope_table(inv_freq: np.ndarray, max_ctx: int) -> np.ndarray:
    """float32 [max_ctx, 2, len(inv_freq)]: cosines, then sines, of position * inv_freq."""
    angles = np.outer(np.arange(max_ctx, dtype=np.float64), np.asarray(inv_freq, dtype=np.float64))
    return np.stack((np.cos(angles), np.sin(angles)), axis=1).astype(np.float32)


@kernel
def _rope_kernel(args, ticket, thread, num_threads):
    num_rows, num_heads, half = load_i64(args[0]), args[1], args[2]
    x, x_row, x_head = args[3], args[4], args[5]
    positions, table, interleaved = args[6], args[7], args[8]
    total = num_rows * num_heads
    for item in range(total * thread // num_threads, total * (thread + 1) // num_threads):
        row, head = item // num_heads, item % num_heads
        p_x = x + row * x_row + head * x_head
        p_cos = table + load_i64(positions + 8 * row) * half * 8
        p_sin = p_cos + half * 4
        for i in range(0, half, 16):
            count = min(16, half - i)
            cos, sin = load_first(p_cos + 4 * i, count), load_first(p_sin + 4 * i, count)
            if interleaved != 0:
                p_low, low_count = p_x + 8 * i, min(16, 2 * count)
                p_high, high_count = p_low + 64, 2 * count - low_count
                low, high = load_first(p_low, low_count), load_first(p_high, high_count)
                a, b = even_lanes(low, high), odd_lanes(low, high)
            else:
                p_low, low_count = p_x + 4 * i, count
                p_high, high_count = p_low + 4 * half, count
                a, b = load_first(p_low, count), load_first(p_high, count)
            turned_a, turned_b = a * cos - b * sin, b * cos + a * sin
            if interleaved != 0:
                low, high = zip_low(turned_a, turned_b), zip_high(turned_a, turned_b)
            else:
                low, high = turned_a, turned_b
            store_first(p_low, low_count, low)
            store_first(p_high, high_count, high)


def record_rope(
    program: Program,
    step: PassArgs,
    x: np.ndarray,
    num_heads: int,
    head_dim: int,
    rotary_dim: int,
    table: np.ndarray,
    interleaved: bool,
) -> None:
    """Turn the first rotary_dim values of each head by the angles of the row's position."""
    assert rotary_dim % 2 == 0 and rotary_dim <= head_dim
    assert table.dtype == np.float32 and table.flags.c_contiguous
    assert table.shape[1:] == (2, rotary_dim // 2), f"the table is not for {rotary_dim} dimensions"
    program.add(
        _rope_kernel,
        *(row_count(step, NUM_TOKENS), num_heads, rotary_dim // 2),
        *(x, *head_strides(x, num_heads, head_dim), step.positions, table, int(interleaved)),
        reads=(x,),
        writes=(x,),
    )
