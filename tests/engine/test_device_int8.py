"""A model with K-quants on a GPU whose products read int8 activations: near 16 bits, and a token's
bits do not depend on what shares its pass, nor on drafting.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("gguf", reason="gguf is not installed")

from draftree.bench.synthetic import SHAPES, write_pair
from draftree.config import EngineConfig, GpuInfo
from draftree.core import Request, SamplingParams
from draftree.engine.engine import TokenEngine
from draftree.kernels.cuda.compile import Gpu
from tests.cuda import CudaPlace, logits_of, relative_error

IDS = (5, 9, 200, 31, 77)
HOT = SamplingParams(temperature=3.0, seed=3)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Path]:
    """Q4_K, Q5_K and Q6_K as in a Q4_K_M file, and a BF16 draft."""
    target, draft = SHAPES["tiny"]
    small = replace(target, num_layers=4, vocab=256), replace(draft, num_layers=1, num_features=1)
    monkeypatch.setitem(SHAPES, "tiny", small)  # type: ignore[misc]
    return write_pair("tiny", tmp_path)


def test_passes(pair: tuple[Path, Path], any_gpu: Gpu) -> None:
    halves, bytes_ = (
        CudaPlace(any_gpu, max_tokens=64, allow_int8=allow).open_target(pair[0])
        for allow in (False, True)
    )
    together = logits_of(bytes_, IDS, len(IDS))
    assert np.array_equal(together[:3], logits_of(bytes_, IDS[:3], 1)), "not batch-invariant"
    assert 1e-4 < relative_error(together, logits_of(halves, IDS, len(IDS))) < 0.05


@pytest.mark.long
def test_drafting_changes_no_token(
    pair: tuple[Path, Path], any_gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftree.engine import parts as parts_module
    from draftree.kernels.cuda import compile as compile_module

    monkeypatch.setattr(parts_module, "find_gpu", lambda device: GpuInfo(0, "a GPU", 2**36))
    monkeypatch.setattr(compile_module, "gpu", lambda index: any_gpu)
    texts = []
    for budget in (0, 7):
        config = EngineConfig(budget=budget, max_ctx=256, chunk=64, activations="int8")
        engine = TokenEngine.open(pair[0], config, draft=pair[1])
        request = Request(IDS, 60 if any_gpu.is_real else 5, HOT)
        texts.append([event.token for event in engine.generate(request)])
        engine.close()
    assert texts[0] == texts[1]
