"""Activations as int8 with one scale per 32 columns, ready for the dot-product instructions.

A row becomes one 64-byte record per 32 columns: the integers, the scale, and the sums that weights
with a min or a zero point need. Each row depends on itself alone. Where an instruction multiplies
two rows at once, two rows share records of twice the size.
"""

# ruff: noqa: ANN001, ANN202  (numba inspects the kernels' signatures; types are numba's)
import math
from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from draftree.kernels.cpu.form import GROUP_COLS, LINE_BYTES
from draftree.kernels.cpu.instruction import (
    F32,
    I8,
    I32,
    I64,
    call,
    instruction,
    load_from,
    shuffle,
    spread,
    store_to,
)
from draftree.kernels.cpu.isa import NEON_I8MM, Isa, current_isa
from draftree.kernels.cpu.kernel import kernel
from draftree.kernels.cpu.pass_args import NUM_TOKENS, PassArgs
from draftree.kernels.cpu.program import Program
from draftree.kernels.cpu.simd import load_i64

RECORD_BYTES = 64
_SPARE_ROWS = 15  # after the last row: matrix registers read whole tiles
# Where things are in a record, after the 32 integers.
SCALE_AT = 32  # float32
SUMS_AT = (36, 40, 44)  # scale * sum of the integers, float32: all, the first 16, the last 16
NEGATED_SUM_AT = 48  # minus the sum of the integers, int32
NEGATED_HALF_SUMS_AT = 52
# In the record of two rows: 8 integers of the first, 8 of the second, four times; then numbers as
# four float32: first, second, first, second.
PAIRED_SCALE_AT = 64
PAIRED_SUMS_AT = (80, 96, 112)

_WIDE, _WIDE_I32 = ir.VectorType(F32, GROUP_COLS), ir.VectorType(I32, GROUP_COLS)


def _reduce(builder, name, vector):
    return call(builder, f"llvm.vector.reduce.{name}.v{vector.type.count}i32", I32, [vector])


def _clamp(builder, values, limit):
    """Into [-limit, limit]; what is not a number becomes limit."""
    high = ir.Constant(_WIDE, [limit] * GROUP_COLS)
    low = ir.Constant(_WIDE, [-limit] * GROUP_COLS)
    values = builder.select(builder.fcmp_ordered("<", values, high), values, high)
    return builder.select(builder.fcmp_ordered(">", values, low), values, low)


def _round_group(builder, x):
    """32 float32 at x: their integers, int8; the scale; sums of the integers (all, the first and
    the last 16). If one is not finite, nor is the scale, and so no result.
    """
    values = load_from(builder, x, _WIDE, 4)
    # As integers the magnitudes keep their order, and what is not a number is the largest.
    bits = builder.bitcast(values, _WIDE_I32)
    bits = builder.and_(bits, ir.Constant(_WIDE_I32, [0x7FFFFFFF] * GROUP_COLS))
    largest = builder.bitcast(_reduce(builder, "smax", bits), F32)
    limit = ir.Constant(F32, 127.0)
    scale = builder.fdiv(largest, limit)
    is_zero = builder.fcmp_ordered("==", largest, ir.Constant(F32, 0.0))
    inverse = builder.select(is_zero, ir.Constant(F32, 0.0), builder.fdiv(limit, largest))
    scaled = builder.fmul(values, spread(builder, inverse, GROUP_COLS))
    name = f"llvm.rint.v{GROUP_COLS}f32"
    rounded = call(builder, name, _WIDE, [_clamp(builder, scaled, 127.0)])
    integers = builder.fptosi(rounded, _WIDE_I32)
    halves = [
        _reduce(builder, "add", _pick(builder, integers, range(16 * half, 16 * half + 16)))
        for half in range(2)
    ]
    narrow = builder.trunc(integers, ir.VectorType(I8, GROUP_COLS))
    return narrow, scale, [builder.add(*halves), *halves]


def _pick(builder, vector, lanes):
    return shuffle(builder, (vector, ir.Constant(vector.type, ir.Undefined)), lanes)


def _put(builder, value, record, offset):
    store_to(builder, value, builder.add(record, ir.Constant(I64, offset)), 4)


@instruction("int64 int64")
def _quantize_group(builder, x, record):
    """32 float32 at x to a record."""
    integers, scale, sums = _round_group(builder, x)
    _put(builder, integers, record, 0)
    _put(builder, scale, record, SCALE_AT)
    for i, total in enumerate(sums):
        scaled = builder.fmul(scale, builder.sitofp(total, F32))
        _put(builder, scaled, record, SUMS_AT[i])
        _put(builder, builder.neg(total), record, NEGATED_SUM_AT + 4 * i)


@instruction("int64 int64 int64")
def _quantize_half(builder, x, record, which):
    """32 float32 at x to a record of two rows, of which this is the first (0) or the second (1)."""
    integers, scale, sums = _round_group(builder, x)
    place = builder.add(record, builder.mul(which, ir.Constant(I64, 8)))
    for i in range(0, GROUP_COLS, 8):
        _put(builder, _pick(builder, integers, range(i, i + 8)), place, 2 * i)
    place = builder.add(record, builder.mul(which, ir.Constant(I64, 4)))
    scaled = [builder.fmul(scale, builder.sitofp(total, F32)) for total in sums]
    offsets = (PAIRED_SCALE_AT, *PAIRED_SUMS_AT)
    for number, offset in zip((scale, *scaled), offsets, strict=True):
        for again in (0, 8):
            _put(builder, number, place, offset + again)


@kernel
def _quantize(args, ticket, thread, num_threads):
    """args: control word, x, groups per row, records. Groups of all rows are shared out evenly."""
    total = load_i64(args[0]) * args[2]
    for i in range(total * thread // num_threads, total * (thread + 1) // num_threads):
        _quantize_group(args[1] + i * 4 * GROUP_COLS, args[3] + i * RECORD_BYTES)


@kernel
def _quantize_pairs(args, ticket, thread, num_threads):
    """The same to records of two rows."""
    total, num_groups = load_i64(args[0]) * args[2], args[2]
    for i in range(total * thread // num_threads, total * (thread + 1) // num_threads):
        row, group = i // num_groups, i % num_groups
        place = args[3] + (row // 2 * num_groups + group) * 2 * RECORD_BYTES
        _quantize_half(args[1] + i * 4 * GROUP_COLS, place, row % 2)


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows of source (which float weights read) as uint8 [max_tokens, cols / 32, RECORD_BYTES]; of
    pairs, two rows in the place of each two.
    """

    source: np.ndarray
    records: np.ndarray
    is_paired: bool


def wants_pairs(isa: Isa) -> bool:
    return isa == NEON_I8MM


def quantized_bytes(max_tokens: int, cols: int) -> int:
    """Size of a buffer for record_quantize, which may be shared by all operations of a program."""
    return (max_tokens + _SPARE_ROWS) * (cols // GROUP_COLS) * RECORD_BYTES + LINE_BYTES


def record_quantize(
    program: Program,
    step: PassArgs,
    x: np.ndarray,
    *,
    buffer: np.ndarray | None = None,
    rows_word: int = NUM_TOKENS,
    isa: Isa | None = None,
) -> QuantizedRows:
    """Quantise the rows of x, float32 [max_tokens, cols], that a control word counts, as weights of
    an instruction set want them.

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
    is_paired = wants_pairs(isa or current_isa())
    program.add(_quantize_pairs if is_paired else _quantize, *words, reads=(x,), writes=(records,))
    return QuantizedRows(x, records, is_paired)
