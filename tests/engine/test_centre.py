"""Engines whose keys have few bits measure what those have in common, and leave no trace."""

import numpy as np
import pytest

from draftree.config import EngineConfig
from draftree.core import Request
from draftree.engine.centre import centre_keys
from draftree.engine.engine import TokenEngine
from draftree.kernels.cpu.kv_cache import KvCache
from draftree.kernels.quant.kv_format import KEY_FORMATS, VALUE_FORMATS
from draftree.models.load import load_model
from draftree.models.target import Target
from draftree.weights.file import open_checkpoint
from tests.tiny import open_target, run_chain, tiny_path


def open_engine(kv: str) -> TokenEngine:
    config = EngineConfig(device="cpu", max_ctx=96, threads=1, budget=0, kv_k=kv, kv_v=kv)
    return TokenEngine.open(tiny_path("qwen3"), config)


def centres(engine: TokenEngine) -> list[np.ndarray]:
    caches = engine.target._centred
    assert all(isinstance(cache, KvCache) for cache in caches)
    return [cache.centre.copy() for cache in caches]


def test_the_same_centre_whenever_a_model_is_opened() -> None:
    first, second, usual = open_engine("q4"), open_engine("q4"), open_engine("f16")
    try:
        assert first.target.state.committed == 0 and first.target.num_forwards == 0
        found = centres(first)
        assert len(found) == len(first.target.model.blocks) and all(c.any() for c in found)
        for got, want in zip(centres(second), found, strict=True):
            np.testing.assert_array_equal(got, want)
        request = Request(tuple(range(5, 25)), 6)
        texts = [[event.token for event in engine.generate(request)] for engine in (first, second)]
        assert texts[0] == texts[1] and len(texts[0]) == 6
        for got, want in zip(centres(first), found, strict=True):
            np.testing.assert_array_equal(got, want)
        assert not usual.target.has_centred_keys
    finally:
        for engine in (first, second, usual):
            engine.close()


def test_a_gpu_measures_and_rounds_as_a_cpu_does(any_gpu) -> None:
    cuda = pytest.importorskip("draftree.kernels.cuda.ops")
    store = pytest.importorskip("draftree.kernels.cuda.store")
    path, max_ctx = tiny_path("qwen3"), 48
    formats = {"key_format": KEY_FORMATS["q4"], "value_format": VALUE_FORMATS["q4"]}
    sizes = {"max_tokens": 64, "max_nodes": 8, "max_ctx": max_ctx}
    ops = cuda.CudaOps(store.WeightStore(any_gpu), **sizes, **formats)
    target = Target(load_model(open_checkpoint(path), ops), ops, max_ctx)
    reference = open_target(path, kv_dtype=np.float16, **formats)
    for each in (target, reference):
        centre_keys(each, 64, max_ctx)
    for gpu, cpu in zip(target._centred, reference._centred, strict=True):
        want = cpu.centre  # of keys that were rounded beside other sums: errors are random
        assert np.linalg.norm(gpu.centre.cpu().numpy() - want) < 0.05 * np.linalg.norm(want)
    ids = np.random.default_rng(1).integers(0, 200, 20).tolist()
    logits = run_chain(target, ids, 7)
    target.state.reset()
    np.testing.assert_array_equal(run_chain(target, ids, 1), logits)
    want = run_chain(reference, ids)
    assert np.linalg.norm(logits - want) < 0.05 * np.linalg.norm(want)
