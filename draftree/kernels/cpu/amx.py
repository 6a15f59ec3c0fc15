"""The integer tile on matrix registers (x86 AMX): sixteen or eight tokens times a strip of sixteen rows.

The same packed weights and the same sums in the same order as dot.py, so the same bits; only the exact
integer products of a group come from one matrix instruction instead of eight dot products a token.
"""

# ruff: noqa: ANN001, ANN202  (numba's and llvmlite's types)
import struct

from llvmlite import ir
from numba.core import cgutils

from draftree.kernels.cpu.dot import add_products, call, load_scales, offset_by, unpack_units
from draftree.kernels.cpu.form import GROUP_COLS, quant_bytes
from draftree.kernels.cpu.quantize import RECORD_BYTES

AMX_TILES = (16, 8)
_LANES = 16
_I8, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_INTEGERS, _FLOATS = ir.VectorType(_I32, _LANES), ir.VectorType(_F32, _LANES)
_ROW_BYTES = 64
# Registers: sums (tokens x rows) and activations (tokens x columns) for each tile size, weights.
_SUMS, _ACTIVATIONS, _WEIGHTS = {16: (0, 1), 8: (2, 3)}, {16: 4, 8: 5}, 6


def _register(number):
    return ir.Constant(_I8, number)


def _void(builder, name, args):
    call(builder, f"llvm.x86.{name}", ir.VoidType(), args)


def emit_begin(builder, form):
    """Shapes of the registers, for groups of form.group_len columns."""
    columns, rows = [0] * 16, [0] * 16
    for tile in AMX_TILES:
        for register in _SUMS[tile]:
            columns[register], rows[register] = _ROW_BYTES, tile
        columns[_ACTIVATIONS[tile]], rows[_ACTIVATIONS[tile]] = form.group_len, tile
    columns[_WEIGHTS], rows[_WEIGHTS] = _ROW_BYTES, form.group_len // 4
    settings = struct.pack("<BB14x16H16B", 1, 0, *columns, *rows)
    kind = ir.ArrayType(_I8, len(settings))
    block = cgutils.alloca_once_value(builder, ir.Constant(kind, bytearray(settings)))
    _void(builder, "ldtilecfg", [builder.bitcast(block, _I8.as_pointer())])


def emit_end(builder):
    _void(builder, "tilerelease", [])


def _room(builder, size):
    """Bytes on the stack, on a cache line, as an address."""
    block = cgutils.alloca_once(builder, ir.ArrayType(_I8, size))
    block.align = _ROW_BYTES
    return builder.ptrtoint(block, _I64)


def _pointer(builder, address):
    return builder.inttoptr(address, _I8.as_pointer())


def _store_signed_units(builder, form, weights, target):
    """Unpack a group of weights to signed bytes, a row of the matrix register for each unit."""
    bytes_type = ir.VectorType(_I8, 4 * _LANES)
    zero = ir.Constant(bytes_type, [form.zero if form.zero < 128 else -128] * (4 * _LANES))
    for i, unit in enumerate(unpack_units(builder, form, _LANES, weights)):
        signed = builder.sub(builder.bitcast(unit, bytes_type), zero)
        place = builder.add(target, ir.Constant(_I64, _ROW_BYTES * i))
        builder.store(signed, builder.inttoptr(place, bytes_type.as_pointer())).align = _ROW_BYTES


def _emit_products(builder, form, tile, weights, x, x_stride, units):
    """The integer products of one group for all tokens, in the sum registers: one for each part."""
    _store_signed_units(builder, form, weights, units)
    stride = ir.Constant(_I64, _ROW_BYTES)
    for part in range(GROUP_COLS // form.group_len):
        sums, activations = _register(_SUMS[tile][part]), _register(_ACTIVATIONS[tile])
        columns = builder.add(x, ir.Constant(_I64, part * form.group_len))
        rows = builder.add(units, ir.Constant(_I64, part * form.group_len // 4 * _ROW_BYTES))
        _void(builder, "tileloadd64", [activations, _pointer(builder, columns), x_stride])
        _void(builder, "tileloadd64", [_register(_WEIGHTS), _pointer(builder, rows), stride])
        _void(builder, "tilezero", [sums])
        _void(builder, "tdpbssd", [sums, activations, _register(_WEIGHTS)])


def _store_products(builder, form, tile, products):
    """From the sum registers to memory: int32 [part, token, row]."""
    for part in range(GROUP_COLS // form.group_len):
        target = builder.add(products, ir.Constant(_I64, part * tile * _ROW_BYTES))
        place = [_pointer(builder, target), ir.Constant(_I64, _ROW_BYTES)]
        _void(builder, "tilestored64", [_register(_SUMS[tile][part]), *place])


def emit_amx_tile(builder, form, tile, weights, x, x_stride, cols):
    """One vector of sums per token; x are the records of quantize.py."""
    zeros = ir.Constant(_FLOATS, [0.0] * _LANES)
    sums = [cgutils.alloca_once_value(builder, zeros) for _ in range(tile)]
    num_groups = builder.udiv(cols, ir.Constant(_I64, GROUP_COLS))
    group_bytes = quant_bytes(form, _LANES, GROUP_COLS)
    first_scale = offset_by(builder, weights, num_groups, group_bytes)
    num_parts = GROUP_COLS // form.group_len
    units = _room(builder, 8 * _ROW_BYTES)
    products = _room(builder, num_parts * tile * _ROW_BYTES)
    rows = [builder.add(x, builder.mul(x_stride, ir.Constant(_I64, i))) for i in range(tile)]
    last = builder.sub(num_groups, ir.Constant(_I64, 1))

    def multiply(group):
        address = offset_by(builder, weights, group, group_bytes)
        columns = offset_by(builder, x, group, RECORD_BYTES)
        _emit_products(builder, form, tile, address, columns, x_stride, units)

    multiply(ir.Constant(_I64, 0))
    _store_products(builder, form, tile, products)
    with cgutils.for_range(builder, num_groups, intp=_I64) as loop:
        # The matrix unit works on the next group while this one is scaled and added.
        is_last = builder.icmp_unsigned("==", loop.index, last)
        following = builder.add(loop.index, ir.Constant(_I64, 1))
        multiply(builder.select(is_last, last, following))
        scales = load_scales(builder, form, _LANES, first_scale, loop.index)
        for token, (row, cell) in enumerate(zip(rows, sums, strict=True)):
            record = offset_by(builder, row, loop.index, RECORD_BYTES)
            parts = []
            for part in range(num_parts):
                at = ir.Constant(_I64, (part * tile + token) * _ROW_BYTES)
                place = builder.inttoptr(builder.add(products, at), _INTEGERS.as_pointer())
                parts.append(builder.sitofp(builder.load(place), _FLOATS))
            add_products(builder, record, scales, parts, cell)
        _store_products(builder, form, tile, products)
    return [builder.load(cell) for cell in sums]
