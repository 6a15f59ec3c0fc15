"""What the system says of the processor is what the compiler finds."""

import llvmlite.binding as llvm
import pytest

from draftree.kernels.cpu.isa import describe_cpu

WORDS = {
    "avx512vnni": "avx512_vnni",
    "avx512vl": "avx512vl",
    "avxvnni": "avx_vnni",
    "avx2": "avx2",
    "amx-int8": "amx_int8",
    "gfni": "gfni",
    "dotprod": "asimddp",
}


def test_the_system_and_the_compiler_agree() -> None:
    features = llvm.get_host_cpu_features()
    known = {name for name in WORDS if name in features}
    if not known:
        pytest.skip("the compiler does not list what this processor has")
    said = set(describe_cpu().split())
    assert {WORDS[name] for name in known if features[name]} == {
        WORDS[name] for name in known if WORDS[name] in said
    }
