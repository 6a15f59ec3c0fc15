"""The integer tile: packed weights times int8 activations with the CPU's dot-product instructions
(those of arm64: neon.py).

Sums of products are exact integers within a group of columns; groups are then added as float32 in
the order of the columns. So a token's result depends on nothing but its own row, and all
instruction sets give the same bits.
"""

# ruff: noqa: ANN001, ANN002, ANN201, ANN202  (numba's and llvmlite's types)
from llvmlite import ir

from draftree.kernels.cpu.floating import prefetch
from draftree.kernels.cpu.form import BLOCK_COLS, GROUP_COLS, quant_bytes, scale_bytes
from draftree.kernels.cpu.instruction import F32, I8, I16, I32, I64, call, fused, shuffle, spread
from draftree.kernels.cpu.isa import AMX, AVX2, AVX512_VNNI, AVX_VNNI
from draftree.kernels.cpu.jit import cgutils
from draftree.kernels.cpu.quantize import (
    NEGATED_HALF_SUMS_AT,
    NEGATED_SUM_AT,
    RECORD_BYTES,
    SCALE_AT,
    SUMS_AT,
    wants_pairs,
)

_UNITS = 8  # of 4 columns, in a group
_GROUPS = BLOCK_COLS // GROUP_COLS  # in a nested block
# Instruction sets that add a dot product to a sum, and up to how many tokens the registers hold
# two sums of each.
_TWO_SUMS = {AMX: 8, AVX512_VNNI: 8, AVX_VNNI: 4}


def wants_signed_bytes(isa) -> bool:
    """Whether 8-bit weights are kept as int8 (zero 0) and not as uint8 (zero 128)."""
    return isa not in (AMX, AVX512_VNNI, AVX_VNNI)


def offset_by(builder, pointer, count, size):
    """pointer + count * size bytes, the size being a constant."""
    return builder.gep(pointer, [builder.mul(count, ir.Constant(I64, size))])


def load_at(builder, pointer, offset, element, align):
    """One element at so many bytes (a constant) after the pointer."""
    place = builder.gep(pointer, [ir.Constant(I64, offset)])
    value = builder.load(builder.bitcast(place, element.as_pointer()))
    value.align = align
    return value


def to_pointer(builder, address):
    return builder.inttoptr(address, I8.as_pointer())


def _bytes_of(builder, words):
    return builder.bitcast(words, ir.VectorType(I8, 4 * words.type.count))


