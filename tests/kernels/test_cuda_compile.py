"""Every CUDA source compiles for every kind of chip, without a GPU; the cache on disk is used."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from draftree.kernels.cuda import compile as cuda_compile
from draftree.kernels.cuda.compile import Gpu, KernelSource, compile_cubin
from draftree.kernels.cuda.layout import unit_format
from draftree.kernels.cuda.linear import plan_linear
from draftree.kernels.cuda.pack import repack_source
from draftree.kernels.cuda.prefill import expand_source
from draftree.kernels.cuda.prepare import RowOp, RowPlan, prepare_source
from draftree.kernels.quant.formats import QuantType
from tests.kernels.cuda_sources import all_sources
from tests.kernels.emulator import Snippet
from tests.needs import has_package, needs

# Shared memory a block and a multiprocessor has, in bytes, on each kind of chip.
CHIPS = {
    80: (166912, 167936),
    86: (101376, 102400),
    89: (101376, 102400),
    90: (232448, 233472),
    120: (101376, 102400),
}


def has_nvrtc() -> bool:
    if not (has_package("cuda.core") and has_package("cuda.bindings")):
        return False
    from cuda.bindings import nvrtc

    try:
        nvrtc.nvrtcVersion()
    except Exception:  # the package is there, the library it binds is not
        return False
    return True


pytestmark = needs("NVRTC (extra `gpu`)", has_nvrtc())


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path))
    return tmp_path / "cuda"


def device(arch: int) -> Gpu:
    per_block, per_sm = CHIPS[arch]
    return Gpu(0, arch, 100, per_sm, per_block)


@pytest.mark.parametrize("arch", CHIPS)
def test_sources_compile_for_every_chip(arch: int) -> None:
    for source in all_sources(device(arch)):
        assert compile_cubin(source, arch)[:4] == b"\x7fELF", source.name


def test_every_kernel_is_listed() -> None:
    folder = Path(cuda_compile.__file__).parent / "source"
    kernels = {
        name
        for path in folder.glob("*.cu")
        for head in re.split("KERNEL|__global__", path.read_text(encoding="utf-8"))[1:]
        for name in re.findall(r"(\w+_kernel)\s*\(", head)[:1]
    }
    assert kernels == {source.name for source in all_sources(device(90))}


@pytest.mark.parametrize(
    "qtype", [q for q in QuantType if unit_format(q).qtype == q], ids=lambda qtype: qtype.name
)
def test_every_format_compiles(qtype: QuantType) -> None:
    form = unit_format(qtype)
    for source in (
        plan_linear(form, 1, device(90)).source,
        repack_source("row_scale_kernel", qtype, form),
        expand_source("expand_kernel", form),
    ):
        assert compile_cubin(source, 90)[:4] == b"\x7fELF"


@pytest.mark.parametrize("use_bulk", [False, True])
def test_both_ways_to_copy_compile_for_many_tokens(use_bulk: bool) -> None:
    plan = plan_linear(unit_format(QuantType.Q6_K), 64, device(90))
    assert compile_cubin(replace(plan, use_bulk=use_bulk).source, 90)[:4] == b"\x7fELF"


@pytest.mark.parametrize("arch", [80, 120])
def test_instructions_that_no_kernel_uses_yet_compile(arch: int) -> None:
    calls = [f"load_matrix_{kind}(r, shared);" for kind in ("x2", "x4", "x2_trans", "x4_trans")]
    calls += ["meet_some(1, 32);", "copy16_async(shared, out);", "commit_copies();"]
    body = "".join([*calls, "wait_copies<1>(); out[threadIdx.x] = r[threadIdx.x & 3];"])
    head = 'extern "C" __global__ void kernel(u32* out) { __shared__ __align__(16) u8 shared[512];'
    source = Snippet("kernel", ("bits",), code=f"{head} u32 r[4]; {body} }}")
    assert compile_cubin(source, arch)[:4] == b"\x7fELF"


def test_machine_code_is_made_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = KernelSource("read_kernel", ("bits", "read"))
    code = compile_cubin(source, 90)
    assert [path.read_bytes() for path in own_cache.iterdir()] == [code]
    monkeypatch.setattr(cuda_compile, "_compile", lambda *_: pytest.fail("compiled again"))
    assert compile_cubin(source, 90) == code


def test_other_macros_or_chips_are_other_code(own_cache: Path) -> None:
    in_rows, in_tiles = (
        prepare_source(RowOp.PLAIN, RowPlan(1, 4, 1), form=form) for form in ("IN_ROWS", "")
    )
    for source, arch in ((in_rows, 90), (in_tiles, 90), (in_rows, 80)):
        compile_cubin(source, arch)
    assert len(list(own_cache.iterdir())) == 3


def test_old_chips_are_refused() -> None:
    with pytest.raises(ValueError, match=r"8\.0 or newer"):
        compile_cubin(KernelSource("read_kernel", ("bits", "read")), 75)
