"""The integer tile on matrix registers (x86 AMX): up to 16 tokens times a strip of 16 rows.

The same packed weights and the same sums in the same order as dot.py, so the same bits; only the
exact integer products of a group come from one matrix instruction instead of eight dot products
a token.
"""

# ruff: noqa: ANN001, ANN201, ANN202  (numba's and llvmlite's types)
import struct

from llvmlite import ir

from draftree.kernels.cpu.dot import (
    add_products,
    load_at,
    load_scales,
    offset_by,
    prefetch_group,
    to_pointer,
    unpack_units,
)
from draftree.kernels.cpu.form import GROUP_COLS, quant_bytes
from draftree.kernels.cpu.instruction import FLOATS, I8, I64, INTEGERS, LANES, call
from draftree.kernels.cpu.isa import AMX
from draftree.kernels.cpu.jit import cgutils
from draftree.kernels.cpu.quantize import RECORD_BYTES

AMX_TOKENS = 16  # of the largest tile; the last tile of a larger pass reads as many rows of x
_CHUNK = 4  # groups that go through memory together: unpacked, multiplied, added
_TOKENS_AT_ONCE = 4
_UNIT_BYTES, _LINE = 8 * 64, 64
# Matrix registers, in pairs so that one can be filled while the other works.
_SUMS, _ACTIVATIONS, _WEIGHTS = (0, 1), (2, 3), (4, 5)
_ROWS_AT = 48  # in the settings of the registers


def _register(number):
    return ir.Constant(I8, number)


def _void(builder, name, args):
    call(builder, f"llvm.x86.{name}", ir.VoidType(), args)


def emit_begin(builder, form, num_tokens):
    """Shapes of the registers, for groups of form.group_len columns and a pass of num_tokens."""
    columns, rows = [0] * 16, [0] * 16
    for i in range(2):
        columns[_SUMS[i]], columns[_ACTIVATIONS[i]] = _LINE, form.group_len
        columns[_WEIGHTS[i]], rows[_WEIGHTS[i]] = _LINE, form.group_len // 4
    settings = struct.pack("<BB14x16H16B", 1, 0, *columns, *rows)
    block = _room(builder, len(settings))
    for i, byte in enumerate(settings):
        builder.store(ir.Constant(I8, byte), _move(builder, block, i))
    most = ir.Constant(I64, AMX_TOKENS)
    height = builder.select(builder.icmp_signed("<", num_tokens, most), num_tokens, most)
    for register in (*_SUMS, *_ACTIVATIONS):
        place = _move(builder, block, _ROWS_AT + register)
        builder.store(builder.trunc(height, I8), place)
    _void(builder, "ldtilecfg", [block])


def emit_end(builder):
    _void(builder, "tilerelease", [])


def _room(builder, size):
    """Bytes on the stack, on a cache line."""
    with builder.goto_entry_block():
        block = builder.alloca(ir.ArrayType(I8, size))
    block.align = _LINE
    return builder.bitcast(block, I8.as_pointer())


def _move(builder, pointer, offset):
    return builder.gep(pointer, [ir.Constant(I64, offset)])


def _store_lanes(builder, value, pointer, offset):
    place = builder.bitcast(_move(builder, pointer, offset), value.type.as_pointer())
    builder.store(value, place).align = _LINE


def _load_lanes(builder, kind, pointer, offset):
    return load_at(builder, pointer, offset, kind, _LINE)


def _store_signed_units(builder, form, weights, target):
    """Unpack a group of weights to signed bytes, a row of the matrix register for each unit."""
    bytes_type = ir.VectorType(I8, 4 * LANES)
    zero = ir.Constant(bytes_type, [form.zero if form.zero < 128 else -128] * (4 * LANES))
    for i, unit in enumerate(unpack_units(builder, form, AMX, weights)):
        signed = builder.sub(builder.bitcast(unit, bytes_type), zero)
        _store_lanes(builder, signed, target, _LINE * i)


