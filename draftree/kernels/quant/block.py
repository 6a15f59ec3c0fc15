"""Decoders of weight blocks for compiled code: integers out of raw bytes, eight at a time.

`unpack_quants` writes the q of a block as bytes in column order, `unpack_scales` the integer scale
and min of each group of a nested block. What they mean is in layout.py. The format is a
compile-time constant of the caller.
"""

# ruff: noqa: ANN001, ANN201, ANN202  (numba inspects these signatures; types are numba's)
from draftree.kernels.cpu.jit import njit, overload
from draftree.kernels.cpu.word import load_s8, load_u8, load_u16, load_word, store_u8, store_word
from draftree.kernels.quant.formats import QuantType

_NIBBLES = 0x0F0F0F0F0F0F0F0F
_PAIRS = 0x0303030303030303
_BITS = 0x0101010101010101
_STRIDE_7 = 0x00204081
# The sixteen levels of the non-linear 4-bit formats, plus 128.
_LEVELS = (1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241)


@njit(inline="always")
def _spread(bits):
    """Eight bits to eight bytes of 0 or 1, lowest bit first; no product may overflow."""
    return (((bits & 15) * _STRIDE_7) | (((bits >> 4) * _STRIDE_7) << 32)) & _BITS


@njit(inline="always")
def _nibble_block(source, q):
    """16 bytes: low nibbles are the first 16 weights, high nibbles the others."""
    for i in range(0, 16, 8):
        word = load_word(source + i)
        store_word(q + i, word & _NIBBLES)
        store_word(q + 16 + i, (word >> 4) & _NIBBLES)


@njit(inline="always")
def _nibble_block_with_fifth(source, high, q):
    _nibble_block(source, q)
    for i in range(4):
        fifth = _spread(load_u8(high + i)) << 4
        store_word(q + 8 * i, load_word(q + 8 * i) | fifth)


@njit(inline="always")
def _level_block(source, q):
    _nibble_block(source, q)
    for i in range(32):
        store_u8(q + i, _LEVELS[load_u8(q + i)])


def _q4_0(qtype, block, q):
    _nibble_block(block + 2, q)


def _q4_1(qtype, block, q):
    _nibble_block(block + 4, q)


def _q5_0(qtype, block, q):
    _nibble_block_with_fifth(block + 6, block + 2, q)


def _q5_1(qtype, block, q):
    _nibble_block_with_fifth(block + 8, block + 4, q)


def _q8_0(qtype, block, q):
    for i in range(0, 32, 8):
        store_word(q + i, load_word(block + 2 + i) ^ (-0x7F7F7F7F7F7F7F80))  # 0x80 in each byte


def _iq4_nl(qtype, block, q):
    _level_block(block + 2, q)


def _q2_k(qtype, block, q):
    for half in range(2):
        for shift in range(4):
            for i in range(0, 32, 8):
                word = load_word(block + 16 + 32 * half + i)
                store_word(q + 128 * half + 32 * shift + i, (word >> (2 * shift)) & _PAIRS)


def _q3_k(qtype, block, q):
    for half in range(2):
        for shift in range(4):
            for i in range(0, 32, 8):
                low = (load_word(block + 32 + 32 * half + i) >> (2 * shift)) & _PAIRS
                high = (load_word(block + i) >> (4 * half + shift)) & _BITS
                store_word(q + 128 * half + 32 * shift + i, low | (high << 2))


def _q4_k(qtype, block, q):
    for pair in range(4):
        for i in range(0, 32, 8):
            word = load_word(block + 16 + 32 * pair + i)
            store_word(q + 64 * pair + i, word & _NIBBLES)
            store_word(q + 64 * pair + 32 + i, (word >> 4) & _NIBBLES)


def _q5_k(qtype, block, q):
    for pair in range(4):
        for i in range(0, 32, 8):
            word = load_word(block + 48 + 32 * pair + i)
            high = load_word(block + 16 + i) >> (2 * pair)
            store_word(q + 64 * pair + i, (word & _NIBBLES) | ((high & _BITS) << 4))
            high = (high >> 1) & _BITS
            store_word(q + 64 * pair + 32 + i, ((word >> 4) & _NIBBLES) | (high << 4))


