"""Devices that cannot be had are refused in a sentence."""

import pytest

from draftree.config import EngineConfig
from draftree.engine.engine import TokenEngine
from draftree.errors import DeviceError
from draftree.kernels.cpu import isa
from tests.tiny import make_qwen2


def test_an_unknown_kernel_variant_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("DRAFTREE_ISA", "avx5")
    monkeypatch.setattr(isa, "current_isa", isa.current_isa.__wrapped__)
    with pytest.raises(DeviceError, match="DRAFTREE_ISA is 'avx5'; known are"):
        TokenEngine.open(make_qwen2(), EngineConfig(device="cpu", max_ctx=64, threads=1))
