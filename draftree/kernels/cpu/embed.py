"""The token embedding: rows of a weight file decoded to float32, straight from the mapped bytes.

Values are those of the plain decoder, bit for bit.
"""

# ruff: noqa: ANN001, ANN201, ANN202  (numba inspects the kernels' signatures; types are numba's)
from functools import cache

import numpy as np

from draftree.kernels.cpu.jit import overload
from draftree.kernels.cpu.kernel import Kernel, kernel
from draftree.kernels.cpu.pass_args import NUM_TOKENS, PassArgs
from draftree.kernels.cpu.program import Program
from draftree.kernels.cpu.simd import load_f32, load_i64, splat, store, store_f32
from draftree.kernels.cpu.word import (
    load_byte_lanes,
    load_f16,
    load_s8,
    load_u16,
    stack_bytes,
    store_u32,
)
from draftree.kernels.quant.block import unpack_quants, unpack_scales
from draftree.kernels.quant.formats import QuantType
from draftree.kernels.quant.layout import block_layout

SCRATCH_BYTES = 512  # 256 quants, 16 scales, 16 mins
_SCALES_AT, _MINS_AT = 256, 288


def decode_block(qtype, block, scratch, out):
    """Write the float32 values of one block; scratch is SCRATCH_BYTES of memory."""
    raise NotImplementedError


@overload(decode_block, prefer_literal=True)
def _decode_block(qtype, block, scratch, out):
    match QuantType(qtype.literal_value):
        case QuantType.F32:
            return _decode_f32
        case QuantType.F16:
            return _decode_f16
        case QuantType.BF16:
            return _decode_bf16
    layout = block_layout(QuantType(qtype.literal_value))
    assert layout is not None
    num_steps, per_group = layout.qtype.block_len // 16, layout.group_len // 16
    is_nested, has_min, zero = layout.is_nested, layout.has_min, layout.zero
    scale_at, min_at = layout.scale_at, layout.min_at

    def decode(qtype, block, scratch, out):
        unpack_quants(qtype, block, scratch)
        unpack_scales(qtype, block, scratch + _SCALES_AT, scratch + _MINS_AT)
        for i in range(num_steps):
            group = i // per_group
            scale = load_f16(block + scale_at)
            if is_nested:
                scale = scale * np.float32(load_s8(scratch + _SCALES_AT + group))
            value = splat(scale) * (load_byte_lanes(scratch + 16 * i) - splat(zero))
            if has_min:
                least = load_f16(block + min_at)
                if is_nested:
                    least = least * np.float32(load_s8(scratch + _MINS_AT + group))
                    value = value - splat(least)
                else:
                    value = value + splat(least)
            store(out + 64 * i, value)

    return decode


def _decode_f32(qtype, block, scratch, out):
    store_f32(out, load_f32(block))


def _decode_f16(qtype, block, scratch, out):
    store_f32(out, load_f16(block))


def _decode_bf16(qtype, block, scratch, out):
    store_u32(out, load_u16(block) << 16)


@cache
def _embed_kernel(qtype: int) -> Kernel:
    """args: control word, tokens, raw, raw row bytes, out, cols, vocabulary."""
    block_len, block_bytes = QuantType(qtype).block_len, QuantType(qtype).block_bytes

    @kernel
    def _embed(args, ticket, thread, num_threads):
        scratch = stack_bytes(SCRATCH_BYTES)
        for row in range(thread, load_i64(args[0]), num_threads):
            token = min(max(load_i64(args[1] + 8 * row), 0), args[6] - 1)
            source = args[2] + token * args[3]
            target = args[4] + 4 * row * args[5]
            for i in range(args[5] // block_len):
                decode_block(qtype, source + i * block_bytes, scratch, target + 4 * i * block_len)

    return _embed


def record_embed(
    program: Program,
    step: PassArgs,
    raw: np.ndarray,
    qtype: QuantType,
    tokens: np.ndarray,
    out: np.ndarray,
) -> None:
    """out[i] = decoded raw[tokens[i]]: uint8 [vocab, row_bytes] to float32 [max_tokens, cols]."""
    vocab_size, row_bytes = raw.shape
    cols = row_bytes // qtype.block_bytes * qtype.block_len
    assert raw.dtype == np.uint8 and raw.strides[1] == 1, "raw rows must be contiguous bytes"
    assert out.dtype == np.float32 and out.flags.c_contiguous and out.shape[1] == cols
    assert tokens.dtype == np.int64
    words = (step.control[NUM_TOKENS:], tokens, raw, raw.strides[0], out, cols, vocab_size)
    program.add(_embed_kernel(int(qtype)), *words, reads=(tokens,), writes=(out,))
