"""Speculation changes nothing where keys and values are rounded to a small format either."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from draftree.engine.centre import centre_keys
from draftree.kernels.quant.kv_format import KEY_FORMATS, VALUE_FORMATS
from tests.decode.oracle import OracleDrafter, check_lossless, count_kinds, run_plain
from tests.decode.test_lossless import SAMPLINGS, fixed
from tests.tiny import open_target, run_chain, tiny_path

PAIRS = (("q4", "q4"), ("tq3_0", "tq3_0"), ("q8_0", "q4"))


@pytest.mark.parametrize("kv", PAIRS, ids="/".join)
@pytest.mark.parametrize("name", ["qwen3", "qwen35-q4"], ids=["dense", "hybrid"])
def test_rounded_keys_and_values(name: str, kv: tuple[str, str]) -> None:
    formats = {"key_format": KEY_FORMATS[kv[0]], "value_format": VALUE_FORMATS[kv[1]]}
    target = open_target(
        tiny_path(name), exact=False, num_threads=1, kv_dtype=np.float16, **formats
    )
    centre_keys(target, 64, 100)
    assert target.has_centred_keys == (kv[0] != "q8_0")
    kinds: Counter[str] = Counter()
    for seed, (sampling, budget) in enumerate([("greedy", 22), ("filtered", 15), ("warm", 40)]):
        prompt = np.random.default_rng(seed).integers(0, target.model.vocab_size, 17).tolist()
        plain = run_plain(target, prompt, replace(SAMPLINGS[sampling], seed=seed), 32)
        for draft_seed in (1, 2):
            args = target.state, plain.text, target.model.vocab_size, 100 * seed + draft_seed
            kinds += count_kinds(check_lossless(target, plain, OracleDrafter(*args), fixed(budget)))
    assert all(kinds[kind] > 0 for kind in ("partial", "whole", "sibling", "moved")), kinds


def test_formats_change_logits_as_much_as_their_bits_say() -> None:
    tokens = np.random.default_rng(5).integers(0, 200, 60)
    base = run_chain(open_target(tiny_path("qwen3"), kv_dtype=np.float16), tokens)
    distances = []
    for name in ("f16", "q8_0", "q4", "tq3_0"):
        formats = {"key_format": KEY_FORMATS[name], "value_format": VALUE_FORMATS[name]}
        target = open_target(tiny_path("qwen3"), kv_dtype=np.float16, **formats)
        distances.append(float(np.abs(run_chain(target, tokens) - base).mean()))
    assert distances[0] == 0.0 and distances == sorted(set(distances)), distances
