"""SmolLM2-135M-Instruct against its float32 reference: first tokens, whole continuations,
logits.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftree.core import DraftTree
from draftree.models.target import Target
from draftree.prefill.chunked import prefill
from tests.examples import mark_long
from tests.golden import golden
from tests.tiny import open_default, open_target, run_chain

TOLERANCE = 1e-3
NUM_CASES, SOME_CASES = 16, (0, 3, 6, 9, 12, 15)


def _cases() -> list[dict[str, Any]]:
    return json.loads(golden("smollm2/completions.json").read_text())


def test_all_cases_are_tried() -> None:
    assert len(_cases()) == NUM_CASES
    assert len({_cases()[number]["mode"] for number in SOME_CASES}) == 2


def _log_probs(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.fixture(scope="module")
def exact_target(smollm2_path: Path) -> Target:
    return open_target(smollm2_path)


@pytest.fixture(scope="module")
def default_target(smollm2_path: Path) -> Iterator[Target]:
    with closing(open_default(smollm2_path)) as engine:
        yield engine.target


def _along_reference(target: Target, case: dict[str, Any]) -> np.ndarray:
    """Logits after the prompt and after each reference token: argmax there is greedy decoding."""
    target.state.reset()
    prefill(target, case["prompt_ids"][:-1], 64)
    return run_chain(target, [case["prompt_ids"][-1], *case["exact_ids_no_stop"][:-1]])


@pytest.mark.parametrize("number", mark_long(range(NUM_CASES), but=SOME_CASES))
def test_continuations_and_logits_in_exact_math(exact_target: Target, number: int) -> None:
    arrays, case = np.load(golden("smollm2/logits.npz")), _cases()[number]
    name = f"{case['name']}.{case['mode']}"
    logits = _along_reference(exact_target, case)
    log_probs = _log_probs(logits)
    assert logits.argmax(axis=1).tolist() == case["exact_ids_no_stop"]
    top_ids = arrays[f"{name}.exact_path_top10_ids"].astype(np.int64)
    expected = arrays[f"{name}.exact_path_top10_logprobs"]
    found = np.take_along_axis(log_probs, top_ids, axis=1)
    assert np.abs(found - expected).max() < TOLERANCE
    for entry in case["exact_first_token_top20"]:
        assert abs(log_probs[0, entry["id"]] - entry["logprob"]) < TOLERANCE
    last = f"{name}.exact_last_logits"
    if last in arrays.files:
        assert np.abs(logits[0] - arrays[last]).max() < TOLERANCE


def test_every_prompt_position_in_exact_math(exact_target: Target) -> None:
    arrays = np.load(golden("smollm2/logits.npz"))
    for case in _cases()[:6]:
        exact_target.state.reset()
        found = run_chain(exact_target, case["prompt_ids"]).argmax(axis=1)
        expected = arrays[f"{case['name']}.{case['mode']}.exact_argmax_per_pos"]
        assert (found == expected).all()


def test_quantised_kernels_are_as_near_as_llamacpp(default_target: Target) -> None:
    """Mean error of the first token's top-20 log-probabilities, against llama.cpp's own run. With
    a user's settings.
    """
    ours, native, agreed, total = [], [], 0, 0
    for case in _cases():
        logits = _along_reference(default_target, case)
        log_probs = _log_probs(logits[:1])
        exact = {e["id"]: e["logprob"] for e in case["exact_first_token_top20"]}
        for entry in case["first_token_top20"]:
            if entry["id"] in exact:
                native.append(abs(entry["logprob"] - exact[entry["id"]]))
                ours.append(abs(log_probs[0, entry["id"]] - exact[entry["id"]]))
        sure = np.asarray(case["exact_gap"]) > 0.5
        same = logits.argmax(axis=1) == np.asarray(case["exact_ids_no_stop"])
        agreed, total = agreed + int(same[sure].sum()), total + int(sure.sum())
    assert np.mean(ours) <= 1.1 * np.mean(native), (np.mean(ours), np.mean(native))
    assert agreed >= 0.995 * total > 0, (agreed, total)


def test_one_token_at_a_time_gives_the_same_bits(default_target: Target) -> None:
    target = default_target
    target.state.reset()
    ids = _cases()[0]["prompt_ids"][:20]
    whole = run_chain(target, ids)
    target.state.reset()
    singles = run_chain(target, ids, chunk_len=1)
    assert np.array_equal(whole, singles)
    target.state.reset()
    target.state.begin(DraftTree.chain(tuple(ids)))
    assert np.array_equal(target.forward(range(len(ids))).logits, whole)
    target.state.rollback()
