"""Small matrix products in registers, and moves of single lanes: the inside of attention.

out[r, 32 columns] (+)= sum over k of a[r, k] * b[k, 32 columns], summed in the order of k with one rounding per term,
so an element does not depend on how many rows share the block. b is float32 or float16.
"""

# ruff: noqa: ANN001, ANN201, ANN202  (numba inspects these signatures; types are numba's)
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from draftree.kernels.cpu.simd import LANES, f32x16

BLOCK_ROWS = 8
_VECTORS = 2
BLOCK_COLS = _VECTORS * LANES
_F32, _F16 = ir.FloatType(), ir.HalfType()
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_V32, _V16 = ir.VectorType(_F32, LANES), ir.VectorType(_F16, LANES)


def _word(value):
    return ir.Constant(_I64, value)


def _load(builder, address, kind):
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = 2 if kind is _V16 else 4
    return value


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
            value = _load(builder, address, b_kind)
            columns.append(builder.fpext(value, _V32) if b_kind is _V16 else value)
        for r in range(num_rows):
            address = _at(builder, a, (a_row, _word(r)), (_word(4), loop.index))
            factor = _broadcast(builder, _load(builder, address, _F32))
            for n in range(_VECTORS):
                total = _fma(builder, factor, columns[n], builder.load(sums[r, n]))
                builder.store(total, sums[r, n])
    for cell in cells:
        _store(builder, builder.load(sums[cell]), places[cell])


def _write_multiply(builder, args):
    num_rows, is_half, is_fresh, out, out_row, a, a_row, *rest = args
    is_half = builder.icmp_signed("!=", is_half, _word(0))
    is_fresh = builder.icmp_signed("!=", is_fresh, _word(0))

    def blocks(b_kind):
        with cgutils.for_range_slice(
            builder, _word(0), num_rows, _word(BLOCK_ROWS), inc=True
        ) as (row, _):
            left = builder.sub(num_rows, row)
            p_out, p_a = _at(builder, out, (out_row, row)), _at(builder, a, (a_row, row))
            operands = (p_out, out_row, p_a, a_row, *rest)
            with builder.if_else(builder.icmp_signed(">", left, _word(4))) as (many, few):
                with many:
                    _write_block(builder, 8, b_kind, is_fresh, operands)
                with few, builder.if_else(builder.icmp_signed(">", left, _word(1))) as (some, one):
                    with some:
                        _write_block(builder, 4, b_kind, is_fresh, operands)
                    with one:
                        _write_block(builder, 1, b_kind, is_fresh, operands)

    with builder.if_else(is_half) as (half, full):
        with half:
            blocks(_V16)
        with full:
            blocks(_V32)
    builder.ret_void()


@intrinsic
def multiply(
    typingctx, num_rows, is_half, is_fresh, out, out_row, a, a_row, b, b_step, b_next, count
):
    """out[num_rows, 32] (+)= a[num_rows, count] x b[count, 32]; strides in bytes.

    b_step goes from k to k + 1, b_next from the first 16 columns to the others; b is float16 if is_half. With is_fresh
    out starts from zero. Rows are taken by 8, 4 or 1: out and a must have room for a multiple of 8 rows, and unless
    num_rows is 1 what lies behind the last row is overwritten.
    """

    def codegen(context, builder, signature, args):
        function_type = ir.FunctionType(ir.VoidType(), [_I64] * 11)
        name = "draftree_multiply"
        function = cgutils.get_or_insert_function(builder.module, function_type, name)
        if function.is_declaration:
            function.linkage = "linkonce_odr"
            function.attributes.add("noinline")  # one copy, however many callers
            write = ir.IRBuilder(function.append_basic_block())
            _write_multiply(write, function.args)
        builder.call(function, args)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), codegen


@intrinsic
def scatter(typingctx, address, stride, is_half, value):
    """Lane i goes to address + i * stride, as float32 or rounded to float16."""

    def codegen(context, builder, signature, args):
        base, stride, is_half, value = args

        def write(value, size):
            for lane in range(LANES):
                element = builder.extract_element(value, ir.Constant(_I32, lane))
                place = _at(builder, base, (stride, _word(lane)))
                target = builder.inttoptr(place, element.type.as_pointer())
                builder.store(element, target).align = size

        with builder.if_else(builder.icmp_signed("!=", is_half, _word(0))) as (half, full):
            with half:
                write(builder.fptrunc(value, _V16), 2)
            with full:
                write(value, 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, f32x16), codegen


@intrinsic
def copy_element(typingctx, target, source, is_half):
    """One float32 or float16 from address to address."""

    def codegen(context, builder, signature, args):
        target, source, is_half = args

        def copy(kind, size):
            value = builder.load(builder.inttoptr(source, kind.as_pointer()))
            value.align = size
            builder.store(value, builder.inttoptr(target, kind.as_pointer())).align = size

        with builder.if_else(builder.icmp_signed("!=", is_half, _word(0))) as (half, full):
            with half:
                copy(ir.IntType(16), 2)
            with full:
                copy(_I32, 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen
