"""Weights as the kernels want them: strips of rows side by side, made from the file's bytes.

In: raw rows, uint8 [rows, row_bytes]. Out: a Weight, that linear.py multiplies with.
"""

# ruff: noqa: ANN001, ANN202  (numba inspects the kernels' signatures; types are numba's)
from dataclasses import dataclass
from functools import cache

import numpy as np

from draftree.kernels import ops
from draftree.kernels.cpu.arena import Arena
from draftree.kernels.cpu.atomic import atomic_add
from draftree.kernels.cpu.dot import wants_signed_bytes
from draftree.kernels.cpu.embed import SCRATCH_BYTES, decode_block
from draftree.kernels.cpu.form import (
    ALL_FORMS,
    BF16,
    F16,
    F32,
    FLOAT_ROWS,
    Form,
    quant_bytes,
    scale_bytes,
    strip_bytes,
)
from draftree.kernels.cpu.isa import ALL_ISAS, Isa, current_isa
from draftree.kernels.cpu.jit import njit
from draftree.kernels.cpu.kernel import Kernel, kernel
from draftree.kernels.cpu.program import Program
from draftree.kernels.cpu.thread_pool import ThreadPool
from draftree.kernels.cpu.word import (
    load_u8,
    load_u16,
    load_u32,
    stack_bytes,
    store_u8,
    store_u16,
    store_u32,
    store_word,
)
from draftree.kernels.quant.block import unpack_quants, unpack_scales
from draftree.kernels.quant.formats import QuantType
from draftree.kernels.quant.layout import BlockLayout, block_layout

_NIBBLES, _PAIRS, _BITS = 0x0F0F0F0F, 0x03030303, 0x01010101
_FLOAT_TYPES = {QuantType.F32: F32, QuantType.F16: F16, QuantType.BF16: BF16}


@dataclass(frozen=True, slots=True)
class Weight(ops.Weight):
    """A packed matrix. Rows are padded with zeros to whole strips."""

    rows: int
    cols: int
    form: Form
    isa: Isa
    strip_rows: int
    data: np.ndarray  # uint8 [num_strips, strip_bytes], each strip on a cache line


