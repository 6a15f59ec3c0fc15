"""A draft's worth, on tiny models."""

import pytest

from draftree.bench.dataset import Prompt
from draftree.bench.draft import Shape, measure_draft
from draftree.config import EngineConfig
from draftree.errors import BenchError
from tests.golden import golden
from tests.made import make_draft

SETS = {"a": [Prompt("one two one two", False), Prompt("x = 1", False)]}
CONFIG = EngineConfig("cpu", threads=1, max_ctx=128)


@pytest.mark.parametrize("kind", ["MTP", "JetSpec"])
def test_chains_and_trees(kind, say):
    path = golden("qwen35/tiny-qwen35-C-mtp-F16.gguf")
    name = "mtp" if kind == "MTP" else str(make_draft(relative="jetspec"))
    shapes = Shape.chain(3), Shape("tree of 9", 9, 0)
    config = EngineConfig("cpu", name, threads=1, max_ctx=128)
    found = measure_draft(path, SETS, 10, config, say, shapes)
    assert (found.kind, found.device, len(found.runs)) == (kind, "CPU", 4)
    assert all(run.num_equal == run.num_prompts == 2 for run in found.runs)
    assert found.headline()["all_equal"] is True
    for run in found.runs:
        depth = 3 if run.shape == "chain of 3" else 7
        assert run.acceptance_length >= 1.0 and len(run.accepted_by_depth) <= depth
        assert run.round_ms["draft"] > 0.0 and run.round_ms["verify"] > 0.0
    assert {(run.shape, run.temperature) for run in found.runs} == {
        (shape.name, temperature) for shape in shapes for temperature in (0.0, 0.8)
    }


def test_chains_longer_than_the_block_are_left_out(say):
    path, draft = golden("qwen35/tiny-qwen35-C-mtp-F16.gguf"), make_draft(relative="jetspec")
    config, shapes = EngineConfig("cpu", str(draft), threads=1, max_ctx=128), (Shape.chain(8),)
    with pytest.raises(BenchError, match="no shape"):
        measure_draft(path, SETS, 4, config, say, shapes)


def test_a_model_without_a_draft_is_refused(tiny_path, say):
    with pytest.raises(BenchError, match="There is no draft"):
        measure_draft(tiny_path, SETS, 4, CONFIG, say)
