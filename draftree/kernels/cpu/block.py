"""Small matrix products in registers, and moves of single lanes: the inside of attention.

out[r, 32 columns] (+)= sum over k of a[r, k] * b[k, 32 columns], summed in the order of k with one
rounding per term, so an element does not depend on how many rows share the block. b is float32 or
float16, which a word says: its elements have 4 >> word bytes.
"""

# ruff: noqa: ANN001, ANN002, ANN201, ANN202  (numba inspects these signatures; types are numba's)
from llvmlite import ir

from draftree.kernels.cpu.atomic import call_operation
from draftree.kernels.cpu.jit import cgutils, intrinsic, njit, types
from draftree.kernels.cpu.kernel import kernel
from draftree.kernels.cpu.simd import LANES, f32x16, load_i64, store_i64

BLOCK_ROWS = 8
CALL_WORDS = 16
TYPE_F32, TYPE_F16, TYPE_I8 = range(3)
_VECTORS = 2
BLOCK_COLS = _VECTORS * LANES
_F32, _F16 = ir.FloatType(), ir.HalfType()
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_V32, _V16 = ir.VectorType(_F32, LANES), ir.VectorType(_F16, LANES)
_V8, _VI32 = ir.VectorType(ir.IntType(8), LANES), ir.VectorType(_I32, LANES)
_ALIGN = {_V32: 4, _V16: 2, _V8: 1}


def _word(value):
    return ir.Constant(_I64, value)


def _load(builder, address, kind):
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = _ALIGN.get(kind, 4)
    return value


def _widen(builder, value):
    """To float32, exactly."""
    if value.type == _V16:
        return builder.fpext(value, _V32)
    return builder.sitofp(builder.sext(value, _VI32), _V32) if value.type == _V8 else value


def _narrow(builder, value, kind):
    """Rounded to nearest even; int8 must be in range."""
    if kind == _V16:
        return builder.fptrunc(value, _V16)
    if kind == _V8:
        function_type = ir.FunctionType(_V32, [_V32])
        name = "llvm.rint.v16f32"
        function = cgutils.get_or_insert_function(builder.module, function_type, name)
        return builder.trunc(builder.fptosi(builder.call(function, [value]), _VI32), _V8)
    return value


def _by_type(builder, word, write):
    """write(vector type) for the type that the word names."""
    with builder.if_else(builder.icmp_signed("==", word, _word(TYPE_F16))) as (half, other):
        with half:
            write(_V16)
        with other:
            is_bytes = builder.icmp_signed("==", word, _word(TYPE_I8))
            with builder.if_else(is_bytes) as (small, full):
                with small:
                    write(_V8)
                with full:
                    write(_V32)


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


def _store(builder, value, address):
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 4


def _at(builder, base, *terms):
    """base + the sum of stride * index."""
    for stride, index in terms:
        base = builder.add(base, builder.mul(stride, index))
    return base


def _fma(builder, a, b, c):
    function_type = ir.FunctionType(_V32, [_V32, _V32, _V32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.fma.v16f32")
    return builder.call(function, [a, b, c])


def _broadcast(builder, scalar):
    undefined = ir.Constant(_V32, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, undefined, zeros)


def _write_block(builder, num_rows, b_kind, is_fresh, operands):
    """num_rows x 2 vectors of sums stay in registers while k runs."""
    out, out_row, a, a_row, b, b_step, b_next, count = operands
    cells = [(r, n) for r in range(num_rows) for n in range(_VECTORS)]
    places, sums = {}, {}
    for r, n in cells:
        terms = (out_row, _word(r)), (_word(4 * LANES), _word(n))
        places[r, n] = _at(builder, out, *terms)
        sums[r, n] = cgutils.alloca_once(builder, _V32)
        zero = ir.Constant(_V32, [0.0] * LANES)
        before = _load(builder, places[r, n], _V32)
        builder.store(builder.select(is_fresh, zero, before), sums[r, n])
    with cgutils.for_range(builder, count) as loop:
        columns = []
        for n in range(_VECTORS):
            address = _at(builder, b, (b_step, loop.index), (b_next, _word(n)))
            columns.append(_widen(builder, _load(builder, address, b_kind)))
        for r in range(num_rows):
            address = _at(builder, a, (a_row, _word(r)), (_word(4), loop.index))
            factor = _broadcast(builder, _load(builder, address, _F32))
            for n in range(_VECTORS):
                total = _fma(builder, factor, columns[n], builder.load(sums[r, n]))
                builder.store(total, sums[r, n])
    for cell in cells:
        _store(builder, builder.load(sums[cell]), places[cell])


@intrinsic
def _multiply_block(
    typingctx, left, b_type, is_fresh, out, out_row, a, a_row, b, b_step, b_next, count
):
    def codegen(context, builder, signature, args):
        left, b_type, is_fresh = args[0], args[1], builder.icmp_signed("!=", args[2], _word(0))

        def write_rows(num_rows):
            with builder.if_else(builder.icmp_signed("==", b_type, _word(TYPE_F16))) as cases:
                for case, kind in zip(cases, (_V16, _V32), strict=True):
                    with case:
                        _write_block(builder, num_rows, kind, is_fresh, args[3:])

        by_rows(builder, left, (8, 6, 4, 1), write_rows)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), codegen


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


@intrinsic
def scatter(typingctx, address, stride, type_word, value):
    """Lane i goes to address + i * stride, as the type that the word names; bytes go in pairs."""

    def codegen(context, builder, signature, args):
        base, stride, type_word, value = args

        def write(kind):
            narrow = _narrow(builder, value, kind)
            if kind == _V8:
                narrow = builder.bitcast(narrow, ir.VectorType(ir.IntType(16), LANES // 2))
            for lane in range(narrow.type.count):
                element = builder.extract_element(narrow, ir.Constant(_I32, lane))
                place = _at(builder, base, (stride, _word(lane)))
                target = builder.inttoptr(place, element.type.as_pointer())
                builder.store(element, target).align = _ALIGN[kind]

        _by_type(builder, type_word, write)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, f32x16), codegen


@intrinsic
def store_as(typingctx, address, type_word, value):
    """Sixteen consecutive values of the type that the word names."""

    def codegen(context, builder, signature, args):
        address, type_word, value = args

        def write(kind):
            place = builder.inttoptr(address, kind.as_pointer())
            builder.store(_narrow(builder, value, kind), place).align = _ALIGN[kind]

        _by_type(builder, type_word, write)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, f32x16), codegen


@intrinsic
def load_as(typingctx, address, type_word):
    """Sixteen consecutive values of the type that the word names."""

    def codegen(context, builder, signature, args):
        result = cgutils.alloca_once(builder, _V32)

        def read(kind):
            builder.store(_widen(builder, _load(builder, args[0], kind)), result)

        _by_type(builder, args[1], read)
        return builder.load(result)

    return f32x16(types.int64, types.int64), codegen


@intrinsic
def copy_element(typingctx, target, source, type_word):
    """One element of the type that the word names from address to address."""

    def codegen(context, builder, signature, args):
        target, source, type_word = args

        def copy(kind):
            element = ir.IntType(8 * _ALIGN[kind])
            value = builder.load(builder.inttoptr(source, element.as_pointer()))
            value.align = _ALIGN[kind]
            place = builder.inttoptr(target, element.as_pointer())
            builder.store(value, place).align = _ALIGN[kind]

        _by_type(builder, type_word, copy)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen
