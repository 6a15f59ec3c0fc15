"""How a text is read to be scored: by which layers, in which passes, in what memory."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftree import Engine
from draftree.config import EngineConfig, GpuInfo, resolve
from draftree.engine.scoring import choose_chunk, choose_layers
from draftree.errors import CapacityError
from draftree.memory import scoring_bytes
from draftree.models.model_config import read_model_config
from draftree.weights.file import open_checkpoint

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
    plan = resolve(EngineConfig(device="cuda"), model, 8 * GIB, GpuInfo(0, "GPU", 8 * GIB))

    def need(chunk: int, *, is_loaded: bool) -> int:
        return scoring_bytes(model, 4, 4096, chunk, is_loaded=is_loaded)

    for is_loaded in (True, False):
        for chunk in (4096, 2048, 1024, 512):
            tight = replace(plan, memory_limit=plan.memory.total + need(chunk, is_loaded=is_loaded))
            assert choose_chunk(tight, model, 4, 4096, is_loaded=is_loaded) == chunk
    tight = replace(plan, memory_limit=plan.memory.total + need(512, is_loaded=True) - 1)
    with pytest.raises(CapacityError, match=r"GiB more of the GPU.*--compress-with"):
        choose_chunk(tight, model, 4, 4096, is_loaded=True)
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
