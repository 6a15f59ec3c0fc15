"""Activations as int8 with one scale per 32 columns, ready for the dot-product instructions.

A row becomes one 64-byte record per 32 columns: the integers, the scale, and the sums that weights
with a min or a zero point need. Each row depends on itself alone.
"""

# ruff: noqa: ANN001, ANN202  (numba inspects the kernels' signatures; types are numba's)
import math
from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from draftree.kernels.cpu.floating import splat
from draftree.kernels.cpu.form import GROUP_COLS, LINE_BYTES
from draftree.kernels.cpu.jit import cgutils, intrinsic, types
from draftree.kernels.cpu.kernel import kernel
from draftree.kernels.cpu.program import Program
from draftree.kernels.cpu.simd import load_i64
from draftree.kernels.cpu.step import NUM_TOKENS, Step

RECORD_BYTES = 64
_SPARE_ROWS = 15  # after the last row: matrix registers read whole tiles
# Where things are in a record, after the 32 integers.
SCALE_AT = 32  # float32
SUM_AT = 36  # scale * sum of the integers, float32
HALF_SUMS_AT = 40  # the same for the first and the last 16 columns
NEGATED_SUM_AT = 48  # minus the sum of the integers, int32
NEGATED_HALF_SUMS_AT = 52

_I8, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_WIDE, _WIDE_I32 = ir.VectorType(_F32, GROUP_COLS), ir.VectorType(_I32, GROUP_COLS)


def _reduce(builder, name, vector):
    function_type = ir.FunctionType(_I32, [vector.type])
    full_name = f"llvm.vector.reduce.{name}.v{vector.type.count}i32"
    function = cgutils.get_or_insert_function(builder.module, function_type, full_name)
    return builder.call(function, [vector])


def _clamp(builder, values, limit):
    """Into [-limit, limit]; what is not a number becomes limit."""
    high = ir.Constant(_WIDE, [limit] * GROUP_COLS)
    low = ir.Constant(_WIDE, [-limit] * GROUP_COLS)
    values = builder.select(builder.fcmp_ordered("<", values, high), values, high)
    return builder.select(builder.fcmp_ordered(">", values, low), values, low)


@intrinsic
def _quantize_group(typingctx, x, record):
    """32 float32 at x to a record. If one is not finite, nor is the scale, and so no result."""

    def codegen(context, builder, signature, args):
        def put(value, offset):
            address = builder.add(args[1], ir.Constant(_I64, offset))
            builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 4

        values = builder.load(builder.inttoptr(args[0], _WIDE.as_pointer()))
        values.align = 4
        # As integers the magnitudes keep their order, and what is not a number is the largest.
        bits = builder.bitcast(values, _WIDE_I32)
        bits = builder.and_(bits, ir.Constant(_WIDE_I32, [0x7FFFFFFF] * GROUP_COLS))
        largest = builder.bitcast(_reduce(builder, "smax", bits), _F32)
        limit = ir.Constant(_F32, 127.0)
        scale = builder.fdiv(largest, limit)
        is_zero = builder.fcmp_ordered("==", largest, ir.Constant(_F32, 0.0))
        inverse = builder.select(is_zero, ir.Constant(_F32, 0.0), builder.fdiv(limit, largest))
        scaled = builder.fmul(values, splat(builder, inverse, GROUP_COLS))
        rounder = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_WIDE, [_WIDE]), f"llvm.rint.v{GROUP_COLS}f32"
        )
        rounded = builder.call(rounder, [_clamp(builder, scaled, 127.0)])
        integers = builder.fptosi(rounded, _WIDE_I32)
        put(builder.trunc(integers, ir.VectorType(_I8, GROUP_COLS)), 0)
        put(scale, SCALE_AT)
        undefined = ir.Constant(_WIDE_I32, ir.Undefined)
        halves = []
        for half in range(2):
            lanes = ir.Constant(ir.VectorType(_I32, 16), list(range(16 * half, 16 * half + 16)))
            part = builder.shuffle_vector(integers, undefined, lanes)
            halves.append(_reduce(builder, "add", part))
        sums = [builder.add(*halves), *halves]
        for i, total in enumerate(sums):
            put(builder.fmul(scale, builder.sitofp(total, _F32)), SUM_AT + 4 * i)
            put(builder.neg(total), NEGATED_SUM_AT + 4 * i)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@kernel
def _quantize(args, ticket, thread, num_threads):
    """args: control word, x, groups per row, records. Groups of all rows are shared out evenly."""
    total = load_i64(args[0]) * args[2]
    for i in range(total * thread // num_threads, total * (thread + 1) // num_threads):
        _quantize_group(args[1] + i * 4 * GROUP_COLS, args[3] + i * RECORD_BYTES)


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows of source (which float weights read) as uint8 [max_tokens, cols / 32, RECORD_BYTES]."""

    source: np.ndarray
    records: np.ndarray


def quantized_bytes(max_tokens: int, cols: int) -> int:
    """Size of a buffer for record_quantize, which may be shared by all operations of a program."""
    return (max_tokens + _SPARE_ROWS) * (cols // GROUP_COLS) * RECORD_BYTES + LINE_BYTES


def record_quantize(
    program: Program,
    step: Step,
    x: np.ndarray,
    *,
    buffer: np.ndarray | None = None,
    rows_word: int = NUM_TOKENS,
) -> QuantizedRows:
    """Quantise the rows of x, float32 [max_tokens, cols], that a control word counts.

    buffer: uint8, at least quantized_bytes(max_tokens, cols); a new one if not given.
    """
    max_tokens, cols = x.shape
    assert x.dtype == np.float32 and x.flags.c_contiguous
    assert cols % GROUP_COLS == 0, f"{cols} columns are not a multiple of {GROUP_COLS}"
    needed = quantized_bytes(max_tokens, cols)
    if buffer is None:
        buffer = np.empty(needed, dtype=np.uint8)
    assert buffer.dtype == np.uint8 and buffer.ndim == 1 and len(buffer) >= needed
    start = -buffer.ctypes.data % LINE_BYTES
    shape = (max_tokens, cols // GROUP_COLS, RECORD_BYTES)
    records = buffer[start : start + math.prod(shape)].reshape(shape)
    words = (step.control[rows_word:], x, cols // GROUP_COLS, records)
    program.add(_quantize, *words, reads=(x,), writes=(records,))
    return QuantizedRows(x, records)
