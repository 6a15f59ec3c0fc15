"""A warmed engine answers as one that was not, and its first requests find all that they need."""

import pickle
import weakref

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from draftree.config import EngineConfig, GpuInfo
from draftree.core import Request, SamplingParams
from draftree.engine import parts as parts_module
from draftree.engine.engine import TokenEngine
from draftree.kernels.cuda import compile as cuda_compile
from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.graph import Timestamp
from tests.decode.rule import RuleGrammar
from tests.made import make_draft
from tests.tiny import tiny_path

LONG = tuple(int(t) for t in np.random.default_rng(3).integers(0, 250, 40))
REQUESTS = (
    Request(LONG, 4),
    Request((5, 9, 200, 31), 3, SamplingParams(temperature=3.0, top_p=0.9, seed=4)),
    Request((*LONG, 7, 8), 2),
)
GRAMMAR = RuleGrammar(512, seed=5)
WARM = SamplingParams(temperature=2.0, top_p=0.9, seed=4)
OTHERS = (
    Request(LONG, 2, logprobs=3),
    Request(LONG, 2, SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5)),
    Request(LONG, 2, WARM, logit_bias=((7, 2.0),)),
    Request(LONG, 3, grammar=GRAMMAR),
    Request(LONG, 3, WARM, grammar=GRAMMAR, logprobs=2),
)


def answer(engine: TokenEngine) -> list[object]:
    """All that the first requests bring and leave behind."""
    found: list[object] = []
    for request in REQUESTS:
        stream = engine.generate(request)
        found.append([(event.token, event.source, event.round_index) for event in stream])
        usage = stream.usage
        found += [usage.cached_tokens, usage.rounds.num_rounds, usage.rounds.num_drafted]
        found += [engine.kept_bytes, engine.swapped_bytes, engine.target.num_forwards]
    return found


@pytest.fixture
def seen(any_gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> list[KernelSource]:
    """Kernels that were asked for, in order; engines run on that GPU."""
    asked: list[KernelSource] = []
    load = cuda_compile._load

    def note(source: KernelSource, device: Gpu):
        asked.append(source)
        return load(source, device)

    monkeypatch.setattr(cuda_compile, "_load", note)
    monkeypatch.setattr(cuda_compile, "gpu", lambda index: any_gpu)
    monkeypatch.setattr(parts_module, "find_gpu", lambda device: GpuInfo(0, "a GPU", 2**36))
    return asked


def open_on_gpu(*, warm_up: bool, budget: int | str = 8, relative: str = "") -> TokenEngine:
    config = EngineConfig(budget=budget, max_ctx=128, chunk=32, warm_up=warm_up)
    draft = make_draft("F16", relative=relative)
    return TokenEngine.open(tiny_path("qwen35-mtp"), config, draft=draft)


def test_nothing_is_left_on_a_gpu(seen: list[KernelSource]) -> None:
    warmed, cold = open_on_gpu(warm_up=True), open_on_gpu(warm_up=False)
    assert warmed.target.state.committed == warmed.kept_bytes == warmed.target.num_forwards == 0
    assert answer(warmed) == answer(cold)
    a, b = (engine.target.state.snapshot() for engine in (warmed, cold))
    assert a.tokens == b.tokens
    for left, right in zip(a.parts, b.parts, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(left, right, strict=True))


@pytest.mark.parametrize("relative", ["", "selector"])
def test_controllers_know_nothing_and_first_requests_need_no_other_kernels(
    seen: list[KernelSource], any_gpu: Gpu, monkeypatch: pytest.MonkeyPatch, relative: str
) -> None:
    """Kernels that the rehearsal lists are all that are ever loaded, and nothing is run for it."""
    wait = Timestamp.wait_since

    def wait_since(self: Timestamp, earlier: Timestamp) -> float:
        wait(self, earlier)
        return 5.0  # there is a clock

    monkeypatch.setattr(Timestamp, "wait_since", wait_since)
    listed: list[KernelSource] = []
    collect = any_gpu.rehearsal.collect

    def noting():
        context = collect()

        class Noting:
            def __enter__(self):
                self.launches = context.__enter__()
                self.before = len(seen)
                return self.launches

            def __exit__(self, *error):
                assert len(seen) == self.before, "a kernel was loaded"
                listed.extend({launch.source for launch in self.launches})
                return context.__exit__(*error)

        return Noting()

    monkeypatch.setattr(any_gpu.rehearsal, "collect", noting)
    options = {"budget": "auto", "relative": relative}
    engine = open_on_gpu(warm_up=True, **options)
    assert len(listed) > 20
    assert any(source.name == "edges_kernel" for source in listed) == bool(relative)
    warmed, cold = engine._use.decoders, open_on_gpu(warm_up=False, **options)._use.decoders
    for name in ("_host", "_device", "_device_trees"):
        assert pickle.dumps(getattr(warmed, name)) == pickle.dumps(getattr(cold, name))
    seen.clear()
    answer(engine)
    for request in OTHERS:
        assert list(engine.generate(request))
    assert seen or any_gpu.is_real, "a real GPU replays graphs"
    assert set(seen) <= set(listed)


def test_kernels_are_compiled_once_and_counted(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_compile, "_cubin_path", lambda source, arch: tmp_path / source.name)
    loaded: list[bool] = []

    def compile_one(text: str, name: str, arch: int) -> bytes:
        assert loaded, "several threads would load the compiler"
        return name.encode()

    monkeypatch.setattr(cuda_compile, "_load_compiler", lambda: loaded.append(True))
    monkeypatch.setattr(cuda_compile, "_compile", compile_one)
    sources, counts = [KernelSource(f"kernel_{i}", ()) for i in range(5)], []
    (tmp_path / "kernel_3").write_bytes(b"before")
    cuda_compile.compile_missing(sources, 80, lambda *count: counts.append(count))
    assert counts == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert (tmp_path / "kernel_4").read_bytes() == b"kernel_4"
    assert (tmp_path / "kernel_3").read_bytes() == b"before"
    cuda_compile.compile_missing(sources, 80, lambda *count: counts.append(count))
    assert len(counts) == 4


def test_a_rehearsal_lets_arrays_go(any_gpu: Gpu) -> None:
    """Weights that long passes expand, layer by layer, would not fit all at once."""
    with any_gpu.rehearsal.collect() as launches:
        array = torch.zeros(4, device=any_gpu.place)
        seen_again = weakref.ref(array)
        load_kernel(KernelSource("some_kernel", ()), any_gpu).launch((1,), 32, array)
        del array
        assert seen_again() is None
    assert [launch.source.name for launch in launches] == ["some_kernel"]
