"""Sixteen float32 lanes as a numba value, so that kernels written in Python say exactly what is
computed.

Addresses are int64 byte addresses. No fast-math anywhere: the compiler may neither reorder nor
contract, so a lane's result depends on its inputs alone, on every call site and for every batch
size. LLVM splits the sixteen lanes into whatever registers the machine has.
"""

# ruff: noqa: ANN001, ANN201, ANN202, ANN204  (numba inspects these signatures; types are numba's)
import operator

from llvmlite import ir

from draftree.kernels.cpu.jit import Deferred, cgutils, intrinsic, njit, types

LANES = 16
_F32 = ir.FloatType()
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_V32 = ir.VectorType(_F32, LANES)
_VI32 = ir.VectorType(_I32, LANES)
_V16 = ir.VectorType(_I16, LANES)


def _lanes_type():
    """Sixteen lanes as a type of numba's, whose operators mean one instruction each."""
    from numba.core.datamodel import models
    from numba.core.datamodel.registry import register_default
    from numba.core.imputils import lower_builtin
    from numba.core.typing.templates import ConcreteTemplate, infer_global

    class Lanes(types.Type):
        def __init__(self):
            super().__init__(name="f32x16")

    @register_default(Lanes)
    class LanesModel(models.PrimitiveModel):
        def __init__(self, dmm, fe_type):
            super().__init__(dmm, fe_type, _V32)

    lanes = Lanes()

    def register(operation, name):
        @infer_global(operation)
        class LanesOperator(ConcreteTemplate):
            cases = (lanes(lanes, lanes),)

        @lower_builtin(operation, lanes, lanes)
        def lower(context, builder, signature, args):
            return getattr(builder, name)(args[0], args[1])

    register(operator.add, "fadd")
    register(operator.sub, "fsub")
    register(operator.mul, "fmul")
    register(operator.truediv, "fdiv")
    return lanes


f32x16 = Deferred(_lanes_type)


def _pointer(builder, address, element, align=4):
    return builder.inttoptr(address, element.as_pointer())


def _splat(builder, scalar, vector_type):
    undefined = ir.Constant(vector_type, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    mask = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, undefined, mask)


def _call(builder, name, result, args):
    function_type = ir.FunctionType(result, [a.type for a in args])
    function = cgutils.get_or_insert_function(builder.module, function_type, name)
    return builder.call(function, args)


@intrinsic
def load(typingctx, address):
    """Sixteen consecutive float32."""

    def codegen(context, builder, signature, args):
        value = builder.load(_pointer(builder, args[0], _V32))
        value.align = 4
        return value

    return f32x16(types.int64), codegen


@intrinsic
def store(typingctx, address, value):
    def codegen(context, builder, signature, args):
        builder.store(args[1], _pointer(builder, args[0], _V32)).align = 4
        return context.get_dummy_value()

    return types.void(types.int64, f32x16), codegen


@intrinsic
def splat(typingctx, scalar):
    """The scalar (rounded to float32) in every lane."""

    def codegen(context, builder, signature, args):
        return _splat(builder, args[0], _V32)

    return f32x16(types.float32), codegen


@intrinsic
def load_splat(typingctx, address):
    """One float32 from memory in every lane."""

    def codegen(context, builder, signature, args):
        value = builder.load(_pointer(builder, args[0], _F32))
        value.align = 4
        return _splat(builder, value, _V32)

    return f32x16(types.int64), codegen


@intrinsic
def load_f32(typingctx, address):
    def codegen(context, builder, signature, args):
        value = builder.load(_pointer(builder, args[0], _F32))
        value.align = 4
        return value

    return types.float32(types.int64), codegen


@intrinsic
def store_f32(typingctx, address, value):
    def codegen(context, builder, signature, args):
        builder.store(args[1], _pointer(builder, args[0], _F32)).align = 4
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


@intrinsic
def load_i64(typingctx, address):
    def codegen(context, builder, signature, args):
        return builder.load(_pointer(builder, args[0], ir.IntType(64)))

    return types.int64(types.int64), codegen


@intrinsic
def store_i64(typingctx, address, value):
    def codegen(context, builder, signature, args):
        builder.store(args[1], _pointer(builder, args[0], ir.IntType(64)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _below(builder, count):
    """A mask of the lanes below count."""
    limit = _splat(builder, builder.trunc(count, _I32), _VI32)
    return builder.icmp_signed("<", ir.Constant(_VI32, list(range(LANES))), limit)


@intrinsic
def load_first(typingctx, address, count):
    """The first count (at most 16) float32, zeros after them; touches no memory beyond."""

    def codegen(context, builder, signature, args):
        operands = [_pointer(builder, args[0], _V32), ir.Constant(_I32, 4)]
        operands += [_below(builder, args[1]), ir.Constant(_V32, [0.0] * LANES)]
        return _call(builder, "llvm.masked.load.v16f32.p0", _V32, operands)

    return f32x16(types.int64, types.int64), codegen


@intrinsic
def store_first(typingctx, address, count, value):
    """Store the first count lanes only."""

    def codegen(context, builder, signature, args):
        pointer = _pointer(builder, args[0], _V32)
        operands = [args[2], pointer, ir.Constant(_I32, 4), _below(builder, args[1])]
        _call(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), operands)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, f32x16), codegen


