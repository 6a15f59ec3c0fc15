"""The small hybrid: it learns, and its file holds what was learned."""

import numpy as np
import pytest
import torch

from benchmarks.hybrid_model import Shape, export_model, learn, make_model
from draftree.train.corpus import Corpus
from draftree.weights.file import open_checkpoint
from tests.tiny import open_target, run_chain, tiny_path

SHAPE = Shape(
    num_layers=4,
    hidden_size=64,
    ffn_size=96,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    rotary_dim=16,
    key_heads=1,
    value_heads=2,
    delta_dim=32,
)


@pytest.mark.long
def test_it_learns_and_the_engine_computes_the_same(tmp_path):
    source = open_checkpoint(tiny_path("llama"))
    model = make_model(SHAPE, len(source.metadata["tokenizer.ggml.tokens"]), torch.device("cpu"), 0)
    ids = np.tile(np.arange(40, 60, dtype=np.int32), 64)
    flags = np.array([False, True])
    starts = np.array([0, len(ids) // 2, len(ids)])
    corpus = Corpus(ids, starts, np.array([1, 1]), flags, flags)
    (point,) = learn(model, corpus, 128, 32, minutes=1e9, num_steps=12)
    assert point["held_out_loss"] < 0.8 * np.log(model.vocab_size)
    path = tmp_path / "hybrid.gguf"
    export_model(model, SHAPE, source, path)
    assert open_checkpoint(path).architecture == "qwen35"
    logits = run_chain(open_target(path, num_threads=1), ids[:70])
    expected = model.logits(model.read(torch.from_numpy(ids[:70].astype(np.int64))[None]).hidden)
    expected = expected[0].detach().numpy()
    assert np.abs(logits - expected).max() < 0.01 * np.abs(expected).max()
