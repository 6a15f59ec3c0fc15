"""The integer tile on arm64, whose dot products take signed bytes on both sides: four columns of
four rows and a token (dotprod), or eight columns of two rows and two tokens (i8mm).

Weights become signed bytes, some of them times a power of two, which the conversion of the sums
takes back. What takes the time is the number of vector instructions, so a few are saved wherever a
load or a shift can do the same: all give the integers of dot.py, exactly.
"""

# ruff: noqa: ANN001, ANN002, ANN201, ANN202  (numba's and llvmlite's types)
from llvmlite import ir

from draftree.kernels.cpu.dot import add_products, add_scaled, for_groups, load_at, new_cells
from draftree.kernels.cpu.form import GROUP_COLS
from draftree.kernels.cpu.instruction import F32, I8, I32, I64, call, shuffle
from draftree.kernels.cpu.isa import NEON_DOTPROD, NEON_I8MM
from draftree.kernels.cpu.jit import cgutils
from draftree.kernels.cpu.quantize import (
    PAIRED_SCALE_AT,
    PAIRED_SUMS_AT,
    SCALE_AT,
    SUMS_AT,
    wants_pairs,
)

_TOKENS = 4  # at once: while the next are multiplied, these are scaled
_ROWS = NEON_DOTPROD.rows
_BYTES, _SUMS = ir.VectorType(I8, 4 * _ROWS), ir.VectorType(I32, _ROWS)
_FLOATS = ir.VectorType(F32, _ROWS)
# An integer of at most 22 bits added to these bits is the float32 that is larger by as much.
_EVEN_BITS, _EVEN = 0x4B400000, 12582912.0
_EXPONENT = 1 << 23


def _all(value):
    return ir.Constant(_BYTES, [value - 256 if value > 127 else value] * _BYTES.count)


def _insert(builder, side, below, above, amount):
    """Bits of one shifted by amount into the other: sli (left), sri (right)."""
    args = [below, above, ir.Constant(I32, amount)]
    return call(builder, f"llvm.aarch64.neon.vs{side}.v16i8", _BYTES, args)


def _shift_left(builder, value, amount):
    return builder.shl(value, _all(amount)) if amount else value


def _scaled_by(form) -> int:
    """Units are the weights times two to this power."""
    return {(4, 8): 4, (6, 32): 2}.get((form.bits, form.zero), 0)