def _pick_bits(builder, isa, value, amount, mask):
    """Every byte shifted left by amount (right if negative), then masked."""
    lanes = value.type.count
    if isa == AMX and amount != 0:  # one instruction: bit i of a result is bit i - amount
        rows = [1 << (7 - i - amount) if mask >> (7 - i) & 1 else 0 for i in range(8)]
        bytes_type = ir.VectorType(I8, 4 * lanes)
        matrix = ir.Constant(bytes_type, rows * (lanes // 2))
        args = [builder.bitcast(value, bytes_type), matrix, ir.Constant(I8, 0)]
        picked = call(builder, "llvm.x86.vgf2p8affineqb.512", bytes_type, args)
        return builder.bitcast(picked, value.type)
    if amount != 0:
        distance = ir.Constant(value.type, [abs(amount)] * lanes)
        shift = builder.shl if amount > 0 else builder.lshr
        value = shift(value, distance)
    return builder.and_(value, ir.Constant(value.type, [mask * 0x01010101] * lanes))


def unpack_units(builder, form, isa, address):
    """The eight units of a group as vectors of bytes in int32 lanes, one lane per row."""
    lanes = isa.rows
    vector = ir.VectorType(I32, lanes)
    words = [load_at(builder, address, 4 * lanes * i, vector, 4) for i in range(form.bits)]
    if form.bits == 8:
        return words
    units = [_pick_bits(builder, isa, word, 0, 0x0F) for word in words[:4]]
    units += [_pick_bits(builder, isa, word, -4, 0x0F) for word in words[:4]]
    for unit in range(_UNITS):
        if form.bits == 5:
            high = _pick_bits(builder, isa, words[4], 4 - unit, 0x10)
        elif form.bits == 6:
            high = _pick_bits(builder, isa, words[4 + unit // 4], 4 - 2 * (unit % 4), 0x30)
        else:
            continue
        units[unit] = builder.or_(units[unit], high)
    return units


def prefetch_group(builder, form, lanes, later, group):
    """Ask for a group's share of a strip that is multiplied later, integers and scales."""
    size = quant_bytes(form, lanes, GROUP_COLS)
    size += scale_bytes(form, lanes) // (_GROUPS if form.is_nested else 1)
    prefetch(builder, offset_by(builder, later, group, size), size)


def _broadcast_unit(builder, isa, record, unit):
    """The 4 activations of a unit in every lane."""
    return spread(builder, load_at(builder, record, 4 * unit, I32, 4), isa.rows)


def _chain_avx2(builder, form, units, activations, start):
    """Pairs are added in int16; as many as cannot overflow, before they are widened."""
    i8x32, i16x16 = ir.VectorType(I8, 32), ir.VectorType(I16, 16)
    ones = ir.Constant(i16x16, [1] * 16)
    num_pairs = {4: 8, 5: 4, 6: 2, 8: 1}[form.bits]
    total, pairs = start, None
    for i, (unit, activation) in enumerate(zip(units, activations, strict=True)):
        weights, values = _bytes_of(builder, unit), _bytes_of(builder, activation)
        if form.bits == 8:  # |w| * (x with the sign of w)
            values = call(builder, "llvm.x86.avx2.psign.b", i8x32, [values, weights])
            no_poison = ir.Constant(ir.IntType(1), 0)
            weights = call(builder, "llvm.abs.v32i8", i8x32, [weights, no_poison])
        product = call(builder, "llvm.x86.avx2.pmadd.ub.sw", i16x16, [weights, values])
        pairs = product if pairs is None else builder.add(pairs, product)
        if (i + 1) % num_pairs == 0 or i + 1 == len(units):
            wide = call(builder, "llvm.x86.avx2.pmadd.wd", start.type, [pairs, ones])
            total, pairs = builder.add(total, wide), None
    return total


def _chain_portable(builder, form, units, activations, start):
    lanes = start.type.count
    wide = ir.VectorType(I16, 4 * lanes)
    total = start
    for unit, activation in zip(units, activations, strict=True):
        product = builder.mul(
            builder.sext(_bytes_of(builder, unit), wide),
            builder.sext(_bytes_of(builder, activation), wide),
        )
        for i in range(4):
            part = shuffle(builder, (product, product), range(i, 4 * lanes, 4))
            total = builder.add(total, builder.sext(part, start.type))
    return total


def _add_unit(builder, isa, total, unit, activation):
    """One dot-product instruction."""
    name = f"llvm.x86.avx512.vpdpbusd.{32 * isa.rows}"
    return call(builder, name, total.type, [total, unit, activation])


def _add_units(builder, isa, form, units, first, records, totals):
    """totals + the products of these units, exact in int32 lanes. first: the place of units[0].

    An instruction that adds to a sum takes several times longer than until the next can start. So
    tokens take turns, and have two sums each; fences keep the compiler from undoing it.
    """
    places = range(first, first + len(units))
    if isa not in _TWO_SUMS:
        chain = _chain_avx2 if isa == AVX2 else _chain_portable
        found = []
        for record, total in zip(records, totals, strict=True):
            activations = [_broadcast_unit(builder, isa, record, place) for place in places]
            found.append(chain(builder, form, units, activations, total))
        return found
    zero = ir.Constant(totals[0].type, [0] * isa.rows)
    sums = [totals, [zero] * len(totals)][: 2 if len(totals) <= _TWO_SUMS[isa] else 1]
    for i, unit in zip(places, units, strict=True):
        activations = [_broadcast_unit(builder, isa, record, i) for record in records]
        sums[i % len(sums)] = [
            _add_unit(builder, isa, total, unit, activation)
            for total, activation in zip(sums[i % len(sums)], activations, strict=True)
        ]
        builder.fence("acq_rel", "singlethread")
    return sums[0] if len(sums) == 1 else [builder.add(*pair) for pair in zip(*sums, strict=True)]


def load_scales(builder, form, lanes, first, group):
    """(scale, min or None) for each part of a group; first is where the strip's scales begin."""
    count = ir.Constant(I64, _GROUPS)
    period = builder.udiv(group, count) if form.is_nested else group
    record = offset_by(builder, first, period, scale_bytes(form, lanes))
    floats, halves = ir.VectorType(F32, lanes), ir.VectorType(ir.HalfType(), lanes)
    kinds = 2 if form.has_min else 1
    bases = [
        builder.fpext(load_at(builder, record, 2 * lanes * kind, halves, 2), floats)
        for kind in range(kinds)
    ]
    if not form.is_nested:
        return [(bases[0], bases[1] if form.has_min else None)]
    num_parts = GROUP_COLS // form.group_len
    inner = offset_by(builder, record, builder.urem(group, count), num_parts * lanes)
    found = []
    for part in range(num_parts):
        pair = [None, None]
        for kind in range(kinds):
            at = 2 * lanes * kinds + (kind * _GROUPS * num_parts + part) * lanes
            small = load_at(builder, inner, at, ir.VectorType(I8, lanes), 1)
            factor = builder.sitofp(builder.sext(small, ir.VectorType(I32, lanes)), floats)
            pair[kind] = builder.fmul(bases[kind], factor)
        found.append(tuple(pair))
    return found


def add_scaled(builder, total, x_scale, load_sum, scales, products):
    """total + scale * products + min * sums; scales, products and load_sum(i) for each part."""
    if len(products) == 1:
        total = fused(builder, products[0], builder.fmul(scales[0][0], x_scale), total)
    else:
        inner = builder.fmul(products[0], scales[0][0])
        inner = fused(builder, products[1], scales[1][0], inner)
        total = fused(builder, inner, x_scale, total)
    for part, (_, least) in enumerate(scales):
        if least is not None:
            total = fused(builder, least, load_sum(part), total)
    return total


def add_products(builder, record, scales, products, cell, scale_at=SCALE_AT, sums_at=SUMS_AT):
    """Add what a record's group gives to a token's cell. sums_at: of all, then of the parts."""
    lanes = cell.type.pointee.count
    places = sums_at[:1] if len(products) == 1 else sums_at[1:]

    def load_number(place):
        return spread(builder, load_at(builder, record, place, F32, 4), lanes)

    x_scale, total = load_number(scale_at), builder.load(cell)
    total = add_scaled(builder, total, x_scale, lambda i: load_number(places[i]), scales, products)
    builder.store(total, cell)


def _emit_group(builder, form, isa, weights, scales, records, sums):
    """Add one group of 32 columns to the sums of all tokens."""
    lanes = isa.rows
    integers, floats = ir.VectorType(I32, lanes), ir.VectorType(F32, lanes)
    units = unpack_units(builder, form, isa, weights)
    num_parts = len(scales)
    per_part = _UNITS // num_parts
    zero = 0 if form.bits == 8 and wants_signed_bytes(isa) else form.zero
    negated_at = NEGATED_SUM_AT if num_parts == 1 else NEGATED_HALF_SUMS_AT
    products = []
    for part in range(num_parts):
        starts = [ir.Constant(integers, [0] * lanes)] * len(records)
        if zero:
            shift = ir.Constant(integers, [zero.bit_length() - 1] * lanes)
            negated = [load_at(builder, r, negated_at + 4 * part, I32, 4) for r in records]
            starts = [builder.shl(spread(builder, n, lanes), shift) for n in negated]
        first = part * per_part
        span = units[first : first + per_part]
        totals = _add_units(builder, isa, form, span, first, records, starts)
        products.append([builder.sitofp(total, floats) for total in totals])
    for record, cell, *parts in zip(records, sums, *products, strict=True):
        add_products(builder, record, scales, parts, cell)


def new_cells(builder, count, lanes):
    zeros = ir.Constant(ir.VectorType(F32, lanes), [0.0] * lanes)
    return [cgutils.alloca_once_value(builder, zeros) for _ in range(count)]


def for_groups(builder, form, isa, tile, emit_group, weights, later, x, x_stride, cols):
    """emit_group(address of the integers, scales, records) for each group of 32 columns. x are what
    quantize.py makes, for `tile` tokens. later: a strip that will be wanted soon.
    """
    lanes, together = isa.rows, 2 if wants_pairs(isa) else 1
    weights, later, x = (to_pointer(builder, address) for address in (weights, later, x))
    rows = [offset_by(builder, x, x_stride, i) for i in range(0, tile, together)]
    record_bytes = RECORD_BYTES * together
    num_groups = builder.udiv(cols, ir.Constant(I64, GROUP_COLS))
    group_bytes = quant_bytes(form, lanes, GROUP_COLS)
    first_scale = offset_by(builder, weights, num_groups, group_bytes)
    with cgutils.for_range(builder, num_groups, intp=I64) as loop:
        prefetch_group(builder, form, lanes, later, loop.index)
        scales = load_scales(builder, form, lanes, first_scale, loop.index)
        address = offset_by(builder, weights, loop.index, group_bytes)
        records = [offset_by(builder, row, loop.index, record_bytes) for row in rows]
        emit_group(address, scales, records)


def emit_dot_tile(builder, form, isa, tile, *places):
    """One vector of sums per token, on x86-64 and portable; places as for_groups has them."""
    sums = new_cells(builder, tile, isa.rows)

    def emit_group(address, scales, records):
        _emit_group(builder, form, isa, address, scales, records, sums)

    for_groups(builder, form, isa, tile, emit_group, *places)
    return [builder.load(cell) for cell in sums]
