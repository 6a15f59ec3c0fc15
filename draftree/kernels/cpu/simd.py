"""Sixteen float32 lanes and what can be done with them, so that kernels written in Python say
exactly what is computed.

Addresses are int64 byte addresses. A lane's result depends on its inputs alone, on every call site
and for every batch size.
"""

# ruff: noqa: ANN001, ANN201, ANN202  (numba inspects these signatures; types are numba's)
from llvmlite import ir

from draftree.kernels.cpu.instruction import (
    F32,
    FLOATS,
    I32,
    I64,
    INTEGERS,
    LANES,
    call,
    fused,
    instruction,
    load_from,
    shuffle,
    spread,
    store_to,
)
from draftree.kernels.cpu.jit import njit


@instruction("int64 -> f32x16")
def load(builder, address):
    """Sixteen consecutive float32."""
    return load_from(builder, address, FLOATS, 4)


@instruction("int64 f32x16")
def store(builder, address, value):
    store_to(builder, value, address, 4)


@instruction("float32 -> f32x16")
def splat(builder, scalar):
    """The scalar (rounded to float32) in every lane."""
    return spread(builder, scalar, LANES)


@instruction("int64 -> f32x16")
def load_splat(builder, address):
    """One float32 from memory in every lane."""
    return spread(builder, load_from(builder, address, F32, 4), LANES)


@instruction("int64 -> float32")
def load_f32(builder, address):
    return load_from(builder, address, F32, 4)


@instruction("int64 float32")
def store_f32(builder, address, value):
    store_to(builder, value, address, 4)


@instruction("int64 -> int64")
def load_i64(builder, address):
    return load_from(builder, address, I64, 8)


@instruction("int64 int64")
def store_i64(builder, address, value):
    store_to(builder, value, address, 8)


def _below(builder, count):
    """A mask of the lanes below count."""
    limit = spread(builder, builder.trunc(count, I32), LANES)
    return builder.icmp_signed("<", ir.Constant(INTEGERS, list(range(LANES))), limit)


@instruction("int64 int64 -> f32x16")
def load_first(builder, address, count):
    """The first count (at most 16) float32, zeros after them; touches no memory beyond."""
    operands = [builder.inttoptr(address, FLOATS.as_pointer()), ir.Constant(I32, 4)]
    operands += [_below(builder, count), ir.Constant(FLOATS, [0.0] * LANES)]
    return call(builder, "llvm.masked.load.v16f32.p0", FLOATS, operands)


@instruction("int64 int64 f32x16")
def store_first(builder, address, count, value):
    """Store the first count lanes only."""
    pointer = builder.inttoptr(address, FLOATS.as_pointer())
    operands = [value, pointer, ir.Constant(I32, 4), _below(builder, count)]
    call(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), operands)


@instruction("f32x16 f32x16 int64 -> f32x16")
def blend(builder, a, b, count):
    """Lanes below count from a, the others from b."""
    return builder.select(_below(builder, count), a, b)


@instruction("f32x16 f32x16 -> f32x16")
def even_lanes(builder, a, b):
    """Lanes 0, 2, 4 ... of both."""
    return shuffle(builder, (a, b), range(0, 32, 2))


@instruction("f32x16 f32x16 -> f32x16")
def odd_lanes(builder, a, b):
    """Lanes 1, 3, 5 ... of both."""
    return shuffle(builder, (a, b), range(1, 32, 2))


@instruction("f32x16 f32x16 -> f32x16")
def zip_low(builder, a, b):
    """a0 b0 a1 b1 ... of the lower halves."""
    return shuffle(builder, (a, b), [i // 2 + i % 2 * 16 for i in range(16)])


@instruction("f32x16 f32x16 -> f32x16")
def zip_high(builder, a, b):
    """The same of the upper halves."""
    return shuffle(builder, (a, b), [8 + i // 2 + i % 2 * 16 for i in range(16)])


@instruction("int64 -> float64")
def bits_to_float(builder, bits):
    """A float64 that travels as an int64 argument of an operation."""
    return builder.bitcast(bits, ir.DoubleType())


@instruction("f32x16 f32x16 f32x16 -> f32x16")
def fma(builder, a, b, c):
    """a * b + c with one rounding."""
    return fused(builder, a, b, c)


def _larger(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@instruction("f32x16 f32x16 -> f32x16")
def maximum(builder, a, b):
    return _larger(builder, a, b)


def _fold(builder, value, combine):
    """Combine the lanes pairwise in a fixed order: 0+8, 1+9 ..., then halves again."""
    width = LANES
    while width > 1:
        width //= 2
        pair = value, ir.Constant(value.type, ir.Undefined)
        low, high = (shuffle(builder, pair, range(i, i + width)) for i in (0, width))
        value = combine(low, high)
    return builder.extract_element(value, ir.Constant(I32, 0))


@instruction("f32x16 -> float32")
def sum_lanes(builder, value):
    return _fold(builder, value, builder.fadd)


@instruction("f32x16 -> float32")
def max_lanes(builder, value):
    return _fold(builder, value, lambda a, b: _larger(builder, a, b))


@instruction("f32x16 -> f32x16")
def absolute(builder, value):
    return call(builder, "llvm.fabs.v16f32", FLOATS, [value])


@instruction("f32x16 -> f32x16")
def exp(builder, x):
    """e^x, relative error below 2e-7; arguments are clamped to [-87, 88]."""

    def const(value):
        return ir.Constant(FLOATS, [value] * LANES)

    x = builder.select(builder.fcmp_ordered("<", x, const(88.0)), x, const(88.0))
    x = builder.select(builder.fcmp_ordered(">", x, const(-87.0)), x, const(-87.0))
    n = call(builder, "llvm.rint.v16f32", FLOATS, [builder.fmul(x, const(1.4426950408889634))])
    r = fused(builder, n, const(-0.693145751953125), x)  # ln 2 in two parts keeps r exact
    r = fused(builder, n, const(-1.428606820309417e-06), r)
    polynomial = const(1.0 / 5040.0)
    for divisor in (720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0):
        polynomial = fused(builder, polynomial, r, const(1.0 / divisor))
    exponent = builder.add(builder.fptosi(n, INTEGERS), ir.Constant(INTEGERS, [127] * LANES))
    power = builder.shl(exponent, ir.Constant(INTEGERS, [23] * LANES))
    return builder.fmul(polynomial, builder.bitcast(power, FLOATS))


@njit(inline="always")
def sigmoid(x):
    one = splat(1.0)
    return one / (one + exp(splat(0.0) - x))


@njit(inline="always")
def silu(x):
    return x * sigmoid(x)
