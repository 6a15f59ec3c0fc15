"""The float tile: weights in float32, float16 or bfloat16, one fused float32 step per column.

Strip: for each column, the weights of sixteen rows side by side.
"""

# ruff: noqa: ANN001, ANN201, ANN202  (numba's and llvmlite's types)
from llvmlite import ir

from draftree.kernels.cpu.form import FLOAT_ROWS, LINE_BYTES
from draftree.kernels.cpu.jit import cgutils

_PREFETCH_BYTES = 4096  # a core's own prefetcher stops at the end of a page
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = ir.FloatType()
_LANES = ir.VectorType(_F32, FLOAT_ROWS)


def _load_weights(builder, form, address):
    element = _F32 if form.bits == 32 else _I16 if form.is_bfloat else ir.HalfType()
    vector = ir.VectorType(element, FLOAT_ROWS)
    value = builder.load(builder.inttoptr(address, vector.as_pointer()))
    value.align = form.bits // 8
    if form.bits == 32:
        return value
    if not form.is_bfloat:
        return builder.fpext(value, _LANES)
    wide = ir.VectorType(_I32, FLOAT_ROWS)
    shift = ir.Constant(wide, [16] * FLOAT_ROWS)
    return builder.bitcast(builder.shl(builder.zext(value, wide), shift), _LANES)


def splat(builder, scalar, num_lanes):
    """The scalar in every lane."""
    vector = ir.VectorType(scalar.type, num_lanes)
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    mask = ir.Constant(ir.VectorType(_I32, num_lanes), [0] * num_lanes)
    return builder.shuffle_vector(first, undefined, mask)


def fused(builder, a, b, c):
    """a * b + c with one rounding."""
    name = f"llvm.fma.v{a.type.count}f32"
    signature = ir.FunctionType(a.type, [a.type] * 3)
    function = cgutils.get_or_insert_function(builder.module, signature, name)
    return builder.call(function, [a, b, c])


def prefetch(builder, pointer, num_bytes):
    """Ask for so many bytes that are read a little later, into the nearest cache."""
    read, keep, data = (ir.Constant(_I32, value) for value in (0, 3, 1))
    kinds = [pointer.type, _I32, _I32, _I32]
    signature = ir.FunctionType(ir.VoidType(), kinds)
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    for offset in range(0, num_bytes, LINE_BYTES):
        place = builder.gep(pointer, [ir.Constant(_I64, offset)])
        builder.call(function, [place, read, keep, data])


def emit_float_tile(builder, form, tile, weights, x, x_stride, cols):
    """One vector of sums per token."""
    zeros = ir.Constant(_LANES, [0.0] * FLOAT_ROWS)
    sums = [cgutils.alloca_once_value(builder, zeros) for _ in range(tile)]
    rows = [builder.add(x, builder.mul(x_stride, ir.Constant(_I64, i))) for i in range(tile)]
    step = ir.Constant(_I64, FLOAT_ROWS * form.bits // 8)
    with cgutils.for_range(builder, cols, intp=_I64) as loop:
        address = builder.add(weights, builder.mul(loop.index, step))
        later = builder.add(address, ir.Constant(_I64, _PREFETCH_BYTES))
        prefetch(builder, builder.inttoptr(later, _I8.as_pointer()), 1)
        values = _load_weights(builder, form, address)
        offset = builder.mul(loop.index, ir.Constant(_I64, 4))
        for row, cell in zip(rows, sums, strict=True):
            scalar = builder.load(builder.inttoptr(builder.add(row, offset), _F32.as_pointer()))
            scalar.align = 4
            product = fused(builder, values, splat(builder, scalar, FLOAT_ROWS), builder.load(cell))
            builder.store(product, cell)
    return [builder.load(cell) for cell in sums]
