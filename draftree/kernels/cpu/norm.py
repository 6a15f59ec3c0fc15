"""Root-mean-square norms of rows and of heads, with or without a gate.

x is float32 [max_tokens, cols] or a view [max_tokens, num_heads, head_dim]. The sum of squares
runs in a fixed order over four times sixteen lanes, so a row's result depends on the row alone.
"""

# ruff: noqa: ANN001, ANN201, ANN202  (numba inspects the kernels' signatures)
import math

import numpy as np

from draftree.kernels.cpu.elementwise import head_strides, row_count
from draftree.kernels.cpu.jit import njit
from draftree.kernels.cpu.kernel import kernel
from draftree.kernels.cpu.pass_args import NUM_TOKENS, PassArgs
from draftree.kernels.cpu.program import Program
from draftree.kernels.cpu.simd import (
    bits_to_float,
    fma,
    load,
    load_first,
    load_i64,
    silu,
    splat,
    store,
    store_first,
    sum_lanes,
)


@njit(inline="always")
def sum_squares(x, count):
    """Sum of squares of count float32 at address x, as float32."""
    s0, s1, s2, s3 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    whole = count // 64 * 64
    for c in range(0, 4 * whole, 256):
        v0, v1 = load(x + c), load(x + c + 64)
        v2, v3 = load(x + c + 128), load(x + c + 192)
        s0, s1 = fma(v0, v0, s0), fma(v1, v1, s1)
        s2, s3 = fma(v2, v2, s2), fma(v3, v3, s3)
    for c in range(whole, count // 16 * 16, 16):
        v = load(x + 4 * c)
        s0 = fma(v, v, s0)
    rest = count % 16
    if rest > 0:
        v = load_first(x + 4 * (count - rest), rest)
        s1 = fma(v, v, s1)
    return sum_lanes((s0 + s1) + (s2 + s3))


@kernel
def _norm_kernel(args, ticket, thread, num_threads):
    num_rows, num_heads, head_dim = load_i64(args[0]), args[1], args[2]
    x, x_row, x_head = args[3], args[4], args[5]
    z, z_row, z_head = args[6], args[7], args[8]
    out, out_row, out_head = args[9], args[10], args[11]
    weight = args[12]
    eps = np.float32(bits_to_float(args[13]))
    whole = head_dim // 16 * 16
    rest = head_dim - whole
    total = num_rows * num_heads
    for item in range(total * thread // num_threads, total * (thread + 1) // num_threads):
        row, head = item // num_heads, item % num_heads
        p_x = x + row * x_row + head * x_head
        p_z = z + row * z_row + head * z_head
        p_out = out + row * out_row + head * out_head
        mean = sum_squares(p_x, head_dim) / np.float32(head_dim)
        factor = splat(np.float32(1.0) / math.sqrt(mean + eps))
        if z != 0:
            for c in range(0, 4 * whole, 64):
                value = load(p_x + c) * factor * load(weight + c)
                store(p_out + c, value * silu(load(p_z + c)))
        else:
            for c in range(0, 4 * whole, 64):
                store(p_out + c, load(p_x + c) * factor * load(weight + c))
        if rest > 0:
            c = 4 * whole
            value = load_first(p_x + c, rest) * factor * load_first(weight + c, rest)
            if z != 0:
                value = value * silu(load_first(p_z + c, rest))
            store_first(p_out + c, rest, value)


def _record(
    program: Program,
    step: PassArgs,
    x: np.ndarray,
    z: np.ndarray | None,
    weight: np.ndarray,
    eps: float,
    heads: tuple[int, int],
    out: np.ndarray,
    rows_word: int = NUM_TOKENS,
) -> None:
    num_heads, head_dim = heads
    assert weight.dtype == np.float32 and weight.flags.c_contiguous
    assert weight.shape == (head_dim,), f"a weight of {head_dim} values is expected"
    z_args = (0, 0, 0) if z is None else (z, *head_strides(z, num_heads, head_dim))
    program.add(
        _norm_kernel,
        *(row_count(step, rows_word), num_heads, head_dim),
        *(x, *head_strides(x, num_heads, head_dim), *z_args),
        *(out, *head_strides(out, num_heads, head_dim), weight, float(eps)),
        reads=(x, weight) if z is None else (x, z, weight),
        writes=(out,),
    )


def record_rms_norm(
    program: Program,
    step: PassArgs,
    x: np.ndarray,
    weight: np.ndarray,
    eps: float,
    out: np.ndarray,
    rows_word: int = NUM_TOKENS,
) -> None:
    """out = x / sqrt(mean(x²) + eps) * weight for each row; out may be x."""
    _record(program, step, x, None, weight, eps, (1, weight.shape[0]), out, rows_word)


def record_head_norm(
    program: Program,
    step: PassArgs,
    x: np.ndarray,
    num_heads: int,
    head_dim: int,
    weight: np.ndarray,
    eps: float,
) -> None:
    """The same for each head of each row, in place; weight [head_dim] serves all heads."""
    _record(program, step, x, None, weight, eps, (num_heads, head_dim), x)


def record_gated_norm(
    program: Program,
    step: PassArgs,
    x: np.ndarray,
    z: np.ndarray,
    weight: np.ndarray,
    eps: float,
    num_heads: int,
    head_dim: int,
    out: np.ndarray,
) -> None:
    """out = norm(x) * weight * silu(z) for each head of each row; out may be x."""
    _record(program, step, x, z, weight, eps, (num_heads, head_dim), out)