def _q6_k(qtype, block, q):
    for half in range(2):
        for part in range(4):
            for i in range(0, 32, 8):
                low = load_word(block + 64 * half + 32 * (part & 1) + i) >> (4 * (part >> 1))
                high = load_word(block + 128 + 32 * half + i) >> (2 * part)
                value = (low & _NIBBLES) | ((high & _PAIRS) << 4)
                store_word(q + 128 * half + 32 * part + i, value)


def _iq4_xs(qtype, block, q):
    for group in range(8):
        _level_block(block + 8 + 16 * group, q + 32 * group)


def _scales_q2_k(qtype, block, scales, mins):
    for group in range(16):
        byte = load_u8(block + group)
        store_u8(scales + group, byte & 15)
        store_u8(mins + group, byte >> 4)


def _scales_q3_k(qtype, block, scales, mins):
    for group in range(16):
        low = (load_u8(block + 96 + (group & 7)) >> (4 * (group >> 3))) & 15
        high = (load_u8(block + 104 + (group & 3)) >> (2 * (group >> 2))) & 3
        store_u8(scales + group, (low | (high << 4)) - 32)


def _scales_q4_k(qtype, block, scales, mins):
    for group in range(4):
        scale, least = load_u8(block + 4 + group), load_u8(block + 8 + group)
        last = load_u8(block + 12 + group)
        store_u8(scales + group, scale & 63)
        store_u8(mins + group, least & 63)
        store_u8(scales + 4 + group, (last & 15) | ((scale >> 6) << 4))
        store_u8(mins + 4 + group, (last >> 4) | ((least >> 6) << 4))


def _scales_q6_k(qtype, block, scales, mins):
    for group in range(16):
        store_u8(scales + group, load_s8(block + 192 + group))


def _scales_iq4_xs(qtype, block, scales, mins):
    high = load_u16(block + 2)
    for group in range(8):
        low = (load_u8(block + 4 + (group >> 1)) >> (4 * (group & 1))) & 15
        store_u8(scales + group, (low | (((high >> (2 * group)) & 3) << 4)) - 32)


def _scales_plain(qtype, block, scales, mins):
    pass


def unpack_quants(qtype, block, q):
    """Write the q of a block (its address) as bytes at the address q."""
    raise NotImplementedError


def unpack_scales(qtype, block, scales, mins):
    """Write the integer scales, and mins if any, of a nested block as signed bytes."""
    raise NotImplementedError


@overload(unpack_quants, prefer_literal=True)
def _unpack_quants(qtype, block, q):
    return {
        QuantType.Q4_0.value: _q4_0,
        QuantType.Q4_1.value: _q4_1,
        QuantType.Q5_0.value: _q5_0,
        QuantType.Q5_1.value: _q5_1,
        QuantType.Q8_0.value: _q8_0,
        QuantType.IQ4_NL.value: _iq4_nl,
        QuantType.Q2_K.value: _q2_k,
        QuantType.Q3_K.value: _q3_k,
        QuantType.Q4_K.value: _q4_k,
        QuantType.Q5_K.value: _q5_k,
        QuantType.Q6_K.value: _q6_k,
        QuantType.IQ4_XS.value: _iq4_xs,
    }[qtype.literal_value]


@overload(unpack_scales, prefer_literal=True)
def _unpack_scales(qtype, block, scales, mins):
    return {
        QuantType.Q2_K.value: _scales_q2_k,
        QuantType.Q3_K.value: _scales_q3_k,
        QuantType.Q4_K.value: _scales_q4_k,
        QuantType.Q5_K.value: _scales_q4_k,
        QuantType.Q6_K.value: _scales_q6_k,
        QuantType.IQ4_XS.value: _scales_iq4_xs,
    }.get(qtype.literal_value, _scales_plain)
