"""Products of 16-bit words with bytes, two at a time: exact sums in int32 lanes.

A pair of words times a pair of bytes is added to a lane by one instruction where the CPU has it;
where it has one for bytes, quads.py. All instruction sets give the same integers.
"""

# ruff: noqa: ANN001, ANN201, ANN202  (numba inspects these signatures; types are numba's)
from functools import partial
from itertools import product

from llvmlite import ir

from draftree.kernels.cpu.block import by_rows
from draftree.kernels.cpu.dot import call
from draftree.kernels.cpu.floating import prefetch, splat
from draftree.kernels.cpu.isa import AMX, AVX2, AVX512_VNNI, AVX_VNNI, NEON, current_isa
from draftree.kernels.cpu.jit import cgutils, intrinsic, types
from draftree.kernels.cpu.quads import load_key_quads, load_value_quads, shuffle, sum_words
from draftree.kernels.cpu.simd import LANES, f32x16

_SIZES = (8, 6, 4, 3, 1)  # rows of a block; a few behind those that are left may be overwritten
PAIR_ROWS = _SIZES[0]
_VECTORS = 2
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOATS, _INTEGERS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_I32, LANES)
_BYTES, _WORDS = ir.VectorType(_I8, 2 * LANES), ir.VectorType(_I16, 2 * LANES)
# Words of two rows side by side, in every four lanes: those of the lower half, of the upper half,
# and the way back.
_LOW = [i // 8 * 8 + i % 8 // 2 + i % 2 * 32 for i in range(32)]
_HIGH = [i + 4 for i in _LOW]
_BACK = [[start + i // 8 * 4 + i % 4 + i // 4 % 2 * 16 for i in range(16)] for start in (0, 8)]


def _at(builder, base, stride, index):
    return builder.add(base, builder.mul(stride, ir.Constant(_I64, index)))


def _load(builder, address, kind, align):
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def _store(builder, value, address, align=4):
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = align


def _add_pairs(builder, total, words, pairs):
    """total + words[2i] * pairs[2i] + words[2i + 1] * pairs[2i + 1] in lane i."""
    isa = current_isa()
    if isa in (AMX, AVX512_VNNI):
        return call(builder, "llvm.x86.avx512.vpdpwssd.512", _INTEGERS, [total, words, pairs])
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
                short = ir.VectorType(_I16, 16)
                args = [builder.bitcast(value, short) for value in (a, b)]
                product = call(builder, "llvm.x86.avx2.pmadd.wd", part.type, args)
                halves.append(builder.add(part, product))
        return shuffle(builder, halves, list(range(16)))
    a, b = (builder.bitcast(value, _WORDS) for value in (words, pairs))
    for first in range(2):
        lanes = list(range(first, 2 * LANES, 2))
        factors = [builder.sext(shuffle(builder, (v, v), lanes), _INTEGERS) for v in (a, b)]
        total = builder.add(total, builder.mul(*factors))
    return total


def _sum_pairs(builder, num_rows, a, a_row, num_pairs, load_columns):
    """num_rows x 2 vectors of sums, in registers; load_columns(i): both vectors of pair i."""
    zero = ir.Constant(_INTEGERS, [0] * LANES)
    sums = [
        [cgutils.alloca_once_value(builder, zero) for _ in range(_VECTORS)] for _ in range(num_rows)
    ]
    with cgutils.for_range(builder, num_pairs, intp=_I64) as loop:
        columns = [builder.bitcast(column, _INTEGERS) for column in load_columns(loop.index)]
        place = builder.add(a, builder.mul(loop.index, _I64(4)))
        for r, cells in enumerate(sums):
            words = splat(builder, _load(builder, _at(builder, place, a_row, r), _I32, 4), LANES)
            for cell, column in zip(cells, columns, strict=True):
                builder.store(_add_pairs(builder, builder.load(cell), words, column), cell)
    return [[builder.load(cell) for cell in cells] for cells in sums]


def _sum_quads(builder, num_rows, a, a_row, num_pairs, load_quads):
    """The same with quads.py; load_quads(n, i, is_first): quad i of vector n."""
    rows = [_at(builder, a, a_row, r) for r in range(num_rows)]
    num_words = builder.mul(num_pairs, _I64(2))
    columns = [sum_words(builder, rows, num_words, partial(load_quads, n)) for n in range(_VECTORS)]
    return list(zip(*columns, strict=True))


@intrinsic
def score_pairs(typingctx, left, out, out_row, a, a_row, keys, tile, scales, num_pairs, later):
    """out[left, 32 keys] = words a x keys, times the keys' scales. tile: bytes of 16 keys.

    Meanwhile the next 32 keys are asked for, and as many bytes at `later`.
    """

    def codegen(context, builder, signature, args):
        left, out, out_row, a, a_row, keys, tile, scales, num_pairs, later = args
        next_keys = _at(builder, keys, tile, _VECTORS)

        def ask(offset):
            for start in (next_keys, later):
                place = builder.inttoptr(builder.add(start, offset), _I8.as_pointer())
                prefetch(builder, place, 1)

        def load_columns(i):
            ask(builder.mul(i, _I64(64)))
            for n in range(_VECTORS):
                place = builder.add(_at(builder, keys, tile, n), builder.mul(i, _I64(32)))
                yield builder.sext(_load(builder, place, _BYTES, 1), _WORDS)

        def load_quads(n, i, is_first):
            offset = builder.add(_at(builder, _I64(0), tile, n), builder.mul(i, _I64(64)))
            if is_first:
                ask(offset)
            return load_key_quads(builder, builder.add(keys, offset))

        def write(num_rows):
            if current_isa() in NEON:
                sums = _sum_quads(builder, num_rows, a, a_row, num_pairs, load_quads)
            else:
                sums = _sum_pairs(builder, num_rows, a, a_row, num_pairs, load_columns)
            for n in range(_VECTORS):
                scale = _load(builder, _at(builder, scales, _I64(64), n), _FLOATS, 4)
                for r in range(num_rows):
                    score = builder.fmul(builder.sitofp(sums[r][n], _FLOATS), scale)
                    row = _at(builder, out, out_row, r)
                    _store(builder, score, _at(builder, row, _I64(64), n))

        by_rows(builder, left, _SIZES, write)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), codegen


@intrinsic
def weigh_pairs(typingctx, left, out, out_row, a, a_row, values, value_row, num_pairs, is_fresh):
    """Integers out[left, 32 columns] (+)= words a x values[2 num_pairs, 32 columns].

    Words behind the last one, up to a multiple of WORD_STEP (quads.py), must be zero: rows of
    values there may be read, whatever they hold.
    """

    def codegen(context, builder, signature, args):
        left, out, out_row, a, a_row, values, value_row, num_pairs, is_fresh = args
        is_fresh = builder.icmp_signed("!=", is_fresh, _I64(0))
        zero = ir.Constant(_INTEGERS, [0] * LANES)

        def load_columns(i):
            place = builder.add(values, builder.mul(builder.mul(i, _I64(2)), value_row))
            places = place, builder.add(place, value_row)
            rows = [builder.sext(_load(builder, p, _BYTES, 1), _WORDS) for p in places]
            return [shuffle(builder, rows, lanes) for lanes in (_LOW, _HIGH)]

        def load_quads(n, i, is_first):
            place = builder.add(values, builder.mul(builder.mul(i, _I64(4)), value_row))
            return load_value_quads(builder, builder.add(place, _I64(LANES * n)), value_row)

        def write(num_rows):
            if current_isa() in NEON:
                sums = _sum_quads(builder, num_rows, a, a_row, num_pairs, load_quads)
            else:
                pairs = _sum_pairs(builder, num_rows, a, a_row, num_pairs, load_columns)
                sums = [[shuffle(builder, pair, lanes) for lanes in _BACK] for pair in pairs]
            for r, n in product(range(num_rows), range(_VECTORS)):
                place = _at(builder, _at(builder, out, out_row, r), _I64(64), n)
                before = builder.select(is_fresh, zero, _load(builder, place, _INTEGERS, 4))
                _store(builder, builder.add(sums[r][n], before), place)

        by_rows(builder, left, _SIZES, write)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), codegen


@intrinsic
def store_words(typingctx, address, value):
    """Sixteen float32, which must be in range, as 16-bit words: rounded to nearest even."""

    def codegen(context, builder, signature, args):
        nearest = call(builder, "llvm.rint.v16f32", _FLOATS, [args[1]])
        words = builder.trunc(builder.fptosi(nearest, _INTEGERS), ir.VectorType(_I16, LANES))
        _store(builder, words, args[0], 2)
        return context.get_dummy_value()

    return types.void(types.int64, f32x16), codegen


@intrinsic
def load_word(typingctx, address):
    def codegen(context, builder, signature, args):
        return builder.sext(_load(builder, args[0], _I16, 2), _I64)

    return types.int64(types.int64), codegen


@intrinsic
def store_word(typingctx, address, value):
    def codegen(context, builder, signature, args):
        _store(builder, builder.trunc(args[1], _I16), args[0], 2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def load_integers(typingctx, address):
    """Sixteen int32 as float32."""

    def codegen(context, builder, signature, args):
        return builder.sitofp(_load(builder, args[0], _INTEGERS, 4), _FLOATS)

    return f32x16(types.int64), codegen
