"""The machine that a measurement was taken on: what it is, and which software ran.

Two results may be compared only if their machines have the same fingerprint. No host names.
"""

import importlib.metadata
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from draftree.bench.fault import BenchError
from draftree.config import machine_memory, usable_cores

_PACKAGES: Final = ("draftree", "llvmlite", "numba", "numpy", "tokenizers", "torch", "xllamacpp")
_IDENTITY: Final = ("cpu", "num_cores", "architecture", "memory_gib")


@dataclass(frozen=True, slots=True)
class Machine:
    cpu: str
    num_cores: int  # that this process may use
    architecture: str
    isa: str  # kernel variant
    memory_gib: int
    system: str
    python: str
    packages: dict[str, str]
    kernels: str  # digest of the CPU kernels' sources


def describe_machine() -> Machine:
    from draftree.kernels.cpu.isa import current_isa
    from draftree.kernels.cpu.kernel import code_dir

    return Machine(
        cpu=_cpu_name(),
        num_cores=usable_cores(),
        architecture=platform.machine(),
        isa=current_isa().name,
        memory_gib=round(machine_memory() / 2**30),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        packages=dict(_package_versions()),
        kernels=code_dir().name,
    )


def fingerprint(machine: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes two machines of result files the same; software may differ."""
    return tuple(machine[name] for name in _IDENTITY)


def check_same_machine(machines: Mapping[str, Mapping[str, Any]]) -> None:
    """machines by name of the result they belong to. Refuses any mixture, naming the odd ones."""
    if not machines:
        return
    names = list(machines)
    first = fingerprint(machines[names[0]])
    for name in names[1:]:
        other = fingerprint(machines[name])
        if other != first:
            raise BenchError(
                f"{names[0]} and {name} are from different machines ({_words(first)}; "
                f"{_words(other)}) and cannot be compared; measure both on one, or keep each "
                "machine's results in a folder of its own."
            )


def _words(identity: Iterable[Any]) -> str:
    cpu, num_cores, architecture, memory_gib = identity
    return f"{cpu}, {num_cores} cores, {architecture}, {memory_gib} GiB"


def _package_versions() -> list[tuple[str, str]]:
    found = []
    for name in _PACKAGES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        text = info.read_text(encoding="utf-8", errors="replace")
        if match := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
            return match[1].strip()
        parts = [
            match[1]
            for key in ("implementer", "part")
            if (match := re.search(rf"^CPU {key}\s*:\s*(\w+)$", text, re.MULTILINE))
        ]
        if parts:
            return f"{platform.machine()} {' '.join(parts)}"
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.stdout.strip():
            return answer.stdout.strip()
    return platform.processor() or platform.machine()
