"""The arm64 tile where there is no arm64: LLVM accepts it and picks the dot-product instruction,
and with its instructions spelled out the tile gives the bits of the machine at hand.
"""

import ctypes
import re

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir

from draftree.kernels.cpu import neon
from draftree.kernels.cpu.floating import emit_float_tile
from draftree.kernels.cpu.form import ALL_FORMS, Form
from draftree.kernels.cpu.isa import NEON, NEON_DOTPROD, NEON_I8MM, Isa
from draftree.kernels.cpu.linear import record_linear
from draftree.kernels.cpu.pack import pack
from draftree.kernels.cpu.pass_args import PassArgs
from draftree.kernels.cpu.program import Program
from draftree.kernels.cpu.quantize import record_quantize
from draftree.kernels.cpu.thread_pool import ThreadPool
from draftree.kernels.cpu.tile import emit_integer_tile
from draftree.kernels.quant.formats import QuantType
from draftree.kernels.quant.layout import block_layout
from tests.kernels.raw import random_raw

TRIPLE = "aarch64-unknown-linux-gnu"
BLOCK_TYPES = [qtype for qtype in QuantType if block_layout(qtype) is not None]


def _module(form: Form, tile: int, isa: Isa = NEON_DOTPROD) -> ir.Module:
    """tile(weights, x, x_stride, cols, out) stores the sums of the tokens one after the other."""
    word, module = ir.IntType(64), ir.Module()
    kind = ir.FunctionType(ir.VoidType(), [word] * 5)
    function = ir.Function(module, kind, "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    weights, x, x_stride, cols, out = function.args
    if form.is_float:
        sums = emit_float_tile(builder, form, tile, weights, x, x_stride, cols)
    else:
        places = weights, weights, x, x_stride, cols
        sums = emit_integer_tile(builder, form, isa, tile, *places)
    for i, value in enumerate(sums):
        place = builder.add(out, ir.Constant(word, 4 * value.type.count * i))
        builder.store(value, builder.inttoptr(place, value.type.as_pointer())).align = 4
    builder.ret_void()
    return module


def _assembly(form: Form, tile: int, isa: Isa = NEON_DOTPROD) -> str:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = _module(form, tile, isa)
    module.triple = TRIPLE
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    features = "+dotprod,+i8mm" if isa == NEON_I8MM else "+dotprod"
    machine = llvm.Target.from_triple(TRIPLE).create_target_machine(features=features, opt=3)
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    return machine.emit_assembly(parsed)


@pytest.mark.parametrize("form", [f for f in ALL_FORMS if not f.is_float], ids=str)
@pytest.mark.parametrize("tile", [1, 4])
def test_integer_tiles_use_sdot(form: Form, tile: int) -> None:
    lines = re.findall(r"\bsdot\s+v\d+\.4s, v\d+\.16b, v\d+\.\w+(?:\[\d\])?", _assembly(form, tile))
    assert len(lines) >= 8 * tile and len(lines) % (8 * tile) == 0
    assert any("4b[" in line for line in lines), "the broadcast should be part of the instruction"


@pytest.mark.parametrize("form", [f for f in ALL_FORMS if not f.is_float], ids=str)
def test_two_tokens_or_more_use_smmla_where_it_is(form: Form) -> None:
    for tile in (2, 3, 8):
        body = _assembly(form, tile, NEON_I8MM)
        assert body.count("smmla") == 8 * -(-tile // 2) and "sdot" not in body
    assert _assembly(form, 1, NEON_I8MM).count("sdot") == 8


@pytest.mark.parametrize("form", [f for f in ALL_FORMS if f.is_float], ids=str)
def test_float_tiles_use_fused_steps(form: Form) -> None:
    assert "fmla" in _assembly(form, 4)


def _pick(builder, vector, lanes):
    wanted = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)
    return builder.shuffle_vector(vector, vector, wanted)


def _spelled_out(builder, name, result, args):
    """sdot adds the products of a lane's four pairs of signed bytes to it, smmla those of each two
    halves of eight bytes; sli and sri shift bits of the second operand into the first.
    """
    if name.startswith("llvm.aarch64.neon.vs"):
        below, above, amount = args
        count = amount.constant
        distance = ir.Constant(result, [count] * 16)
        if "vsli" in name:
            shifted, kept = builder.shl(above, distance), (1 << count) - 1
        else:
            shifted, kept = builder.lshr(above, distance), -(1 << (8 - count))
        return builder.or_(shifted, builder.and_(below, ir.Constant(result, [kept] * 16)))
    total, *operands = args
    wide = ir.VectorType(ir.IntType(32), 16)
    left, right = (builder.sext(value, wide) for value in operands)
    if name == "llvm.aarch64.neon.smmla.v4i32.v16i8":
        for i in range(8):
            rows, columns = (
                [8 * (k // 2) + i for k in range(4)],
                [8 * (k % 2) + i for k in range(4)],
            )
            total = builder.add(
                total, builder.mul(_pick(builder, left, rows), _pick(builder, right, columns))
            )
        return total
    assert name == "llvm.aarch64.neon.sdot.v4i32.v16i8"
    product = builder.mul(left, right)
    for i in range(4):
        total = builder.add(total, _pick(builder, product, [i, 4 + i, 8 + i, 12 + i]))
    return total


@pytest.mark.parametrize("isa", NEON, ids=lambda isa: isa.name)
@pytest.mark.parametrize("qtype", BLOCK_TYPES, ids=lambda qtype: qtype.name)
def test_tile_has_the_bits_of_this_machine(monkeypatch, qtype: QuantType, isa: Isa) -> None:
    rng = np.random.default_rng(4)
    raw = random_raw(rng, qtype, 8, 512)
    x = rng.standard_normal((3, 512)).astype(np.float32)
    expected = np.full((3, 8), np.nan, np.float32)
    program, step = Program(ThreadPool(1)), PassArgs(3, 1)
    step.control[0] = 3
    record_linear(program, step, x, pack(raw, qtype), expected)
    rows = record_quantize(program, step, x, isa=isa)
    program.run()

    monkeypatch.setattr(neon, "call", _spelled_out)
    weight = pack(raw, qtype, isa=isa)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    parsed = llvm.parse_assembly(str(_module(weight.form, 3, isa)))
    features = llvm.get_host_cpu_features().flatten()
    machine = llvm.Target.from_default_triple().create_target_machine(features=features)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    run = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(engine.get_function_address("tile"))
    found = np.full((2, 3, 4), np.nan, np.float32)  # [strip, token, row]
    for strip, out in zip(weight.data, found, strict=True):
        records = rows.records
        run(strip.ctypes.data, records.ctypes.data, records.strides[0], 512, out.ctypes.data)
    np.testing.assert_array_equal(found.transpose(1, 0, 2).reshape(3, 8), expected)
