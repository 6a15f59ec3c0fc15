"""Bytes and words at an address, for compiled code: little-endian, any alignment."""

# ruff: noqa: ANN001, ANN201, ANN202  (numba inspects these signatures; types are numba's)
from llvmlite import ir

from draftree.kernels.cpu.jit import intrinsic, types
from draftree.kernels.cpu.simd import LANES, f32x16

_HALF, _FLOAT = ir.HalfType(), ir.FloatType()
_V8 = ir.VectorType(ir.IntType(8), LANES)
_VI32 = ir.VectorType(ir.IntType(32), LANES)
_V32 = ir.VectorType(_FLOAT, LANES)


def _loader(bits, is_signed):
    """A function that reads an integer of so many bits and widens it to int64."""

    @intrinsic
    def load_word(typingctx, address):
        def codegen(context, builder, signature, args):
            word, wide = ir.IntType(bits), ir.IntType(64)
            value = builder.load(builder.inttoptr(args[0], word.as_pointer()))
            value.align = 1
            if bits == 64:
                return value
            return builder.sext(value, wide) if is_signed else builder.zext(value, wide)

        return types.int64(types.int64), codegen

    return load_word


def _storer(bits):
    """A function that writes the low bits of an int64."""

    @intrinsic
    def store_word(typingctx, address, value):
        def codegen(context, builder, signature, args):
            word = ir.IntType(bits)
            value = args[1] if bits == 64 else builder.trunc(args[1], word)
            builder.store(value, builder.inttoptr(args[0], word.as_pointer())).align = 1
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return store_word


load_u8, load_s8 = _loader(8, False), _loader(8, True)
load_u16, load_u32, load_word = _loader(16, False), _loader(32, False), _loader(64, True)
store_u8, store_u16, store_u32, store_word = _storer(8), _storer(16), _storer(32), _storer(64)


@intrinsic
def load_f16(typingctx, address):
    """One float16, widened (exact)."""

    def codegen(context, builder, signature, args):
        value = builder.load(builder.inttoptr(args[0], _HALF.as_pointer()))
        value.align = 1
        return builder.fpext(value, _FLOAT)

    return types.float32(types.int64), codegen


@intrinsic
def load_byte_lanes(typingctx, address):
    """Sixteen consecutive unsigned bytes as float32 lanes."""

    def codegen(context, builder, signature, args):
        value = builder.load(builder.inttoptr(args[0], _V8.as_pointer()))
        value.align = 1
        return builder.sitofp(builder.zext(value, _VI32), _V32)

    return f32x16(types.int64), codegen


@intrinsic(prefer_literal=True)
def stack_bytes(typingctx, size):
    """The address of so many bytes (a constant) that live as long as the calling kernel."""

    def codegen(context, builder, signature, args):
        room = ir.ArrayType(ir.IntType(8), size.literal_value)
        with builder.goto_entry_block():
            block = builder.alloca(room)
        block.align = 64
        return builder.ptrtoint(block, ir.IntType(64))

    return types.int64(size), codegen
