"""How a text is read to be scored: by which layers, in which passes, in what memory."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from draftree import Engine
from draftree.config import EngineConfig, GpuInfo, resolve
from draftree.engine import parts as parts_module
from draftree.engine.engine import TokenEngine
from draftree.engine.scoring import choose_chunk, choose_layers
from draftree.errors import CapacityError
from draftree.kernels.cuda import compile as cuda_compile
from draftree.kernels.cuda.compile import Gpu
from draftree.memory import scoring_bytes
from draftree.models.key_reader import KeyReader
from draftree.models.load import load_model
from draftree.models.model_config import read_model_config
from draftree.prefill.score import AttentionScorer
from draftree.weights.file import open_checkpoint
from tests.cuda import CudaPlace
from tests.tiny import MAX_CTX, new_ops, tiny_path

GIB = 2**30


@pytest.mark.parametrize(
    ("num_layers", "attention", "expected"),
    [
        (64, range(3, 64, 4), 8),  # a hybrid: two layers that attend
        (24, range(3, 24, 4), 4),
        (30, range(30), 4),
        (24, range(24), 3),
        (4, range(4), 1),
        (8, [0], 1),  # none behind the first eighth
    ],
)
def test_a_target_scores_by_its_first_layers(num_layers: int, attention: Any, expected: int):
    model = SimpleNamespace(num_layers=num_layers, attention_layers=tuple(attention))
    assert choose_layers(model) == expected  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model(smollm2_path: Path):
    return read_model_config(open_checkpoint(smollm2_path))


def test_passes_are_as_long_as_memory_allows(model) -> None:
    config = EngineConfig(device="cuda", batching="off")
    plan = resolve(config, model, 8 * GIB, GpuInfo(0, "GPU", 8 * GIB))

    def need(chunk: int, *, is_loaded: bool) -> int:
        return scoring_bytes(model, 4, 4096, chunk, is_loaded=is_loaded)

    for is_loaded in (True, False):
        for chunk in (4096, 2048, 1024, 512):
            tight = replace(plan, memory_limit=plan.memory.total + need(chunk, is_loaded=is_loaded))
            assert choose_chunk(tight, model, 4, 4096, is_loaded=is_loaded) == chunk
    tight = replace(plan, memory_limit=plan.memory.total + need(512, is_loaded=True) - 1)
    shared = replace(tight, memory_limit=tight.memory_limit + 1, batch_bytes=1)
    for refused in (tight, shared):
        with pytest.raises(CapacityError, match=r"GiB more of the GPU.*--compress-with"):
            choose_chunk(refused, model, 4, 4096, is_loaded=True)
    assert choose_chunk(plan, model, 4, 700, is_loaded=True) == 700


def test_weights_that_are_there_are_not_counted_again(model) -> None:
    there, new = (scoring_bytes(model, 30, 4096, 512, is_loaded=known) for known in (True, False))
    assert new - there >= model.weight_bytes
    assert there < scoring_bytes(model, 30, 4096, 1024, is_loaded=True)
    assert scoring_bytes(model, 4, 4096, 512, is_loaded=True) < there


def test_the_targets_first_layers_read_and_others_all(smollm2_path: Path) -> None:
    engine = Engine.open(str(smollm2_path), max_ctx=256, draft="none")
    try:
        for checkpoint, count in ((None, 4), (open_checkpoint(smollm2_path), 30)):
            scorer: Any = engine.tokens.new_scorer(checkpoint)
            assert len(scorer._scorer._reader.heads.layers) == count
            assert scorer.score([1] * 100, [2, 3]).shape == (4,)
    finally:
        engine.close()


def test_on_a_gpu_nothing_but_scores_leaves_it(
    any_gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, text = tiny_path("qwen3"), np.random.default_rng(2).integers(5, 250, 230).tolist()
    cpu = TokenEngine.open(path, EngineConfig(device="cpu", max_ctx=256, math="exact"))
    monkeypatch.setattr(cuda_compile, "gpu", lambda index: any_gpu)
    monkeypatch.setattr(parts_module, "find_gpu", lambda device: GpuInfo(0, "a GPU", 2**36))
    gpu = TokenEngine.open(path, EngineConfig(max_ctx=256, chunk=64))
    copied: list[int] = []
    copy = torch.Tensor.cpu

    def count(self: Any, *args: Any, **options: Any) -> Any:
        copied.append(self.numel())
        return copy(self, *args, **options)

    for checkpoint in (None, open_checkpoint(path)):
        own, other = (engine.new_scorer(checkpoint) for engine in (cpu, gpu))
        expected = own.score(text, [7, 8, 9])
        monkeypatch.setattr(torch.Tensor, "cpu", count)
        found = other.score(text, [7, 8, 9])
        monkeypatch.setattr(torch.Tensor, "cpu", copy)
        assert found.shape == (8,) and np.allclose(found, expected, rtol=0.02)
        assert sum(copied) == len(found)
        copied.clear()
    cpu.close()
    gpu.close()


@pytest.mark.parametrize("name", ["qwen3", pytest.param("qwen35", marks=pytest.mark.long)])
def test_a_gpu_finds_the_cpus_scores(name: str, any_gpu: Gpu) -> None:
    """Over passes of all kinds: a first one, a later one, and a whole window at once."""
    text, question = np.split(np.random.default_rng(5).integers(5, 400, 192), [180])

    def score(ops: Any, chunk: int) -> np.ndarray:
        model = load_model(open_checkpoint(tiny_path(name)), ops)
        reader = KeyReader(model, ops, MAX_CTX, chunk)
        return AttentionScorer(reader, ops).score(text.tolist(), question.tolist())

    expected = score(new_ops(exact=True), 64)
    for chunk in (128, 192):
        found = score(CudaPlace(any_gpu, max_tokens=chunk).new_ops(), chunk)
        assert np.allclose(found, expected, rtol=0.02)
        assert np.array_equal(np.argsort(found), np.argsort(expected))
