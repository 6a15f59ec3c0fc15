"""Which pages of a library may be given back, and that compiling goes on afterwards."""

import sys
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from draftree.kernels.cpu.kernel import native
from draftree.kernels.cpu.release import clean_ranges, release_memory

MAPS = """\
1000-3000 r--p 00000000 fe:01 77                         /lib/libllvmlite.so
Rss:                   8 kB
Anonymous:             0 kB
VmFlags: rd mr mw me sd
3000-9000 r-xp 00002000 fe:01 77                         /lib/libllvmlite.so
Anonymous:             0 kB
9000-a000 r--p 00008000 fe:01 77                         /lib/libllvmlite.so
Anonymous:             4 kB
a000-b000 rw-p 00009000 fe:01 77                         /lib/libllvmlite.so
Anonymous:             0 kB
b000-c000 r-xp 00000000 fe:01 78                         /lib/libother.so
Anonymous:             0 kB
c000-d000 rw-p 00000000 00:00 0
Anonymous:             0 kB
"""


def test_only_what_the_file_holds_too() -> None:
    """Not what is writable, nor what the loader wrote to, nor another library."""
    assert list(clean_ranges(MAPS, "libllvmlite")) == [(0x1000, 0x3000), (0x3000, 0x9000)]


def test_the_compiler_works_on() -> None:
    release_memory()

    @native("int int -> int")
    def add(a: int, b: int) -> int:
        return a + b

    assert add(2, 3) == 5


@pytest.mark.skipif(sys.platform != "linux", reason="system: there is no /proc")
def test_its_code_leaves_memory() -> None:
    def resident() -> int:
        name, total = "", 0
        for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
            name = line if not line.split()[0].endswith(":") else name
            if "libllvmlite" in name and " r-xp " in name and line.startswith("Rss:"):
                total += int(line.split()[1])
        return total

    llvm.get_host_cpu_features()
    machine = llvm.Target.from_default_triple().create_target_machine()
    machine.emit_object(llvm.parse_assembly("define i32 @one() { ret i32 1 }"))
    before = resident()
    release_memory()
    assert before > 1000 and resident() < before // 4
