"""Products of 16-bit words with bytes where the CPU multiplies bytes, four at a time (arm64): a
word is 256 times one signed byte plus another, so two sums of bytes give that of words, exactly.

In: addresses of words, one row of them for each query, and vectors of bytes, four for each lane.
"""

# ruff: noqa: ANN001, ANN201, ANN202  (numba's and llvmlite's types)
from llvmlite import ir

from draftree.kernels.cpu.dot import load_at, to_pointer
from draftree.kernels.cpu.instruction import I8, I16, I32, I64, shuffle
from draftree.kernels.cpu.jit import cgutils
from draftree.kernels.cpu.neon import add_quads, zip_lanes

WORD_TOP = 32639  # the largest word: 127 * 256 + 127
WORD_STEP = 16  # words of a row that are split into bytes at once
_MOST_ROWS = 3  # more sums do not fit the registers
_BYTES, _WORDS, _SUMS = ir.VectorType(I8, 16), ir.VectorType(I16, 8), ir.VectorType(I32, 4)


def _zip(builder, kind, a, b):
    zipped = zip_lanes(builder, *(builder.bitcast(value, kind) for value in (a, b)))
    return [builder.bitcast(value, _BYTES) for value in zipped]


def load_key_quads(builder, place):
    """Four dimensions of sixteen keys, which lie as two times two dimensions, four keys each."""
    pairs = [load_at(builder, to_pointer(builder, place), 16 * i, _BYTES, 1) for i in range(4)]
    zipped = [_zip(builder, _WORDS, pairs[i], pairs[i + 2]) for i in range(2)]
    return [*zipped[0], *zipped[1]]


def load_value_quads(builder, place, row_bytes):
    """Sixteen columns of four rows, four columns each."""
    rows = []
    for _ in range(4):
        rows.append(load_at(builder, to_pointer(builder, place), 0, _BYTES, 1))
        place = builder.add(place, row_bytes)
    first, second = (_zip(builder, _BYTES, *rows[i : i + 2]) for i in (0, 2))
    zipped = [_zip(builder, _WORDS, *halves) for halves in zip(first, second, strict=True)]
    return [*zipped[0], *zipped[1]]


def _split_words(builder, place):
    """Sixteen words as signed bytes: high ones, then low ones."""
    words = [load_at(builder, to_pointer(builder, place), 16 * i, _WORDS, 2) for i in range(2)]
    rounding = ir.Constant(_WORDS, [128] * 8)  # the low byte counts from -128 to 127
    raised = [builder.add(value, rounding) for value in words]
    highs, lows = ([builder.bitcast(v, _BYTES) for v in pair] for pair in (raised, words))
    halves = [
        shuffle(builder, highs, list(range(1, 32, 2))),
        shuffle(builder, lows, list(range(0, 32, 2))),
    ]
    return [_hide(builder, half) for half in halves]


def _hide(builder, value):
    """As four int32, from a compiler that would pick bytes of the words one by one instead."""
    kind = ir.FunctionType(_SUMS, [_SUMS])
    return builder.asm(kind, "", "=w,0", [builder.bitcast(value, _SUMS)], side_effect=False)


def sum_words(builder, rows, num_words, load_quads):
    """For each row the sums of words times bytes in sixteen int32 lanes.

    rows: addresses of 16-bit words within +-WORD_TOP, whose number is rounded up to a multiple of
    sixteen. load_quads(i, is_first): the bytes that belong to words 4i ... 4i+3; is_first is said
    once for each i.
    """
    sums = []
    for start in range(0, len(rows), _MOST_ROWS):
        some = rows[start : start + _MOST_ROWS]
        sums += _sum_some(builder, some, num_words, load_quads, start == 0)
    return sums


def _sum_some(builder, rows, num_words, load_quads, is_first):
    zero = ir.Constant(_SUMS, [0] * 4)
    cells = [
        [[cgutils.alloca_once_value(builder, zero) for _ in range(4)] for _ in range(2)]
        for _ in rows
    ]
    rounded = builder.add(num_words, ir.Constant(I64, WORD_STEP - 1))
    num_steps = builder.udiv(rounded, ir.Constant(I64, WORD_STEP))
    with cgutils.for_range(builder, num_steps, intp=I64) as loop:
        offset = builder.mul(loop.index, ir.Constant(I64, 2 * WORD_STEP))
        words = [_split_words(builder, builder.add(row, offset)) for row in rows]
        first = builder.mul(loop.index, ir.Constant(I64, WORD_STEP // 4))
        for quad in range(WORD_STEP // 4):
            columns = load_quads(builder.add(first, ir.Constant(I64, quad)), is_first)
            for halves, parts in zip(cells, words, strict=True):
                for totals, part in zip(halves, parts, strict=True):
                    factor = builder.bitcast(shuffle(builder, (part, part), [quad] * 4), _BYTES)
                    for cell, column in zip(totals, columns, strict=True):
                        total = add_quads(builder, builder.load(cell), column, factor)
                        builder.store(total, cell)
    return [_join(builder, *halves) for halves in cells]


def _join(builder, high_cells, low_cells):
    eight = ir.Constant(_SUMS, [8] * 4)
    parts = []
    for high, low in zip(high_cells, low_cells, strict=True):
        parts.append(builder.add(builder.shl(builder.load(high), eight), builder.load(low)))
    halves = [shuffle(builder, parts[i : i + 2], list(range(8))) for i in (0, 2)]
    return shuffle(builder, halves, list(range(16)))
