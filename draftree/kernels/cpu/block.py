"""Small matrix products in registers, and moves of single lanes: the inside of attention.

out[r, 32 columns] (+)= sum over k of a[r, k] * b[k, 32 columns], summed in the order of k with one
rounding per term, so an element does not depend on how many rows share the block. b is float32 or
float16, which a word says: its elements have 4 >> word bytes.
"""

# ruff: noqa: ANN001, ANN201, ANN202  (numba inspects these signatures; types are numba's)
from llvmlite import ir

from draftree.kernels.cpu.atomic import call_operation
from draftree.kernels.cpu.instruction import (
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    INTEGERS,
    LANES,
    call,
    fused,
    instruction,
    load_from,
    spread,
    step_by,
    store_to,
)
from draftree.kernels.cpu.jit import cgutils, njit
from draftree.kernels.cpu.kernel import kernel
from draftree.kernels.cpu.simd import load_i64, store_i64

BLOCK_ROWS = 8
CALL_WORDS = 16
TYPE_F32, TYPE_F16, TYPE_I8 = range(3)
_VECTORS = 2
BLOCK_COLS = _VECTORS * LANES
_HALVES, _BYTES = ir.VectorType(ir.HalfType(), LANES), ir.VectorType(I8, LANES)
_ALIGN = {FLOATS: 4, _HALVES: 2, _BYTES: 1}


def _word(value):
    return ir.Constant(I64, value)


def _widen(builder, value):
    """To float32, exactly."""
    if value.type == _HALVES:
        return builder.fpext(value, FLOATS)
    is_bytes = value.type == _BYTES
    return builder.sitofp(builder.sext(value, INTEGERS), FLOATS) if is_bytes else value


def _narrow(builder, value, kind):
    """Rounded to nearest even; int8 must be in range."""
    if kind == _HALVES:
        return builder.fptrunc(value, _HALVES)
    if kind == _BYTES:
        nearest = call(builder, "llvm.rint.v16f32", FLOATS, [value])
        return builder.trunc(builder.fptosi(nearest, INTEGERS), _BYTES)
    return value


def _by_type(builder, word, write):
    """write(vector type) for the type that the word names."""
    with builder.if_else(builder.icmp_signed("==", word, _word(TYPE_F16))) as (half, other):
        with half:
            write(_HALVES)
        with other:
            is_bytes = builder.icmp_signed("==", word, _word(TYPE_I8))
            with builder.if_else(is_bytes) as (small, full):
                with small:
                    write(_BYTES)
                with full:
                    write(FLOATS)


def by_rows(builder, left, sizes, write):
    """write(size) for the smallest of the sizes (falling) that holds what is left, or the first."""
    if len(sizes) == 1:
        write(sizes[0])
        return
    with builder.if_else(builder.icmp_signed(">", left, _word(sizes[1]))) as (more, fewer):
        with more:
            write(sizes[0])
        with fewer:
            by_rows(builder, left, sizes[1:], write)


def _write_block(builder, num_rows, b_kind, is_fresh, operands):
    """num_rows x 2 vectors of sums stay in registers while k runs."""
    out, out_row, a, a_row, b, b_step, b_next, count = operands
    cells = [(r, n) for r in range(num_rows) for n in range(_VECTORS)]
    places, sums = {}, {}
    for r, n in cells:
        row = step_by(builder, out, out_row, r)
        places[r, n] = step_by(builder, row, _word(4 * LANES), n)
        sums[r, n] = cgutils.alloca_once(builder, FLOATS)
        zero = ir.Constant(FLOATS, [0.0] * LANES)
        before = load_from(builder, places[r, n], FLOATS, 4)
        builder.store(builder.select(is_fresh, zero, before), sums[r, n])
    with cgutils.for_range(builder, count) as loop:
        place = builder.add(b, builder.mul(b_step, loop.index))
        columns = [
            _widen(builder, load_from(builder, address, b_kind, _ALIGN[b_kind]))
            for address in (step_by(builder, place, b_next, n) for n in range(_VECTORS))
        ]
        for r in range(num_rows):
            row = step_by(builder, a, a_row, r)
            address = builder.add(row, builder.mul(_word(4), loop.index))
            factor = spread(builder, load_from(builder, address, F32, 4), LANES)
            for n in range(_VECTORS):
                total = fused(builder, factor, columns[n], builder.load(sums[r, n]))
                builder.store(total, sums[r, n])
    for cell in cells:
        store_to(builder, builder.load(sums[cell]), places[cell], 4)


