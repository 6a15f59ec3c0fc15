"""Devices that cannot be had are refused in a sentence."""

import numpy as np
import pytest

from benchmarks.kv_coder import decode, encode
from draftree.config import EngineConfig
from draftree.core import Request
from draftree.engine.engine import TokenEngine
from draftree.errors import DeviceError
from draftree.kernels.cpu import isa
from draftree.kernels.quant.kv_format import VALUE_FORMATS
from tests.tiny import make_qwen2, tiny_path


def test_an_unknown_kernel_variant_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("DRAFTREE_ISA", "avx5")
    monkeypatch.setattr(isa, "current_isa", isa.current_isa.__wrapped__)
    with pytest.raises(DeviceError, match="DRAFTREE_ISA is 'avx5'; known are"):
        TokenEngine.open(make_qwen2(), EngineConfig(device="cpu", max_ctx=64, threads=1))


def _values_of(kv_k: str, kv_v: str) -> list[np.ndarray]:
    """The cached values of a short text, layer by layer."""
    config = EngineConfig(
        device="cpu", max_ctx=64, threads=1, budget=0, kv_k=kv_k, kv_v=kv_v, ngram="off"
    )
    engine = TokenEngine.open(tiny_path("qwen3"), config)
    list(engine.generate(Request(tuple(range(5, 25)), 1)))
    parts = engine.target.state.snapshot().parts
    engine.close()
    return [values[:, :20].astype(np.float32) for _, values, *_ in parts]


def test_a_cpu_rounds_to_the_formats_of_the_plan() -> None:
    full, rounded, mixed = _values_of("f16", "f16"), _values_of("q4", "q4"), _values_of("f16", "q4")
    form = VALUE_FORMATS["q4"]
    want = decode(encode(full[0], form), full[0].shape[-1], form)  # as yet nothing was read back
    for got in (rounded[0], mixed[0]):
        assert np.isclose(got, want, atol=2e-3 * np.abs(want).max()).mean() > 0.98
    assert not np.array_equal(rounded[0], full[0])
    assert not np.array_equal(rounded[1], mixed[1]), "keys are rounded too"
