"""Kernels are compiled once, found again by what they are, and loaded without the compiler."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import draftree.kernels.cpu
from draftree.kernels.cpu import kernel as kernel_module
from draftree.kernels.cpu.elementwise import _elementwise_kernel, record_silu_mul
from draftree.kernels.cpu.embed import _embed_kernel
from draftree.kernels.cpu.form import ALL_FORMS
from draftree.kernels.cpu.isa import ALL_ISAS, AVX2, NEON_DOTPROD, NEON_I8MM
from draftree.kernels.cpu.jit import realize
from draftree.kernels.cpu.kernel import Compiled, Kernel, native
from draftree.kernels.cpu.linear import _linear_kernel
from draftree.kernels.cpu.pack import _pack_float_kernel, _pack_quant_kernel
from draftree.kernels.cpu.pass_args import PassArgs
from draftree.kernels.cpu.program import Program
from draftree.kernels.cpu.thread_pool import ThreadPool
from draftree.kernels.quant.formats import QuantType
from draftree.kernels.quant.layout import block_layout

SCRIPT = """
import json, sys
import numpy as np
import draftree.kernels.cpu.ops
from draftree.kernels.cpu.elementwise import _elementwise_kernel, record_silu_mul
from draftree.kernels.cpu.program import Program
from draftree.kernels.cpu.select import choose_greedy
from draftree.kernels.cpu.pass_args import PassArgs
from draftree.kernels.cpu.thread_pool import ThreadPool
rng = np.random.default_rng(0)
gate, up = rng.standard_normal((2, 5, 48)).astype(np.float32)
out = np.zeros_like(gate)
pool, step = ThreadPool(2), PassArgs(5, 1)
program = Program(pool)
record_silu_mul(program, step, gate, up, out)
step.control[0] = 5
program.run()
pool.close()
best = choose_greedy(out[0])
print(json.dumps({
    "bits": out.tobytes().hex(), "best": best,
    "key": _elementwise_kernel.key, "has_numba": "numba" in sys.modules,
}))
"""


class Processes:
    """Fresh ones, with a cache of their own."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache

    def start(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={"DRAFTREE_CACHE": str(self.cache), "PYTHONPATH": ":".join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, process: "subprocess.Popen[str]") -> tuple[dict[str, Any], str]:
        out, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        return json.loads(out), errors


@pytest.fixture(scope="module")
def cold(tmp_path_factory) -> tuple[Processes, list[tuple[dict[str, Any], str]]]:
    """Two processes that started at once with nothing compiled."""
    processes = Processes(tmp_path_factory.mktemp("cache"))
    started = [processes.start() for _ in range(2)]
    return processes, [processes.finish(process) for process in started]


def test_two_cold_starts_at_once(cold) -> None:
    processes, ((first, words), (second, other_words)) = cold
    assert first == second and first["has_numba"]
    assert "this happens once" in words + other_words
    (folder,) = (processes.cache / "kernels").iterdir()
    assert {path.suffix for path in folder.iterdir()} == {".o"}
    assert len(list(folder.iterdir())) >= 6


def test_a_warm_start_needs_no_numba(cold) -> None:
    processes, ((before, _), _) = cold
    found, words = processes.finish(processes.start())
    assert found.pop("has_numba") is False and words == ""
    assert found == {name: before[name] for name in found}


def test_damaged_files_are_compiled_again(cold) -> None:
    processes, ((before, _), _) = cold
    files = sorted((processes.cache / "kernels").glob("*/*.o"))
    files[0].write_bytes(files[0].read_bytes()[:-100])
    files[1].write_bytes(b"something else")
    found, _ = processes.finish(processes.start())
    assert found == before, "and numba was there"
    found, _ = processes.finish(processes.start())
    assert not found["has_numba"], "and wrote them anew"


def test_bits_are_those_of_the_compilers_own_linker() -> None:
    from numba import cfunc

    realize(_elementwise_kernel._function)
    made = cfunc(_elementwise_kernel._numba_signature(), error_model="numpy")(
        _elementwise_kernel._function
    )
    rng = np.random.default_rng(1)
    gate, up = rng.standard_normal((2, 7, 80)).astype(np.float32)
    outs = []
    for address in (_elementwise_kernel.address, int(made.address)):
        pool, step, out = ThreadPool(1), PassArgs(7, 1), np.zeros_like(gate)
        program = Program(pool)
        record_silu_mul(program, step, gate, up, out)
        program._rows[0][0] = address
        step.control[0] = 7
        program.run()
        outs.append(out.tobytes())
    assert outs[0] == outs[1] and _elementwise_kernel.address != made.address


def _all_compiled() -> list[Compiled]:
    names = [path.stem for path in Path(draftree.kernels.cpu.__path__[0]).glob("*.py")]
    modules = [import_module(f"draftree.kernels.cpu.{name}") for name in names]
    found = {id(v): v for m in modules for v in vars(m).values() if isinstance(v, Compiled)}
    types = [int(qtype) for qtype in QuantType]
    blocks = [t for t in types if block_layout(QuantType(t)) is not None]
    forms, isas = range(len(ALL_FORMS)), range(len(ALL_ISAS))
    made: list[Kernel] = [
        *(_embed_kernel(t) for t in types),
        *(_pack_float_kernel(t) for t in types),
        *(_pack_quant_kernel(*each) for each in product(blocks, forms, isas)),
        *(_linear_kernel(*each) for each in product(forms, isas, (4, 8, 16))),
    ]
    return [*found.values(), *made]


def _identity(compiled: Compiled) -> tuple[object, ...]:
    """All that can make a difference, as it is; sizes may make a kernel the same for two sets."""
    function = compiled._function
    closed = [(type(c.cell_contents), c.cell_contents) for c in function.__closure__ or ()]
    return function.__module__, function.__qualname__, *function.__code__.co_freevars, *closed


def test_no_two_kernels_have_the_same_key() -> None:
    compiled = _all_compiled()
    identities = {each.key: _identity(each) for each in compiled}
    assert len(identities) == len(set(map(_identity, compiled))) > 500
    assert all(identities[each.key] == _identity(each) for each in compiled)


def _adder(amount: object) -> Callable[[int], int]:
    def add(x: int) -> int:
        return x + amount  # type: ignore[operator]

    return add


def test_a_key_says_what_is_closed_over() -> None:
    keys = [native("int -> int")(_adder(amount)).key for amount in (1, 2, True, 1.0, "1")]
    assert len(set(keys)) == 5
    assert native("int -> int")(_adder(1)).key == keys[0]
    assert native("int -> float")(_adder(1)).key != keys[0]
    with pytest.raises(AssertionError):
        _ = native("int -> int")(_adder(_adder(1))).key


def test_functions_of_one_name_have_keys_of_their_own() -> None:
    def make(twice: bool) -> Callable[[int], int]:
        if twice:

            def f(x: int) -> int:
                return x * 2
        else:

            def f(x: int) -> int:
                return x * 3

        return f

    assert native("int -> int")(make(True)).key != native("int -> int")(make(False)).key


def test_without_a_folder_code_is_compiled_in_memory(tmp_path, monkeypatch, caplog) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setattr(kernel_module, "code_dir", lambda: tmp_path / "file" / "kernels")
    assert native("int -> int")(_adder(40))(2) == 42
    assert native("int -> int")(_adder(41))(2) == 43
    assert len(caplog.records) == 1 and "every start" in caplog.records[0].message


def test_code_that_cannot_be_linked_is_used_as_numba_links_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(kernel_module, "code_dir", lambda: tmp_path / "kernels")
    monkeypatch.setattr(kernel_module, "load_code", lambda symbol, code: None)
    assert native("int -> int")(_adder(40))(2) == 42
    assert not list(tmp_path.rglob("*.o"))


@pytest.mark.parametrize("array", ["np.zeros(3)", "np.zeros(6, np.float32)[::2]"])
def test_another_array_ends_the_process(array: str) -> None:
    lines = (
        "import numpy as np",
        "from draftree.kernels.cpu.select import choose_greedy",
        "choose_greedy(np.zeros(3, np.float32))",
        "print('ready', flush=True)",
        f"choose_greedy({array})",
    )
    source = "\n".join(lines)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.stdout == "ready\n" and done.returncode < 0


@pytest.mark.parametrize("isa", [AVX2, NEON_DOTPROD, NEON_I8MM], ids=lambda isa: isa.name)
def test_the_compiler_is_told_what_an_arm64_processor_has(monkeypatch, isa) -> None:
    from numba.core import config

    monkeypatch.setattr(config, "CPU_FEATURES", None)
    monkeypatch.setattr(kernel_module, "current_isa", lambda: isa)
    kernel_module._name_features()
    told = (config.CPU_FEATURES or "").split(",")
    assert ("+dotprod" in told, "+i8mm" in told) == (isa != AVX2, isa == NEON_I8MM)
    monkeypatch.setattr(config, "CPU_FEATURES", "+neon")  # somebody's wish
    kernel_module._name_features()
    assert config.CPU_FEATURES == "+neon"
