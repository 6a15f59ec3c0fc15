"""Speculation never changes the text or the state: every target, draft, budget and way of sampling."""

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from draftree.core import SamplingParams, TokenSource
from draftree.decode.budget import CostModel
from draftree.decode.draft import BlockDrafter, Drafter
from draftree.decode.sample import Sampler
from draftree.decode.speculative import SpeculationOptions, SpeculativeDecoder
from draftree.models.dflash import load_draft
from draftree.models.target import Target
from draftree.weights.checkpoint import open_checkpoint
from tests.decode.oracle import (
    OracleDrafter,
    PlainRun,
    RandomDrafter,
    check_lossless,
    count_kinds,
    run_plain,
)
from tests.golden import golden
from tests.tiny import ARCHITECTURES, new_ops, open_target, same_state, tiny_path

BUDGETS = (0, 1, 8, 15, 22, 40, 64)
NUM_TOKENS = 32
_FILTERS = SamplingParams(temperature=1.0, top_p=0.9, top_k=40, min_p=0.05)
_PENALTIES = SamplingParams(repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3)
SAMPLINGS = {
    "greedy": SamplingParams(),
    "warm": SamplingParams(temperature=0.7),
    "filtered": _FILTERS,
    "penalised": replace(_PENALTIES, temperature=1.0, top_p=0.9, top_k=40, min_p=0.05),
    "greedy penalised": _PENALTIES,
}
KINDS = ("zero", "partial", "whole", "deep", "sibling", "after a sibling", "moved")


def fixed(budget: int) -> SpeculationOptions:
    return SpeculationOptions(budget, is_auto=False, use_ngram=False)


@cache
def one_thread(name: str) -> Target:
    """Threads never change a bit (tests/state), and one is faster where cores are shared."""
    if name == "quantised":
        return open_target(
            tiny_path("qwen35-q4"), exact=False, num_threads=1, kv_dtype=np.float16
        )
    layers = (1, 2, 3, 4, 5) if name == "qwen35" else ()
    return open_target(tiny_path(name), num_threads=1, feature_layers=layers)


@cache
def plain_run(name: str, sampling: str, seed: int) -> PlainRun:
    target = one_thread(name)
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, target.model.vocab_size, int(rng.integers(1, 20))).tolist()
    return run_plain(target, prompt, replace(SAMPLINGS[sampling], seed=seed), NUM_TOKENS)


@cache
def block_drafter() -> BlockDrafter:
    ops = new_ops(exact=True, num_threads=1)
    draft = load_draft(open_checkpoint(golden("dflash/tiny-dflash-A-F16.gguf")), ops)
    return BlockDrafter(draft, one_thread("qwen35").model, ops)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", [*ARCHITECTURES, "quantised"])
def test_oracle_drafts(name: str, sampling: str) -> None:
    target, kinds = one_thread(name), Counter()
    for budget in BUDGETS:
        for seed in (1, 2):
            plain = plain_run(name, sampling, seed)
            oracle = OracleDrafter(
                target.state, plain.text, target.model.vocab_size, seed * 100 + budget
            )
            kinds += count_kinds(check_lossless(target, plain, oracle, fixed(budget)))
    assert all(kinds[kind] > 0 for kind in KINDS), kinds


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", [*ARCHITECTURES, "quantised"])
def test_random_drafts(name: str, sampling: str) -> None:
    target, kinds = one_thread(name), Counter()
    for i, budget in enumerate(BUDGETS):
        plain = plain_run(name, sampling, 1 + i % 2)
        drafter = RandomDrafter(target.state, target.model.vocab_size, budget)
        kinds += count_kinds(check_lossless(target, plain, drafter, fixed(budget)))
    assert kinds["zero"] > 0


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_real_draft(sampling: str) -> None:
    target, kinds = one_thread("qwen35"), Counter()
    for i, budget in enumerate(BUDGETS):
        plain = plain_run("qwen35", sampling, 1 + i % 2)
        kinds += count_kinds(check_lossless(target, plain, block_drafter(), fixed(budget)))
    assert kinds["zero"] > 0
