"""The float tile: weights in float32, float16 or bfloat16, one fused float32 step per column.

Strip: for each column, the weights of sixteen rows side by side.
"""

# ruff: noqa: ANN001, ANN201, ANN202  (numba's and llvmlite's types)
from llvmlite import ir

from draftree.kernels.cpu.form import FLOAT_ROWS, LINE_BYTES
from draftree.kernels.cpu.instruction import F32, I8, I16, I32, I64, call, fused, load_from, spread
from draftree.kernels.cpu.jit import cgutils

_PREFETCH_BYTES = 4096  # a core's own prefetcher stops at the end of a page
_LANES = ir.VectorType(F32, FLOAT_ROWS)


def _load_weights(builder, form, address):
    element = F32 if form.bits == 32 else I16 if form.is_bfloat else ir.HalfType()
    vector = ir.VectorType(element, FLOAT_ROWS)
    value = load_from(builder, address, vector, form.bits // 8)
    if form.bits == 32:
        return value
    if not form.is_bfloat:
        return builder.fpext(value, _LANES)
    wide = ir.VectorType(I32, FLOAT_ROWS)
    shift = ir.Constant(wide, [16] * FLOAT_ROWS)
    return builder.bitcast(builder.shl(builder.zext(value, wide), shift), _LANES)


def prefetch(builder, pointer, num_bytes):
    """Ask for so many bytes that are read a little later, into the nearest cache."""
    read, keep, data = (ir.Constant(I32, value) for value in (0, 3, 1))
    for offset in range(0, num_bytes, LINE_BYTES):
        place = builder.gep(pointer, [ir.Constant(I64, offset)])
        call(builder, "llvm.prefetch.p0", ir.VoidType(), [place, read, keep, data])


def emit_float_tile(builder, form, tile, weights, x, x_stride, cols):
    """One vector of sums per token."""
    zeros = ir.Constant(_LANES, [0.0] * FLOAT_ROWS)
    sums = [cgutils.alloca_once_value(builder, zeros) for _ in range(tile)]
    rows = [builder.add(x, builder.mul(x_stride, ir.Constant(I64, i))) for i in range(tile)]
    step = ir.Constant(I64, FLOAT_ROWS * form.bits // 8)
    with cgutils.for_range(builder, cols, intp=I64) as loop:
        address = builder.add(weights, builder.mul(loop.index, step))
        later = builder.add(address, ir.Constant(I64, _PREFETCH_BYTES))
        prefetch(builder, builder.inttoptr(later, I8.as_pointer()), 1)
        values = _load_weights(builder, form, address)
        offset = builder.mul(loop.index, ir.Constant(I64, 4))
        for row, cell in zip(rows, sums, strict=True):
            scalar = load_from(builder, builder.add(row, offset), F32, 4)
            factor = spread(builder, scalar, FLOAT_ROWS)
            builder.store(fused(builder, values, factor, builder.load(cell)), cell)
    return [builder.load(cell) for cell in sums]