@cache
def _pack_float_kernel(qtype: int) -> Kernel:
    """To float32. args: raw, its row bytes, rows, cols, strips, strip bytes, number of strips."""
    block_len, block_bytes = QuantType(qtype).block_len, QuantType(qtype).block_bytes

    @kernel
    def _pack_float(args, ticket, thread, num_threads):
        scratch, values = stack_bytes(SCRATCH_BYTES), stack_bytes(1024)
        strip = atomic_add(ticket, 1)
        while strip < args[6]:
            target = args[4] + strip * args[5]
            for i in range(args[3] // block_len):
                for lane in range(FLOAT_ROWS):
                    row = strip * FLOAT_ROWS + lane
                    cells = target + 4 * (i * block_len * FLOAT_ROWS + lane)
                    if row < args[2]:
                        source = args[0] + row * args[1] + i * block_bytes
                        decode_block(qtype, source, scratch, values)
                        for k in range(block_len):
                            store_u32(cells + 4 * FLOAT_ROWS * k, load_u32(values + 4 * k))
                    else:
                        for k in range(block_len):
                            store_u32(cells + 4 * FLOAT_ROWS * k, 0)
            strip = atomic_add(ticket, 1)

    return _pack_float


@kernel
def _pack_halves(args, ticket, thread, num_threads):
    """Transpose 16-bit weights as they are; args as above."""
    strip = atomic_add(ticket, 1)
    while strip < args[6]:
        target = args[4] + strip * args[5]
        for k in range(args[3]):
            for lane in range(FLOAT_ROWS):
                row = strip * FLOAT_ROWS + lane
                value = load_u16(args[0] + row * args[1] + 2 * k) if row < args[2] else 0
                store_u16(target + 2 * (k * FLOAT_ROWS + lane), value)
        strip = atomic_add(ticket, 1)


@njit(inline="always")
def _pack_group(bits, is_signed, q, target, unit):
    """32 integers of a row, bytes at q, to their places in a group with units of `unit` bytes."""
    if bits == 8:
        flip = 0x80808080 if is_signed else 0
        for i in range(8):
            store_u32(target + i * unit, load_u32(q + 4 * i) ^ flip)
        return
    for i in range(4):
        low, high = load_u32(q + 4 * i) & _NIBBLES, load_u32(q + 16 + 4 * i) & _NIBBLES
        store_u32(target + i * unit, low | (high << 4))
    if bits == 5:
        plane = 0
        for i in range(8):
            plane |= ((load_u32(q + 4 * i) >> 4) & _BITS) << i
        store_u32(target + 4 * unit, plane)
    if bits == 6:
        for half in range(2):
            plane = 0
            for i in range(4):
                plane |= ((load_u32(q + 16 * half + 4 * i) >> 4) & _PAIRS) << (2 * i)
            store_u32(target + (4 + half) * unit, plane)


@cache
def _pack_quant_kernel(qtype: int, form: int, isa: int) -> Kernel:
    """args: raw, its row bytes, rows, number of blocks in a row, strips, strip bytes, their number,
    bytes of the integers of a strip."""
    layout, packed, lanes = block_layout(QuantType(qtype)), ALL_FORMS[form], ALL_ISAS[isa].rows
    assert layout is not None
    bits, is_nested, has_min = packed.bits, packed.is_nested, packed.has_min
    scale_at, min_at, block_len = layout.scale_at, layout.min_at, layout.qtype.block_len
    block_bytes, num_groups = layout.qtype.block_bytes, block_len // layout.group_len
    is_signed = wants_signed_bytes(ALL_ISAS[isa])
    group_bytes, record_bytes = quant_bytes(packed, lanes, 32), scale_bytes(packed, lanes)
    small_at = 2 * lanes * (2 if has_min else 1)

    @kernel
    def _pack_quant(args, ticket, thread, num_threads):
        q = stack_bytes(512)
        small_scales, small_mins = q + 256, q + 288
        strip = atomic_add(ticket, 1)
        while strip < args[6]:
            target = args[4] + strip * args[5]
            for i in range(args[3]):
                groups = target + i * (block_len // 32) * group_bytes
                scales = target + args[7] + i * record_bytes
                for lane in range(lanes):
                    row = strip * lanes + lane
                    if row >= args[2]:
                        _clear(q, 512)
                        store_u16(scales + 2 * lane, 0)
                        if has_min:
                            store_u16(scales + 2 * (lanes + lane), 0)
                    else:
                        block = args[0] + row * args[1] + i * block_bytes
                        unpack_quants(qtype, block, q)
                        unpack_scales(qtype, block, small_scales, small_mins)
                        store_u16(scales + 2 * lane, load_u16(block + scale_at))
                        if has_min:
                            flip = 0x8000 if is_nested else 0
                            value = load_u16(block + min_at) ^ flip
                            store_u16(scales + 2 * (lanes + lane), value)
                    for j in range(block_len // 32):
                        unit = groups + j * group_bytes + 4 * lane
                        _pack_group(bits, is_signed, q + 32 * j, unit, 4 * lanes)
                    if is_nested:
                        for j in range(num_groups):
                            place = scales + small_at + j * lanes + lane
                            store_u8(place, load_u8(small_scales + j))
                            if has_min:
                                store_u8(place + num_groups * lanes, load_u8(small_mins + j))
            strip = atomic_add(ticket, 1)

    return _pack_quant


@njit(inline="always")
def _clear(address, count):
    for i in range(0, count, 8):
        store_word(address + i, 0)


def _pack_quants(
    raw: np.ndarray, layout: BlockLayout, isa: Isa, pool: ThreadPool, arena: Arena
) -> Weight:
    fields = (layout.bits, layout.group_len, layout.zero, layout.has_min, layout.is_nested)
    form, lanes, qtype = Form(*fields), isa.rows, layout.qtype
    rows, num_blocks = raw.shape[0], raw.shape[1] // qtype.block_bytes
    cols, num_strips = num_blocks * qtype.block_len, -(-rows // lanes)
    size = strip_bytes(form, lanes, cols)
    data = arena.take(num_strips * size).reshape(num_strips, size)
    packer = _pack_quant_kernel(int(qtype), ALL_FORMS.index(form), ALL_ISAS.index(isa))
    program = Program(pool)
    sizes = (data.shape[1], num_strips, quant_bytes(form, lanes, cols))
    program.add(packer, raw, raw.strides[0], rows, num_blocks, data, *sizes)
    program.run()
    return Weight(rows, cols, form, isa, lanes, data)


def _pack_floats(
    raw: np.ndarray, qtype: QuantType, form: Form, isa: Isa, pool: ThreadPool, arena: Arena
) -> Weight:
    rows, cols = raw.shape[0], raw.shape[1] // qtype.block_bytes * qtype.block_len
    num_strips = -(-rows // FLOAT_ROWS)
    size = strip_bytes(form, FLOAT_ROWS, cols)
    data = arena.take(num_strips * size).reshape(num_strips, size)
    packer = _pack_float_kernel(int(qtype)) if form == F32 else _pack_halves
    program = Program(pool)
    program.add(packer, raw, raw.strides[0], rows, cols, data, data.shape[1], num_strips)
    program.run()
    return Weight(rows, cols, form, isa, FLOAT_ROWS, data)


def pack(
    raw: np.ndarray,
    qtype: QuantType,
    *,
    exact: bool = False,
    isa: Isa | None = None,
    pool: ThreadPool | None = None,
    arena: Arena | None = None,
) -> Weight:
    """Lay raw rows out for the kernels of an instruction set; exact: decoded to float32.

    The pool's threads share the work; without one the caller does it alone. arena: where the
    weights of a model lie; without one they have a place of their own.
    """
    assert raw.dtype == np.uint8 and raw.ndim == 2 and raw.strides[1] == 1, "raw rows must be bytes"
    isa, pool, arena = isa or current_isa(), pool or ThreadPool(1), arena or Arena(0)
    layout = block_layout(qtype)
    if layout is not None and not exact:
        return _pack_quants(raw, layout, isa, pool, arena)
    return _pack_floats(raw, qtype, F32 if exact else _FLOAT_TYPES[qtype], isa, pool, arena)
