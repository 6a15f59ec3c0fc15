"""Keys and values rounded as a format of the GPU's cache rounds them, in place and before they are
written: rotated, coded, decoded, rotated back (quant/kv_format.py).

They stay numbers of 16 bits or more, so no memory is saved here: what a format does to a model can
be measured on a CPU. A row's bits depend on that row alone.
"""

# ruff: noqa: ANN001, ANN202  (numba inspects the kernels' signatures)
from itertools import pairwise

import numpy as np
from llvmlite import ir

from draftree.kernels.cpu.elementwise import head_strides, row_count
from draftree.kernels.cpu.hadamard import transform_row
from draftree.kernels.cpu.instruction import FLOATS, LANES, call, instruction
from draftree.kernels.cpu.jit import njit
from draftree.kernels.cpu.kernel import kernel
from draftree.kernels.cpu.pass_args import NUM_TOKENS, PassArgs
from draftree.kernels.cpu.program import Program
from draftree.kernels.cpu.simd import (
    absolute,
    load,
    load_i64,
    max_lanes,
    maximum,
    splat,
    store,
    sum_lanes,
)
from draftree.kernels.quant.kv_format import (
    LEVELS_3,
    LEVELS_4,
    ROTATED_LEN,
    KvCode,
    KvFormat,
    rotation_signs,
)

_HALVES = ir.VectorType(ir.HalfType(), LANES)
_LARGEST = 65504.0
_BYTE, _NIBBLE, _FIVE = int(KvCode.BYTE), int(KvCode.NIBBLE), int(KvCode.FIVE)
_LEVELS_4 = int(KvCode.LEVELS_4)


def _everywhere(number):
    return ir.Constant(FLOATS, [float(number)] * LANES)


@instruction("f32x16 -> f32x16")
def _to_half(builder, value):
    """Rounded to a half float; what is too large becomes the largest."""
    for sign, bound in ((">", _LARGEST), ("<", -_LARGEST)):
        limit = _everywhere(bound)
        value = builder.select(builder.fcmp_ordered(sign, value, limit), limit, value)
    return builder.fpext(builder.fptrunc(value, _HALVES), FLOATS)


@instruction("f32x16 -> f32x16")
def _nearest(builder, value):
    return call(builder, f"llvm.rint.v{LANES}f32", FLOATS, [value])


@instruction("f32x16 -> f32x16")
def _floor(builder, value):
    return call(builder, f"llvm.floor.v{LANES}f32", FLOATS, [value])


def _level_of(levels):
    """The level nearest to a number, with its sign."""

    @instruction("f32x16 -> f32x16")
    def op(builder, value):
        zero = _everywhere(0.0)
        is_negative = builder.fcmp_ordered("<", value, zero)
        size = builder.select(is_negative, builder.fsub(zero, value), value)
        found = _everywhere(levels[0])
        for low, high in pairwise(levels):
            is_above = builder.fcmp_ordered(">", size, _everywhere((low + high) / 2))
            found = builder.select(is_above, _everywhere(high), found)
        return builder.select(is_negative, builder.fsub(zero, found), found)

    return op


_level_of_8, _level_of_4 = _level_of(LEVELS_4[0]), _level_of(LEVELS_3[0])
_SPREAD_8, _SPREAD_4 = np.float32(LEVELS_4[1]), np.float32(LEVELS_3[1])


@njit
def _inverse(scale):
    return np.float32(1.0) / scale if scale != np.float32(0.0) else np.float32(0.0)


@njit
def _store_scaled(row, end, scale):
    """Numbers that lie there, times a scale of 16 bits, rounded to 16 bits as the GPU does."""
    factor = _to_half(splat(scale))
    for c in range(row, end, 64):
        store(c, _to_half(load(c) * factor))


@njit
def _round_bytes(row, end):
    top = splat(0.0)
    for c in range(row, end, 64):
        top = maximum(absolute(load(c)), top)
    scale = max_lanes(top) / np.float32(127.0)
    factor = splat(_inverse(scale))
    for c in range(row, end, 64):
        store(c, _nearest(load(c) * factor))
    _store_scaled(row, end, scale)


