"""Object files that LLVM links without numba."""

import ctypes
import gc
import math

import llvmlite.binding as llvm
import pytest

from draftree.kernels.cpu.loader import load_code

SOURCE = """
@table = private unnamed_addr constant [4 x double] [double 0.5, double 1.5, double 2.5, double 3.5]
declare double @{called}(double)
declare double @log(double)
define private double @pick(i64 %i) noinline {{
  %place = getelementptr [4 x double], ptr @table, i64 0, i64 %i
  %value = load double, ptr %place
  ret double %value
}}
define double @entry(i64 %i) {{
  %value = call double @pick(i64 %i)
  %is_zero = icmp eq i64 %i, 0
  %function = select i1 %is_zero, ptr @log, ptr @{called}
  %result = call double %function(double %value)
  ret double %result
}}
"""


def _object(called: str = "exp", model: str = "jitdefault") -> bytes:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(codemodel=model, reloc="static", jit=True)
    return machine.emit_object(llvm.parse_assembly(SOURCE.format(called=called)))


def _values(address: int | None) -> list[float]:
    assert address is not None
    entry = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_int64)(address)
    return [entry(i) for i in range(4)]


@pytest.mark.parametrize("model", ["jitdefault", "large"])
def test_constants_and_functions_elsewhere(model: str) -> None:
    expected = [math.log(0.5), *(math.exp(i + 0.5) for i in range(1, 4))]
    assert _values(load_code("entry", _object(model=model))) == pytest.approx(expected, rel=1e-15)


def test_code_of_one_name_stays_beside_other_code() -> None:
    first, second = (load_code("entry", _object(name)) for name in ("sin", "cos"))
    gc.collect()
    assert first != second
    assert _values(first)[1:] == pytest.approx([math.sin(i + 0.5) for i in range(1, 4)], rel=1e-15)
    assert _values(second)[1:] == pytest.approx([math.cos(i + 0.5) for i in range(1, 4)], rel=1e-15)


def test_numbas_own_functions_are_replaced() -> None:
    assert load_code("entry", _object("numba_do_raise")) is not None


@pytest.mark.parametrize(
    "code",
    [lambda: _object("nowhere_to_be_found"), lambda: b"", lambda: b"\xcf\xfa\xed\xfe" + bytes(200)],
    ids=["symbol", "empty", "foreign"],
)
def test_what_cannot_be_linked_is_said_and_later_code_can(code, capfd) -> None:
    assert load_code("entry", code()) is None
    assert load_code("another", _object()) is None
    assert load_code("entry", _object()) is not None
    assert capfd.readouterr().err == ""
