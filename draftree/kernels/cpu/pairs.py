"""Products of 16-bit words with bytes, two at a time: exact sums in int32 lanes.

A pair of words times a pair of bytes is added to a lane by one instruction where the CPU has it;
where it has one for bytes, quads.py. All instruction sets give the same integers.
"""

# ruff: noqa: ANN001, ANN201, ANN202  (numba inspects these signatures; types are numba's)
from functools import partial
from itertools import product

from llvmlite import ir

from draftree.kernels.cpu.block import by_rows
from draftree.kernels.cpu.floating import prefetch
from draftree.kernels.cpu.instruction import (
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    INTEGERS,
    LANES,
    call,
    instruction,
    load_from,
    shuffle,
    spread,
    step_by,
    store_to,
)
from draftree.kernels.cpu.isa import AMX, AVX2, AVX512_VNNI, AVX_VNNI, NEON, current_isa
from draftree.kernels.cpu.jit import cgutils
from draftree.kernels.cpu.quads import load_key_quads, load_value_quads, sum_words

_SIZES = (8, 6, 4, 3, 1)  # rows of a block; a few behind those that are left may be overwritten
PAIR_ROWS = _SIZES[0]
_VECTORS = 2
_BYTES, _WORDS = ir.VectorType(I8, 2 * LANES), ir.VectorType(I16, 2 * LANES)
# Words of two rows side by side, in every four lanes: those of the lower half, of the upper half,
# and the way back.
_LOW = [i // 8 * 8 + i % 8 // 2 + i % 2 * 32 for i in range(32)]
_HIGH = [i + 4 for i in _LOW]
_BACK = [[start + i // 8 * 4 + i % 4 + i // 4 % 2 * 16 for i in range(16)] for start in (0, 8)]


def _add_pairs(builder, total, words, pairs):
    """total + words[2i] * pairs[2i] + words[2i + 1] * pairs[2i + 1] in lane i."""
    isa = current_isa()
    if isa in (AMX, AVX512_VNNI):
        return call(builder, "llvm.x86.avx512.vpdpwssd.512", INTEGERS, [total, words, pairs])
    if isa in (AVX_VNNI, AVX2):
        halves = []
        for lanes in (list(range(8)), list(range(8, 16))):
            part, a, b = (
                shuffle(builder, (value, value), lanes) for value in (total, words, pairs)
            )
            if isa == AVX_VNNI:
                name = "llvm.x86.avx512.vpdpwssd.256"
                halves.append(call(builder, name, part.type, [part, a, b]))
            else:
                short = ir.VectorType(I16, 16)
                args = [builder.bitcast(value, short) for value in (a, b)]
                product = call(builder, "llvm.x86.avx2.pmadd.wd", part.type, args)
                halves.append(builder.add(part, product))
        return shuffle(builder, halves, list(range(16)))
    a, b = (builder.bitcast(value, _WORDS) for value in (words, pairs))
    for first in range(2):
        lanes = list(range(first, 2 * LANES, 2))
        factors = [builder.sext(shuffle(builder, (v, v), lanes), INTEGERS) for v in (a, b)]
        total = builder.add(total, builder.mul(*factors))
    return total


def _sum_pairs(builder, num_rows, a, a_row, num_pairs, load_columns):
    """num_rows x 2 vectors of sums, in registers; load_columns(i): both vectors of pair i."""
    zero = ir.Constant(INTEGERS, [0] * LANES)
    sums = [
        [cgutils.alloca_once_value(builder, zero) for _ in range(_VECTORS)] for _ in range(num_rows)
    ]
    with cgutils.for_range(builder, num_pairs, intp=I64) as loop:
        columns = [builder.bitcast(column, INTEGERS) for column in load_columns(loop.index)]
        place = builder.add(a, builder.mul(loop.index, I64(4)))
        for r, cells in enumerate(sums):
            pair = load_from(builder, step_by(builder, place, a_row, r), I32, 4)
            words = spread(builder, pair, LANES)
            for cell, column in zip(cells, columns, strict=True):
                builder.store(_add_pairs(builder, builder.load(cell), words, column), cell)
    return [[builder.load(cell) for cell in cells] for cells in sums]


def _sum_quads(builder, num_rows, a, a_row, num_pairs, load_quads):
    """The same with quads.py; load_quads(n, i, is_first): quad i of vector n."""
    rows = [step_by(builder, a, a_row, r) for r in range(num_rows)]
    num_words = builder.mul(num_pairs, I64(2))
    columns = [sum_words(builder, rows, num_words, partial(load_quads, n)) for n in range(_VECTORS)]
    return list(zip(*columns, strict=True))


@instruction("int64 " * 10)
def score_pairs(builder, left, out, out_row, a, a_row, keys, tile, scales, num_pairs, later):
    """out[left, 32 keys] = words a x keys, times the keys' scales. tile: bytes of 16 keys.

    Meanwhile the next 32 keys are asked for, and as many bytes at `later`.
    """
    next_keys = step_by(builder, keys, tile, _VECTORS)

    def ask(offset):
        for start in (next_keys, later):
            place = builder.inttoptr(builder.add(start, offset), I8.as_pointer())
            prefetch(builder, place, 1)

    def load_columns(i):
        ask(builder.mul(i, I64(64)))
        for n in range(_VECTORS):
            place = builder.add(step_by(builder, keys, tile, n), builder.mul(i, I64(32)))
            yield builder.sext(load_from(builder, place, _BYTES, 1), _WORDS)

    def load_quads(n, i, is_first):
        offset = builder.add(step_by(builder, I64(0), tile, n), builder.mul(i, I64(64)))
        if is_first:
            ask(offset)
        return load_key_quads(builder, builder.add(keys, offset))

    def write(num_rows):
        if current_isa() in NEON:
            sums = _sum_quads(builder, num_rows, a, a_row, num_pairs, load_quads)
        else:
            sums = _sum_pairs(builder, num_rows, a, a_row, num_pairs, load_columns)
        for n in range(_VECTORS):
            scale = load_from(builder, step_by(builder, scales, I64(64), n), FLOATS, 4)
            for r in range(num_rows):
                score = builder.fmul(builder.sitofp(sums[r][n], FLOATS), scale)
                row = step_by(builder, out, out_row, r)
                store_to(builder, score, step_by(builder, row, I64(64), n), 4)

    by_rows(builder, left, _SIZES, write)


@instruction("int64 " * 9)
def weigh_pairs(builder, left, out, out_row, a, a_row, values, value_row, num_pairs, is_fresh):
    """Integers out[left, 32 columns] (+)= words a x values[2 num_pairs, 32 columns].

    Words behind the last one, up to a multiple of WORD_STEP (quads.py), must be zero: rows of
    values there may be read, whatever they hold.
    """
    is_fresh = builder.icmp_signed("!=", is_fresh, I64(0))
    zero = ir.Constant(INTEGERS, [0] * LANES)

    def load_columns(i):
        place = builder.add(values, builder.mul(builder.mul(i, I64(2)), value_row))
        places = place, builder.add(place, value_row)
        rows = [builder.sext(load_from(builder, p, _BYTES, 1), _WORDS) for p in places]
        return [shuffle(builder, rows, lanes) for lanes in (_LOW, _HIGH)]

    def load_quads(n, i, is_first):
        place = builder.add(values, builder.mul(builder.mul(i, I64(4)), value_row))
        return load_value_quads(builder, builder.add(place, I64(LANES * n)), value_row)

    def write(num_rows):
        if current_isa() in NEON:
            sums = _sum_quads(builder, num_rows, a, a_row, num_pairs, load_quads)
        else:
            pairs = _sum_pairs(builder, num_rows, a, a_row, num_pairs, load_columns)
            sums = [[shuffle(builder, pair, lanes) for lanes in _BACK] for pair in pairs]
        for r, n in product(range(num_rows), range(_VECTORS)):
            place = step_by(builder, step_by(builder, out, out_row, r), I64(64), n)
            before = builder.select(is_fresh, zero, load_from(builder, place, INTEGERS, 4))
            store_to(builder, builder.add(sums[r][n], before), place, 4)

    by_rows(builder, left, _SIZES, write)


@instruction("int64 f32x16")
def store_words(builder, address, value):
    """Sixteen float32, which must be in range, as 16-bit words: rounded to nearest even."""
    nearest = call(builder, "llvm.rint.v16f32", FLOATS, [value])
    words = builder.trunc(builder.fptosi(nearest, INTEGERS), ir.VectorType(I16, LANES))
    store_to(builder, words, address, 2)


@instruction("int64 -> f32x16")
def load_integers(builder, address):
    """Sixteen int32 as float32."""
    return builder.sitofp(load_from(builder, address, INTEGERS, 4), FLOATS)