@njit
def _round_integers(row, end, most):
    high, low = load(row), load(row)
    zero = splat(0.0)
    for c in range(row, end, 64):
        high, low = maximum(load(c), high), zero - maximum(zero - load(c), zero - low)
    top, bottom = max_lanes(high), -max_lanes(zero - low)
    scale = (top if top > -bottom else bottom) / -most
    factor = splat(_inverse(scale))
    for c in range(row, end, 64):
        code = _floor(load(c) * factor + splat(most + np.float32(0.5)))
        code = zero - maximum(zero - maximum(code, zero), splat(np.float32(1.0) - most - most))
        store(c, code - splat(most))
    _store_scaled(row, end, scale)


@njit
def _mean_square(row, end):
    total = splat(0.0)
    for c in range(row, end, 64):
        total = total + load(c) * load(c)
    return sum_lanes(total) / np.float32((end - row) // 4)


@njit
def _round_levels(row, end, code):
    rms = np.sqrt(_mean_square(row, end))
    factor = splat((_SPREAD_8 if code == _LEVELS_4 else _SPREAD_4) * _inverse(rms))
    for c in range(row, end, 64):
        if code == _LEVELS_4:
            store(c, _level_of_8(load(c) * factor))
        else:
            store(c, _level_of_4(load(c) * factor))
    _store_scaled(row, end, rms / np.sqrt(_mean_square(row, end)))


@njit
def _transform(row, end):
    """Orthonormal."""
    order = min((end - row) // 4, ROTATED_LEN)
    factor = splat(np.float32(order**-0.5))
    for c in range(row, end, 4 * order):
        transform_row(c, order)
    for c in range(row, end, 64):
        store(c, load(c) * factor)


@njit
def _flip(row, end, signs):
    for c in range(0, end - row, 64):
        store(row + c, load(row + c) * load(signs + c))


@kernel
def _kv_round_kernel(args, ticket, thread, num_threads):
    num_rows, num_heads, head_dim = load_i64(args[0]), args[1], args[2]
    x, x_row, x_head = args[3], args[4], args[5]
    code, group_len, is_rotated, signs = args[6], args[7], args[8], args[9]
    total = num_rows * num_heads
    for item in range(total * thread // num_threads, total * (thread + 1) // num_threads):
        row = x + item // num_heads * x_row + item % num_heads * x_head
        end = row + 4 * head_dim
        if is_rotated != 0:
            _flip(row, end, signs)
            _transform(row, end)
        for first in range(row, end, 4 * group_len):
            if code == _BYTE:
                _round_bytes(first, first + 4 * group_len)
            elif code == _NIBBLE:
                _round_integers(first, first + 4 * group_len, np.float32(8.0))
            elif code == _FIVE:
                _round_integers(first, first + 4 * group_len, np.float32(16.0))
            else:
                _round_levels(first, first + 4 * group_len, code)
        if is_rotated != 0:
            _transform(row, end)
            _flip(row, end, signs)


@kernel
def _shift_kernel(args, ticket, thread, num_threads):
    """x = y, x + y or x - y."""
    num_rows, width, sign = load_i64(args[0]), args[1], splat(np.float32(args[6]))
    for row in range(thread, num_rows, num_threads):
        for c in range(0, 4 * width, 64):
            x, y = args[2] + row * args[3] + c, args[4] + row * args[5] + c
            store(x, load(y) if args[6] == 0 else load(x) + sign * load(y))


def record_shift(
    program: Program, step: PassArgs, x: np.ndarray, by: np.ndarray, sign: int
) -> None:
    """Rows by (or one row for all) added to x, taken from it (sign -1), or copied (0)."""
    strides = x.strides[0], by.strides[0] if by.ndim == 2 else 0
    program.add(
        _shift_kernel,
        *(row_count(step, NUM_TOKENS), x.shape[1], x, strides[0], by, strides[1], sign),
        reads=(x, by),
        writes=(x,),
    )


def record_kv_round(
    program: Program, step: PassArgs, x: np.ndarray, num_heads: int, form: KvFormat
) -> None:
    """Keys or values [max_tokens, num_heads * head_dim] of a pass, as form would return them."""
    if form.code is KvCode.HALF:
        return  # what writes them rounds
    head_dim = x.shape[-1] if x.ndim == 3 else x.shape[1] // num_heads
    form = form.of(head_dim)
    assert form.can_hold(head_dim), f"{form} cannot hold heads of {head_dim}"
    program.add(
        _kv_round_kernel,
        row_count(step, NUM_TOKENS),
        num_heads,
        head_dim,
        x,
        *head_strides(x, num_heads, head_dim),
        int(form.code),
        form.group_of(head_dim),
        int(form.is_rotated),
        rotation_signs(head_dim),
        reads=(x,),
        writes=(x,),
    )
