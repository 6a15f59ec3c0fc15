"""Engines whose keys have few bits measure what those have in common, and leave no trace."""

import numpy as np

from draftree.config import EngineConfig
from draftree.core import Request
from draftree.engine.engine import TokenEngine
from draftree.kernels.cpu.kv_cache import KvCache
from tests.tiny import tiny_path


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
