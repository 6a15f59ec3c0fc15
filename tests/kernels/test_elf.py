"""Object files that are linked here, and those that are left to the compiler."""

import ctypes
import math

import llvmlite.binding as llvm
import pytest

from draftree.kernels.cpu.elf import can_link, link

pytestmark = pytest.mark.skipif(not can_link(), reason="processor: not an ELF that it knows")

SOURCE = """
@table = private unnamed_addr constant [4 x double] [double 0.5, double 1.5, double 2.5, double 3.5]
@change = {linkage} global i64 7
declare double @exp(double)
declare double @{missing}(double)
define private double @pick(i64 %i) noinline {{
  %place = getelementptr [4 x double], ptr @table, i64 0, i64 %i
  %value = load double, ptr %place
  ret double %value
}}
define double @entry(i64 %i) {{
  %value = call double @pick(i64 %i)
  %power = call double @{called}(double %value)
  ret double %power
}}
"""


def _object(called: str = "exp", model: str = "large", linkage: str = "external") -> bytes:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    missing = called if called != "exp" else "log"
    source = SOURCE.format(linkage=linkage, missing=missing, called=called)
    if linkage == "external":
        source = "\n".join(line for line in source.splitlines() if "@change" not in line)
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(codemodel=model, reloc="static")
    return machine.emit_object(llvm.parse_assembly(source))


def test_constants_calls_and_functions_elsewhere() -> None:
    address = link(_object(), "entry")
    assert address is not None
    entry = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_int64)(address)
    exp = ctypes.CDLL("libm.so.6").exp
    exp.restype, exp.argtypes = ctypes.c_double, (ctypes.c_double,)
    assert [entry(i) for i in range(4)] == [exp(i + 0.5) for i in range(4)]


POINTERS = """
declare double @exp(double)
declare double @log(double)
define double @entry(i64 %i) {
  %is_zero = icmp eq i64 %i, 0
  %function = select i1 %is_zero, ptr @exp, ptr @log
  %value = call double %function(double 2.0)
  ret double %value
}
"""


def test_addresses_of_functions_elsewhere() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(codemodel="large", reloc="static")
    address = link(machine.emit_object(llvm.parse_assembly(POINTERS)), "entry")
    assert address is not None
    entry = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_int64)(address)
    assert [entry(0), entry(1)] == [math.exp(2.0), math.log(2.0)]


@pytest.mark.parametrize(
    "code",
    [
        lambda: _object("nowhere_to_be_found"),
        lambda: _object(model="small"),  # relocations of 32 bits
        lambda: _object(linkage="internal"),  # memory that is written
        lambda: b"",
        lambda: b"\xcf\xfa\xed\xfe" + bytes(200),
    ],
    ids=["symbol", "relocation", "data", "empty", "foreign"],
)
def test_what_is_unknown_is_left_alone(code) -> None:
    assert link(code(), "entry") is None


def test_a_cut_object_is_left_alone() -> None:
    whole = _object()
    for length in range(0, len(whole), 31):
        assert link(whole[:length], "entry") is None
    assert link(whole, "another") is None