def _multiply(builder, form, x, x_stride, units, products):
    """The integer products of one group for all tokens, to memory: int32 [part, token, row]."""
    stride = ir.Constant(I64, _LINE)
    for part in range(GROUP_COLS // form.group_len):
        sums, activations, weights = (_register(r[part]) for r in (_SUMS, _ACTIVATIONS, _WEIGHTS))
        columns = _move(builder, x, part * form.group_len)
        rows = _move(builder, units, part * form.group_len // 4 * _LINE)
        target = _move(builder, products, part * AMX_TOKENS * _LINE)
        _void(builder, "tileloadd64", [activations, columns, x_stride])
        _void(builder, "tileloadd64", [weights, rows, stride])
        _void(builder, "tilezero", [sums])
        _void(builder, "tdpbssd", [sums, activations, weights])
        _void(builder, "tilestored64", [sums, target, stride])


def _add_chunk(builder, form, count, first_token, record, x_stride, scales, products, sums):
    """Add the products of `count` groups to a few tokens. sums: float32 [token, row] in memory."""
    num_parts, kinds = GROUP_COLS // form.group_len, 2 if form.has_min else 1
    place = offset_by(builder, sums, first_token, _LINE)
    cells = []
    for token in range(_TOKENS_AT_ONCE):
        cells.append(cgutils.alloca_once(builder, FLOATS))
        builder.store(_load_lanes(builder, FLOATS, place, token * _LINE), cells[-1])
    with cgutils.for_range(builder, count, intp=I64) as loop:
        scale = offset_by(builder, scales, loop.index, num_parts * kinds * _LINE)
        pairs = []
        for part in range(num_parts):
            loaded = [
                _load_lanes(builder, FLOATS, scale, (part * kinds + kind) * _LINE)
                for kind in range(kinds)
            ]
            pairs.append((loaded[0], loaded[1] if form.has_min else None))
        group = offset_by(builder, products, loop.index, num_parts * AMX_TOKENS * _LINE)
        group = offset_by(builder, group, first_token, _LINE)
        columns = offset_by(builder, record, loop.index, RECORD_BYTES)
        for token, cell in enumerate(cells):
            row = offset_by(builder, columns, x_stride, token)
            integers = [
                _load_lanes(builder, INTEGERS, group, (part * AMX_TOKENS + token) * _LINE)
                for part in range(num_parts)
            ]
            floats = [builder.sitofp(value, FLOATS) for value in integers]
            add_products(builder, row, pairs, floats, cell)
    for token, cell in enumerate(cells):
        _store_lanes(builder, builder.load(cell), place, token * _LINE)


def emit_amx_tile(builder, form, num_tokens, weights, later, x, x_stride, cols):
    """The address of the sums, float32 [token, row], for num_tokens <= AMX_TOKENS at run time."""
    weights, later, x = (to_pointer(builder, address) for address in (weights, later, x))
    num_groups = builder.udiv(cols, ir.Constant(I64, GROUP_COLS))
    group_bytes = quant_bytes(form, LANES, GROUP_COLS)
    first_scale = offset_by(builder, weights, num_groups, group_bytes)
    num_parts, kinds = GROUP_COLS // form.group_len, 2 if form.has_min else 1
    units, sums = _room(builder, _CHUNK * _UNIT_BYTES), _room(builder, AMX_TOKENS * _LINE)
    products = _room(builder, _CHUNK * num_parts * AMX_TOKENS * _LINE)
    scales = _room(builder, _CHUNK * num_parts * kinds * _LINE)
    for token in range(AMX_TOKENS):
        _store_lanes(builder, ir.Constant(FLOATS, [0.0] * LANES), sums, token * _LINE)
    zero, chunk = ir.Constant(I64, 0), ir.Constant(I64, _CHUNK)
    with cgutils.for_range_slice(builder, zero, num_groups, chunk, I64) as (first, _):
        left = builder.sub(num_groups, first)
        count = builder.select(builder.icmp_signed("<", left, chunk), left, chunk)
        with cgutils.for_range(builder, count, intp=I64) as loop:
            group = builder.add(first, loop.index)
            prefetch_group(builder, form, LANES, later, group)
            address = offset_by(builder, weights, group, group_bytes)
            _store_signed_units(
                builder, form, address, offset_by(builder, units, loop.index, _UNIT_BYTES)
            )
            place = offset_by(builder, scales, loop.index, num_parts * kinds * _LINE)
            for part, pair in enumerate(load_scales(builder, form, LANES, first_scale, group)):
                for kind in range(kinds):
                    _store_lanes(builder, pair[kind], place, (part * kinds + kind) * _LINE)
        columns = offset_by(builder, x, first, RECORD_BYTES)
        with cgutils.for_range(builder, count, intp=I64) as loop:
            target = offset_by(builder, products, loop.index, num_parts * AMX_TOKENS * _LINE)
            source = offset_by(builder, columns, loop.index, RECORD_BYTES)
            rows = offset_by(builder, units, loop.index, _UNIT_BYTES)
            _multiply(builder, form, source, x_stride, rows, target)
        some = ir.Constant(I64, _TOKENS_AT_ONCE)
        with cgutils.for_range_slice(builder, zero, num_tokens, some, I64) as (token, _):
            record = builder.gep(columns, [builder.mul(x_stride, token)])
            _add_chunk(builder, form, count, token, record, x_stride, scales, products, sums)
    return builder.ptrtoint(sums, I64)
