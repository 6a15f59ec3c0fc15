"""Bytes and words at an address, for compiled code: little-endian, any alignment."""

# ruff: noqa: ANN001, ANN201, ANN202  (numba inspects these signatures; types are numba's)
from llvmlite import ir

from draftree.kernels.cpu.instruction import (
    F32,
    FLOATS,
    I8,
    I64,
    INTEGERS,
    LANES,
    instruction,
    load_from,
    store_to,
)
from draftree.kernels.cpu.jit import intrinsic, types


def _loader(bits, is_signed):
    """A function that reads an integer of so many bits and widens it to int64."""

    @instruction("int64 -> int64")
    def load_word(builder, address):
        value = load_from(builder, address, ir.IntType(bits), 1)
        if bits == 64:
            return value
        return builder.sext(value, I64) if is_signed else builder.zext(value, I64)

    return load_word


def _storer(bits):
    """A function that writes the low bits of an int64."""

    @instruction("int64 int64")
    def store_word(builder, address, value):
        value = value if bits == 64 else builder.trunc(value, ir.IntType(bits))
        store_to(builder, value, address, 1)

    return store_word


load_u8, load_s8 = _loader(8, False), _loader(8, True)
load_u16, load_u32, load_word = _loader(16, False), _loader(32, False), _loader(64, True)
store_u8, store_u16, store_u32, store_word = _storer(8), _storer(16), _storer(32), _storer(64)


@instruction("int64 -> float32")
def load_f16(builder, address):
    """One float16, widened (exact)."""
    return builder.fpext(load_from(builder, address, ir.HalfType(), 1), F32)


@instruction("int64 -> f32x16")
def load_byte_lanes(builder, address):
    """Sixteen consecutive unsigned bytes as float32 lanes."""
    value = load_from(builder, address, ir.VectorType(I8, LANES), 1)
    return builder.sitofp(builder.zext(value, INTEGERS), FLOATS)


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