@intrinsic
def blend(typingctx, a, b, count):
    """Lanes below count from a, the others from b."""

    def codegen(context, builder, signature, args):
        return builder.select(_below(builder, args[2]), args[0], args[1])

    return f32x16(f32x16, f32x16, types.int64), codegen


def _shuffle(doc, indices):
    """Pick sixteen of the 32 lanes of two values."""

    @intrinsic
    def op(typingctx, a, b):
        def codegen(context, builder, signature, args):
            return builder.shuffle_vector(args[0], args[1], ir.Constant(_VI32, indices))

        return f32x16(f32x16, f32x16), codegen

    op.__doc__ = doc
    return op


even_lanes = _shuffle("Lanes 0, 2, 4 ... of both.", list(range(0, 32, 2)))
odd_lanes = _shuffle("Lanes 1, 3, 5 ... of both.", list(range(1, 32, 2)))
zip_low = _shuffle("a0 b0 a1 b1 ... of the lower halves.", [i // 2 + i % 2 * 16 for i in range(16)])
zip_high = _shuffle("The same of the upper halves.", [8 + i // 2 + i % 2 * 16 for i in range(16)])


@intrinsic
def bits_to_float(typingctx, bits):
    """A float64 that travels as an int64 argument of an operation."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """a * b + c with one rounding."""

    def codegen(context, builder, signature, args):
        return _call(builder, "llvm.fma.v16f32", _V32, list(args))

    return f32x16(f32x16, f32x16, f32x16), codegen


@intrinsic
def maximum(typingctx, a, b):
    def codegen(context, builder, signature, args):
        greater = builder.fcmp_ordered(">", args[0], args[1])
        return builder.select(greater, args[0], args[1])

    return f32x16(f32x16, f32x16), codegen


def _fold(builder, value, combine):
    """Combine the lanes pairwise in a fixed order: 0+8, 1+9 ..., then halves again."""
    width = LANES
    while width > 1:
        width //= 2
        undefined = ir.Constant(value.type, ir.Undefined)
        index = ir.VectorType(_I32, width)
        low = builder.shuffle_vector(value, undefined, ir.Constant(index, list(range(width))))
        high_lanes = list(range(width, 2 * width))
        high = builder.shuffle_vector(value, undefined, ir.Constant(index, high_lanes))
        value = combine(low, high)
    return builder.extract_element(value, ir.Constant(_I32, 0))


@intrinsic
def sum_lanes(typingctx, value):
    def codegen(context, builder, signature, args):
        return _fold(builder, args[0], builder.fadd)

    return types.float32(f32x16), codegen


@intrinsic
def max_lanes(typingctx, value):
    def codegen(context, builder, signature, args):
        def larger(a, b):
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        return _fold(builder, args[0], larger)

    return types.float32(f32x16), codegen


@intrinsic
def absolute(typingctx, value):
    def codegen(context, builder, signature, args):
        return _call(builder, "llvm.fabs.v16f32", _V32, list(args))

    return f32x16(f32x16), codegen


@intrinsic
def exp(typingctx, value):
    """e^x, relative error below 2e-7; arguments are clamped to [-87, 88]."""

    def codegen(context, builder, signature, args):
        def const(x):
            return ir.Constant(_V32, [x] * LANES)

        def fused(a, b, c):
            return _call(builder, "llvm.fma.v16f32", _V32, [a, b, c])

        x = args[0]
        x = builder.select(builder.fcmp_ordered("<", x, const(88.0)), x, const(88.0))
        x = builder.select(builder.fcmp_ordered(">", x, const(-87.0)), x, const(-87.0))
        n = _call(builder, "llvm.rint.v16f32", _V32, [builder.fmul(x, const(1.4426950408889634))])
        r = fused(n, const(-0.693145751953125), x)  # ln 2 in two parts keeps r exact
        r = fused(n, const(-1.428606820309417e-06), r)
        polynomial = const(1.0 / 5040.0)
        for divisor in (720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0):
            polynomial = fused(polynomial, r, const(1.0 / divisor))
        exponent = builder.add(builder.fptosi(n, _VI32), ir.Constant(_VI32, [127] * LANES))
        power = builder.shl(exponent, ir.Constant(_VI32, [23] * LANES))
        return builder.fmul(polynomial, builder.bitcast(power, _V32))

    return f32x16(f32x16), codegen


@njit(inline="always")
def sigmoid(x):
    one = splat(1.0)
    return one / (one + exp(splat(0.0) - x))


@njit(inline="always")
def silu(x):
    return x * sigmoid(x)
