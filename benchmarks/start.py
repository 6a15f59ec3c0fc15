"""Warm start: from the start of the process `draftree run -n 1` to the first bytes of text.

Warm means that kernels are compiled and files are in the page cache: one run before the others sees
to that; and that the package's bytecode is there, as installing leaves it. A further run with `-X
importtime` says what imports cost.
"""

import compileall
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import draftree
from draftree.bench.median import Report, Samples, summarize
from draftree.bench.worker import Child
from draftree.errors import BenchError

_PROMPT: Final = "def fibonacci(n):"
_IMPORT_LINE: Final = re.compile(r"import time:\s*(\d+) \|\s*\d+ \|\s*([\w.]+)")
_SHOWN: Final = 12
_PACKAGE: Final = Path(draftree.__file__).parent


@dataclass(frozen=True, slots=True)
class StartMeasures:
    first_token_s: Samples
    exit_s: Samples
    interpreter_s: Samples  # python that does nothing
    open_s: Samples  # opening the engine, imports done
    imports_ms: dict[str, float]  # by package, largest first; slower than real, since it is traced

    def headline(self) -> dict[str, Any]:
        return {"first_token_s": self.first_token_s.median}


def measure_start(path: Path, threads: int, rounds: int, report: Report) -> StartMeasures:
    command = run_command(path, threads)
    firsts, exits, interpreters, opens = [], [], [], []
    report("start: warm-up")
    compileall.compile_dir(_PACKAGE, quiet=2)
    _time_first_byte(command)
    for number in range(rounds):
        report(f"start: {number + 1} of {rounds}")
        first, end = _time_first_byte(command)
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        interpreters.append(time.perf_counter() - begin)
        with Child("draftree.bench.subject", "draftree") as child:
            opens.append(child.ask("load", path=str(path.resolve()), threads=threads) / 1000)
        firsts.append(first)
        exits.append(end)
    report("start: imports")
    traced = subprocess.run(
        [sys.executable, "-X", "importtime", *command[1:]], capture_output=True, text=True
    )
    return StartMeasures(
        first_token_s=summarize(firsts, "s"),
        exit_s=summarize(exits, "s"),
        interpreter_s=summarize(interpreters, "s"),
        open_s=summarize(opens, "s"),
        imports_ms=group_imports(traced.stderr),
    )


def run_command(path: Path, threads: int) -> list[str]:
    options = ["-p", _PROMPT, "-n", "1", "--threads", str(threads)]
    return [sys.executable, "-m", "draftree", "run", str(path.resolve()), *options]


def group_imports(trace: str) -> dict[str, float]:
    """Milliseconds by top-level package from the output of -X importtime; small ones together."""
    totals: dict[str, float] = {}
    for own_us, module in _IMPORT_LINE.findall(trace):
        package = module.split(".")[0]
        is_standard = package in sys.stdlib_module_names
        name = "standard library" if is_standard else package
        totals[name] = totals.get(name, 0.0) + int(own_us) / 1000
    ordered = sorted(totals.items(), key=lambda item: -item[1])
    shown = {name: round(ms, 1) for name, ms in ordered[:_SHOWN]}
    rest = sum(ms for _, ms in ordered[_SHOWN:])
    return shown | ({"others": round(rest, 1)} if rest else {})


def _time_first_byte(command: list[str]) -> tuple[float, float]:
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    byte = process.stdout.read(1)
    first = time.perf_counter() - begin
    _, errors = process.communicate()
    end = time.perf_counter() - begin
    if process.returncode != 0 or not byte:
        words = errors.decode("utf-8", "replace").strip()[-200:]
        raise BenchError(f"`draftree run` failed with status {process.returncode}: {words}")
    return first, end
