"""Plain against speculative, on a tiny model and on invented usage."""

import pytest

from draftree.bench.dataset import Prompt
from draftree.bench.suite import Pair, measure_suite, summarize_pairs
from draftree.config import EngineConfig
from draftree.core import RoundStats, Usage
from draftree.errors import BenchError


def usage(tokens, decode_ms, rounds=0, verified=(), accepted=()):
    stats = RoundStats(
        num_rounds=rounds or tokens,
        num_drafted=sum(verified),
        num_accepted=sum(accepted),
        verified_by_depth=list(verified),
        accepted_by_depth=list(accepted),
    )
    times = {"decode_ms": decode_ms, "first_token_ms": decode_ms / 10}
    return Usage(completion_tokens=tokens, rounds=stats, **times)


def test_sets_are_summed_over_their_prompts():
    pairs = [
        Pair(True, usage(100, 1000.0), usage(100, 500.0, 40, (40, 20), (30, 15))),
        Pair(False, usage(50, 1000.0), usage(50, 500.0, 35, (20,), (15,))),
    ]
    measures = summarize_pairs(pairs)
    assert (measures.num_prompts, measures.num_equal, measures.num_tokens) == (2, 1, 150)
    assert (measures.plain_rate, measures.speculative_rate) == (75.0, 150.0)
    assert measures.speed_up == 2.0
    assert measures.acceptance_length == 2.0
    assert measures.accepted_by_depth == [0.75, 0.75]
    assert measures.plain.samples == (100.0, 50.0)
    assert (measures.num_drafted, measures.num_accepted) == (80, 60)
    assert measures.rounds_by_length == [30, 30, 15]
    assert measures.stage_ms["rest"] == 1000.0
    assert (measures.plain_ttft_ms.median, measures.ttft_ms.median) == (100.0, 50.0)


def test_no_prompts_are_refused():
    with pytest.raises(BenchError, match="no prompts"):
        summarize_pairs([])


def test_texts_are_equal_on_a_tiny_model(tiny_path, say):
    sets = {"a": [Prompt("one two one two one two one two", False), Prompt("x = 1", False)]}
    config = EngineConfig("cpu", threads=1, max_ctx=256)
    measures = measure_suite(tiny_path, sets, 12, config, say)
    assert measures.drafting == "lookup in the text so far"
    assert measures.sets["a"].num_equal == 2
    assert measures.sets["a"].stage_ms["verify"] > 0.0
    assert sum(measures.sets["a"].rounds_by_length) >= 2
    assert measures.sets["a"].num_prompts == 2
    assert "a: prompt 2 of 2" in say.lines
