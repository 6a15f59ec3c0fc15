"""What the system says of the processor is what the compiler finds."""

from types import SimpleNamespace

import llvmlite.binding as llvm
import pytest

from draftree.kernels.cpu import isa
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
        pytest.skip("processor: the compiler does not list what this processor has")
    said = set(describe_cpu().split())
    assert {WORDS[name] for name in known if features[name]} == {
        WORDS[name] for name in known if WORDS[name] in said
    }


def test_variants_of_arm64(monkeypatch) -> None:
    monkeypatch.setattr(isa.platform, "machine", lambda: "aarch64")
    for words, names in (
        ("fp asimd asimddp i8mm bf16", ["neon-i8mm", "neon-dotprod", "portable"]),
        ("fp asimd asimddp", ["neon-dotprod", "portable"]),
        ("fp asimd", ["portable"]),
    ):
        monkeypatch.setattr(isa, "describe_cpu", lambda words=words: words)
        assert [each.name for each in isa.supported_isas()] == names


def test_macos_is_asked_what_its_processor_has(monkeypatch) -> None:
    def ask(name, value, size, new, new_size):
        assert size._obj.value == 8 and new is None and new_size == 0
        value._obj.value = 1
        return -1 if name.endswith(b"I8MM") else 0

    monkeypatch.setattr(isa.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(isa.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(isa.ctypes, "CDLL", lambda _: SimpleNamespace(sysctlbyname=ask))
    assert isa._apple_words() == ["asimddp"]


def test_an_unknown_variant_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("DRAFTREE_ISA", "avx5")
    with pytest.raises(ValueError, match=r"'avx5'; known are amx, .*avx2, .*portable"):
        isa.current_isa.__wrapped__()
    monkeypatch.setenv("DRAFTREE_ISA", "portable")
    assert isa.current_isa.__wrapped__() == isa.PORTABLE
