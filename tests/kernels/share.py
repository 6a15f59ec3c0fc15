"""The kernels of the CPU, compiled by the processes of a run together.

They would all meet the same missing kernels at the same time, and compile each of them. So before
the first test one begins at the front of the list, the next at its end, and neither compiles what
is on disk by then. A run that finds all of them there reads thirty small files.
"""

from importlib import import_module
from pkgutil import iter_modules

from draftree.kernels import cpu
from draftree.kernels.cpu.kernel import Compiled, code_dir
from draftree.kernels.cpu.store import read_code


def list_kernels() -> list[Compiled]:
    """Those that stand in a module; others are made for a format of weights."""
    modules = [
        import_module(f"{cpu.__name__}.{found.name}") for found in iter_modules(cpu.__path__)
    ]
    members = [value for module in modules for value in vars(module).values()]
    kernels = {member.key: member for member in members if isinstance(member, Compiled)}
    return sorted(kernels.values(), key=lambda kernel: (kernel.name, kernel.key))


def compile_share(number: int) -> None:
    """What is missing, from the front for a process with an even number, from the end otherwise."""
    kernels = list_kernels()
    for kernel in kernels if number % 2 == 0 else reversed(kernels):
        if read_code(code_dir(), kernel.name, kernel.key) is None:
            assert kernel.address
