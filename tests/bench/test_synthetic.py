"""Synthetic models open like real ones, and their activations keep their size."""

from dataclasses import replace

import numpy as np
import pytest

from draftree.bench.synthetic import SHAPES, write_pair
from draftree.config import EngineConfig
from draftree.core import Request
from draftree.drafts.dflash_model import read_draft_config
from draftree.engine.engine import TokenEngine
from draftree.kernels.quant.formats import QuantType, dequantize
from draftree.models.model_config import read_model_config
from draftree.weights.file import open_checkpoint


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_pair("tiny", tmp_path_factory.mktemp("synth"))


def test_weights_have_mean_zero_and_keep_the_size_of_rows(pair) -> None:
    checkpoint = open_checkpoint(pair[0])
    for name in ("blk.0.attn_qkv.weight", "blk.0.ffn_down.weight", "output.weight"):
        info = checkpoint.tensors[name]
        weights = dequantize(checkpoint.raw(name), info.qtype)
        size = weights.std() * info.shape[1] ** 0.5
        assert 0.8 < size < 1.25 and abs(weights.mean()) < 0.1 * weights.std(), name
        assert len(np.unique(weights, axis=0)) == len(weights), "rows repeat"


def test_the_pair_fits_and_drafting_changes_nothing(pair) -> None:
    assert read_model_config(open_checkpoint(pair[0])).num_layers == SHAPES["tiny"][0].num_layers
    assert read_draft_config(open_checkpoint(pair[1])).block_size == 16
    texts = []
    for draft in (None, pair[1]):
        engine = TokenEngine.open(pair[0], EngineConfig(max_ctx=128, budget=15), draft=draft)
        texts.append([event.token for event in engine.generate(Request((5, 6, 7), 12))])
        engine.close()
    assert texts[0] == texts[1] and len(set(texts[0])) > 3


def test_files_that_are_there_are_kept(pair) -> None:
    before = pair[0].stat().st_mtime_ns
    assert write_pair("tiny", pair[0].parent)[0].stat().st_mtime_ns == before


def test_all_matrices_may_have_one_type(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = SHAPES["tiny"]
    monkeypatch.setitem(SHAPES, "floats", (replace(target, matrix_type=QuantType.BF16), draft))
    checkpoint = open_checkpoint(write_pair("floats", tmp_path)[0])
    types = {info.qtype for info in checkpoint.tensors.values()}
    assert types == {QuantType.BF16, QuantType.F32}
    assert checkpoint.tensors["blk.0.ffn_up.weight"].qtype is QuantType.BF16
    weights = dequantize(checkpoint.raw("output.weight"), QuantType.BF16)
    assert 0.8 < weights.std() * target.hidden**0.5 < 1.25
