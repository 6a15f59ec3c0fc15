"""One tile of a matrix product: a strip of weight rows times a few tokens, as LLVM code.

Lanes are weight rows; a token's result is a chain of operations over the columns that does not
depend on the other tokens of the tile. Here the sums end (bias, adding to what is there); the
products are in floating.py, dot.py, neon.py and amx.py.
"""

# ruff: noqa: ANN001, ANN002, ANN201, ANN202  (numba inspects these signatures; types are numba's)
from llvmlite import ir

from draftree.kernels.cpu.amx import emit_amx_tile, emit_begin, emit_end
from draftree.kernels.cpu.dot import emit_dot_tile
from draftree.kernels.cpu.floating import emit_float_tile
from draftree.kernels.cpu.form import ALL_FORMS
from draftree.kernels.cpu.instruction import F32, I64, load_from, step_by, store_to
from draftree.kernels.cpu.isa import ALL_ISAS, AMX, NEON
from draftree.kernels.cpu.jit import cgutils, intrinsic, types
from draftree.kernels.cpu.neon import emit_neon_tile

LARGEST_TILE = 8  # more sums than this do not fit the registers


def emit_integer_tile(builder, form, isa, tile, *places):
    """One vector of sums per token; places as for_groups has them."""
    if isa in NEON:
        return emit_neon_tile(builder, form, isa, tile, *places)
    return emit_dot_tile(builder, form, isa, tile, *places)


def _finish(builder, sums, out, out_stride, bias, accumulate):
    """out[token] = (out[token] if accumulate) + (sum + bias)."""
    vector = sums[0].type
    zero = ir.Constant(I64, 0)
    cells = [cgutils.alloca_once_value(builder, value) for value in sums]
    with builder.if_then(builder.icmp_signed("!=", bias, zero)):
        offsets = load_from(builder, bias, vector, 4)
        for cell in cells:
            builder.store(builder.fadd(builder.load(cell), offsets), cell)
    targets = [step_by(builder, out, out_stride, token) for token in range(len(sums))]
    with builder.if_then(builder.icmp_signed("!=", accumulate, zero)):
        for cell, target in zip(cells, targets, strict=True):
            before = load_from(builder, target, vector, 4)
            builder.store(builder.fadd(before, builder.load(cell)), cell)
    for cell, target in zip(cells, targets, strict=True):
        store_to(builder, builder.load(cell), target, 4)


@intrinsic(prefer_literal=True)
def multiply_tile(
    typingctx, form, isa, tile, strip, later, x, x_stride, cols, out, out_stride, bias, add
):
    """Multiply a strip with `tile` rows of x, at most LARGEST_TILE.

    form and isa (their places in ALL_FORMS, ALL_ISAS) are constants. All else is int64:
    addresses, strides in bytes, the number of columns, a flag. bias 0 means none. later: a strip
    that will be wanted soon.
    """

    def codegen(context, builder, signature, args):
        strip, later, x, x_stride, cols, out, out_stride, bias, add = args[3:]
        kind, variant = ALL_FORMS[form.literal_value], ALL_ISAS[isa.literal_value]
        done = builder.append_basic_block()
        by_tile = builder.switch(args[2], done)
        for num_tokens in range(1, LARGEST_TILE + 1):
            block = builder.append_basic_block()
            by_tile.add_case(ir.Constant(I64, num_tokens), block)
            builder.position_at_end(block)
            if kind.is_float:
                sums = emit_float_tile(builder, kind, num_tokens, strip, x, x_stride, cols)
            else:
                sums = emit_integer_tile(
                    builder, kind, variant, num_tokens, strip, later, x, x_stride, cols
                )
            _finish(builder, sums, out, out_stride, bias, add)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(form, isa, *[types.int64] * 10), codegen


@intrinsic(prefer_literal=True)
def begin_tiles(typingctx, form, isa, num_tokens):
    """Before the first tile: set the matrix registers up, where the instruction set has them."""

    def codegen(context, builder, signature, args):
        kind = ALL_FORMS[form.literal_value]
        if ALL_ISAS[isa.literal_value] == AMX and not kind.is_float:
            emit_begin(builder, kind, args[2])
        return context.get_dummy_value()

    return types.void(form, isa, types.int64), codegen


@intrinsic(prefer_literal=True)
def end_tiles(typingctx, form, isa):
    """After the last tile: let the matrix registers go."""

    def codegen(context, builder, signature, args):
        kind = ALL_FORMS[form.literal_value]
        if ALL_ISAS[isa.literal_value] == AMX and not kind.is_float:
            emit_end(builder)
        return context.get_dummy_value()

    return types.void(form, isa), codegen


@intrinsic(prefer_literal=True)
def multiply_matrix(
    typingctx, form, num_tokens, strip, later, x, x_stride, cols, out, out_stride, bias, add
):
    """As multiply_tile, on matrix registers, for any number of tokens up to AMX_TOKENS."""

    def codegen(context, builder, signature, args):
        num_tokens, strip, later, x, x_stride, cols, out, out_stride, bias, add = args[1:]
        kind = ALL_FORMS[form.literal_value]
        if kind.is_float:
            return context.get_dummy_value()
        sums = emit_amx_tile(builder, kind, num_tokens, strip, later, x, x_stride, cols)
        vector = ir.VectorType(F32, AMX.rows)
        with cgutils.for_range(builder, num_tokens, intp=I64) as loop:
            offset = builder.mul(loop.index, ir.Constant(I64, 4 * AMX.rows))
            total = load_from(builder, builder.add(sums, offset), vector, 64)
            target = builder.add(out, builder.mul(out_stride, loop.index))
            _finish(builder, [total], target, out_stride, bias, add)
        return context.get_dummy_value()

    return types.void(form, *[types.int64] * 10), codegen
