"""The machine that a measurement was taken on: what it is, and which software ran."""

import hashlib
import importlib.metadata
import platform
import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from draftree.memory import machine_memory, usable_cores

_PACKAGES: Final = ("draftree", "llvmlite", "numba", "numpy", "tokenizers", "torch", "xllamacpp")
_APART: Final = {"batch.py"}  # what one request alone takes does not depend on it


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
    gpu_kernels: str  # digest of the GPU kernels' sources


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
        packages=_package_versions(),
        kernels=code_dir().name,
        gpu_kernels=_digest_gpu_kernels(),
    )


def _digest_gpu_kernels() -> str:
    folder = Path(__file__).parents[1] / "kernels" / "cuda"
    digest = hashlib.sha256()
    for path in sorted((*folder.glob("*.py"), *folder.rglob("*.cu"))):
        if path.name in _APART:
            continue
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _package_versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
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