@instruction("int64 " * 11)
def _multiply_block(
    builder, left, b_type, is_fresh, out, out_row, a, a_row, b, b_step, b_next, count
):
    is_fresh = builder.icmp_signed("!=", is_fresh, _word(0))
    operands = out, out_row, a, a_row, b, b_step, b_next, count

    def write_rows(num_rows):
        with builder.if_else(builder.icmp_signed("==", b_type, _word(TYPE_F16))) as cases:
            for case, kind in zip(cases, (_HALVES, FLOATS), strict=True):
                with case:
                    _write_block(builder, num_rows, kind, is_fresh, operands)

    by_rows(builder, left, (8, 6, 4, 1), write_rows)


@kernel
def multiply_kernel(args, ticket, thread, num_threads):
    """Not an operation: other kernels call it by address with the words that `multiply` writes."""
    num_rows, b_type, fresh = args[0], args[1], args[2]
    o, o_row, a, a_row = args[3], args[4], args[5], args[6]
    b, b_step, b_next, count = args[7], args[8], args[9], args[10]
    for row in range(0, num_rows, BLOCK_ROWS):
        left = num_rows - row
        _multiply_block(left, b_type, fresh, o, o_row, a, a_row, b, b_step, b_next, count)
        o += BLOCK_ROWS * o_row
        a += BLOCK_ROWS * a_row


@njit
def touched_rows(num_rows):
    """How many rows of out a product of num_rows rows overwrites."""
    rest = num_rows % BLOCK_ROWS
    return num_rows - rest + (8 if rest > 6 else 6 if rest > 4 else 4 if rest > 1 else rest)


@njit(inline="always")
def multiply(call, num_rows, b_type, is_fresh, out, out_row, a, a_row, b, b_step, b_next, count):
    """out[num_rows, 32] (+)= a[num_rows, count] x b[count, 32]; strides in bytes.

    b_step goes from k to k + 1, b_next from the first 16 columns to the others. With is_fresh out
    starts from zero. Rows are taken by 8, 6, 4 or 1: out and a must have room for a multiple of 8
    rows, and what lies behind the last row is overwritten (touched_rows). call: the kernel's
    address, then room for 11 words.
    """
    words = call + 8
    store_i64(words, num_rows)
    store_i64(words + 8, b_type)
    store_i64(words + 16, is_fresh)
    store_i64(words + 24, out)
    store_i64(words + 32, out_row)
    store_i64(words + 40, a)
    store_i64(words + 48, a_row)
    store_i64(words + 56, b)
    store_i64(words + 64, b_step)
    store_i64(words + 72, b_next)
    store_i64(words + 80, count)
    call_operation(load_i64(call), words, 0, 0, 0)


@instruction("int64 int64 int64 f32x16")
def scatter(builder, address, stride, type_word, value):
    """Lane i goes to address + i * stride, as the type that the word names; bytes go in pairs."""

    def write(kind):
        narrow = _narrow(builder, value, kind)
        if kind == _BYTES:
            narrow = builder.bitcast(narrow, ir.VectorType(I16, LANES // 2))
        for lane in range(narrow.type.count):
            element = builder.extract_element(narrow, ir.Constant(I32, lane))
            store_to(builder, element, step_by(builder, address, stride, lane), _ALIGN[kind])

    _by_type(builder, type_word, write)


@instruction("int64 int64 f32x16")
def store_as(builder, address, type_word, value):
    """Sixteen consecutive values of the type that the word names."""

    def write(kind):
        store_to(builder, _narrow(builder, value, kind), address, _ALIGN[kind])

    _by_type(builder, type_word, write)


@instruction("int64 int64 -> f32x16")
def load_as(builder, address, type_word):
    """Sixteen consecutive values of the type that the word names."""
    result = cgutils.alloca_once(builder, FLOATS)

    def read(kind):
        builder.store(_widen(builder, load_from(builder, address, kind, _ALIGN[kind])), result)

    _by_type(builder, type_word, read)
    return builder.load(result)


@instruction("int64 int64 int64")
def copy_element(builder, target, source, type_word):
    """One element of the type that the word names from address to address."""

    def copy(kind):
        element = ir.IntType(8 * _ALIGN[kind])
        value = load_from(builder, source, element, _ALIGN[kind])
        store_to(builder, value, target, _ALIGN[kind])

    _by_type(builder, type_word, copy)