def _unpack(builder, form, address):
    """The eight units of a group, signed, the zero subtracted."""
    words = [load_at(builder, address, 16 * i, _BYTES, 4) for i in range(form.bits)]
    if form.bits == 8:
        return words
    key = form.bits, form.zero
    if key == (4, 8):  # times 16: the nibble is the upper one
        words = [builder.xor(word, _all(0x88)) for word in words]
        lows = [_shift_left(builder, word, 4) for word in words]
        return lows + [builder.and_(word, _all(0xF0)) for word in words]
    if key == (6, 32):  # times 4: two bits, and the nibble below them
        planes = [builder.xor(word, _all(0xAA)) for word in words[4:]]
        lows = [_shift_left(builder, word, 4) for word in words[:4]]
        nibbles = lows + [builder.and_(word, _all(0xF0)) for word in words[:4]]
        tops = [_shift_left(builder, planes[u // 4], 6 - 2 * (u % 4)) for u in range(8)]
        return [
            _insert(builder, "ri", top, nibble, 2)
            for top, nibble in zip(tops, nibbles, strict=True)
        ]
    nibbles = words[:4] + [builder.lshr(word, _all(4)) for word in words[:4]]
    if key == (5, 16):  # a fifth bit of 0 means minus 16: four ones above the nibble
        missing, units = builder.xor(words[4], _all(0xFF)), []
        for u, nibble in enumerate(nibbles):
            bit = builder.and_(missing, _all(1 << u))
            above = builder.sext(builder.icmp_signed("!=", bit, _all(0)), _BYTES)
            units.append(_insert(builder, "li", nibble, above, 4))
        return units
    units = [builder.and_(word, _all(0x0F)) for word in words[:4]] + nibbles[4:]
    if form.bits == 5:
        for u in range(8):
            shift = builder.shl if u < 4 else builder.lshr
            high = shift(words[4], _all(abs(4 - u)))
            units[u] = builder.or_(units[u], builder.and_(high, _all(0x10)))
    if form.zero:
        units = [builder.sub(unit, _all(form.zero)) for unit in units]
    return units


def add_quads(builder, total, a, b):
    """To each int32 lane add the products of its four pairs of signed bytes."""
    return call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", _SUMS, [total, a, b])


def _start_cells(builder, form, tile):
    """Conversion is slow, and what loads is idle while the rest adds: so each token's sum starts
    from a constant in memory, of which an empty piece of assembler hides that it is one.
    """
    bits = _EVEN_BITS - _scaled_by(form) * _EXPONENT
    cells = cgutils.alloca_once(builder, _SUMS, size=tile)
    places = [builder.gep(cells, [ir.Constant(I64, i)]) for i in range(tile)]
    for place in places:
        builder.store(ir.Constant(_SUMS, [bits] * _ROWS), place)
    kind = ir.FunctionType(ir.VoidType(), [cells.type])
    builder.asm(kind, "", "r,~{memory}", [cells], side_effect=True)
    return places


def _to_floats(builder, form, total):
    even = ir.Constant(_FLOATS, [_EVEN / (1 << _scaled_by(form))] * _ROWS)
    return builder.fsub(builder.bitcast(total, _FLOATS), even)


def _multiply(builder, units, first, records, totals, is_paired):
    """totals + the products of some units; first: the place of units[0] in the group.

    Tokens take turns, since a sum can be added to only when the last has been; fences keep the
    compiler from undoing it.
    """
    per_load = 2 if is_paired else 4
    for start in range(first, first + len(units), per_load):
        offset = 16 * start // per_load
        loaded = [load_at(builder, record, offset, _BYTES, 4) for record in records]
        for i in range(per_load):  # an operand of the instruction may be a lane
            lanes = [4 * i + k % 4 for k in range(16)]
            factors = [shuffle(builder, (some, some), lanes) for some in loaded]
            unit = units[start - first + i]
            totals = [
                add_quads(builder, total, unit, factor)
                for total, factor in zip(totals, factors, strict=True)
            ]
            builder.fence("acq_rel", "singlethread")
    return totals


def _emit_dots(builder, form, isa, tile, *places):
    starts, sums = _start_cells(builder, form, tile), new_cells(builder, tile, _ROWS)
    per_part = form.group_len // 4
    is_paired = wants_pairs(isa)
    numbers = (PAIRED_SCALE_AT, PAIRED_SUMS_AT) if is_paired else (SCALE_AT, SUMS_AT)

    def emit_group(address, scales, records):
        units = _unpack(builder, form, address)
        for token in range(0, tile, _TOKENS):
            some = slice(token, token + _TOKENS)
            parts = []
            for first in range(0, GROUP_COLS // 4, per_part):
                totals = [builder.load(cell) for cell in starts[some]]
                span = units[first : first + per_part]
                totals = _multiply(builder, span, first, records[some], totals, is_paired)
                parts.append([_to_floats(builder, form, total) for total in totals])
            for record, cell, *products in zip(records[some], sums[some], *parts, strict=True):
                add_products(builder, record, scales, products, cell, *numbers)

    for_groups(builder, form, isa, tile, emit_group, *places)
    return [builder.load(cell) for cell in sums]


def zip_lanes(builder, a, b):
    """a0 b0 a1 b1 ...: the lower halves, then the upper ones."""
    count = a.type.count
    zipped = [i // 2 + i % 2 * count for i in range(2 * count)]
    return [shuffle(builder, (a, b), lanes) for lanes in (zipped[:count], zipped[count:])]


def _pair_rows(builder, units):
    """Eight columns of rows 0 and 1, and of rows 2 and 3, for each two units."""
    words = [builder.bitcast(unit, _SUMS) for unit in units]
    zipped = [zip_lanes(builder, *words[i : i + 2]) for i in range(0, len(words), 2)]
    return [[builder.bitcast(pair[half], _BYTES) for pair in zipped] for half in range(2)]


def _emit_matrices(builder, form, isa, tile, *places):
    """Two rows times two tokens at once, 8 columns each. Lanes of a sum: first row and first token,
    first row and second token, then those of the second row.
    """
    num_pairs, per_part = -(-tile // 2), form.group_len // 8
    starts, sums = _start_cells(builder, form, 2), new_cells(builder, 2 * num_pairs, _ROWS)

    def multiply(half, rows, columns):
        totals = []
        for first in range(0, GROUP_COLS // 8, per_part):
            total = builder.load(starts[half])
            for chunk in range(first, first + per_part):
                args = [total, rows[chunk], columns[chunk]]
                total = call(builder, "llvm.aarch64.neon.smmla.v4i32.v16i8", _SUMS, args)
            totals.append(_to_floats(builder, form, total))
        return totals

    def emit_group(address, scales, records):
        blocks = _pair_rows(builder, _unpack(builder, form, address))
        doubled = [[n if n is None else zip_lanes(builder, n, n) for n in pair] for pair in scales]
        for pair, record in enumerate(records):
            columns = [load_at(builder, record, 16 * i, _BYTES, 4) for i in range(4)]
            sums_at = PAIRED_SUMS_AT[:1] if len(scales) == 1 else PAIRED_SUMS_AT[1:]
            x_scale, *x_sums = (
                load_at(builder, record, place, _FLOATS, 4) for place in (PAIRED_SCALE_AT, *sums_at)
            )
            for half, cell in enumerate(sums[2 * pair : 2 * pair + 2]):
                numbers = [[n if n is None else n[half] for n in part] for part in doubled]
                total, products = builder.load(cell), multiply(half, blocks[half], columns)
                scaled = x_scale, x_sums.__getitem__, numbers, products
                builder.store(add_scaled(builder, total, *scaled), cell)
            builder.fence("acq_rel", "singlethread")

    for_groups(builder, form, isa, tile, emit_group, *places)
    found = []
    for token in range(tile):
        lower, upper = (builder.load(cell) for cell in sums[token // 2 * 2 : token // 2 * 2 + 2])
        found.append(shuffle(builder, (lower, upper), [token % 2 + 2 * i for i in range(4)]))
    return found


def emit_neon_tile(builder, form, isa, tile, *places):
    """As emit_dot_tile; two tokens or more in matrices of 2 x 2 where there is an instruction."""
    emit = _emit_matrices if isa == NEON_I8MM and tile > 1 else _emit_dots
    return emit(builder, form, isa, tile, *places)
