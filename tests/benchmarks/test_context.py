"""Depth of context on a tiny model, and how rounds are put together."""

import pytest

from benchmarks.context import ContextOptions, Texts, measure_context, summarize_depths
from draftree.bench.writing import Text
from draftree.config import EngineConfig
from draftree.core import RoundStats, Usage


def text(tokens, decode_ms, first_ms):
    rounds = RoundStats(num_rounds=2)
    return Text(tokens, Usage(0, 0, 4, 0.0, decode_ms, first_ms, rounds))


def test_first_texts_tell_the_first_token_and_all_tell_the_rate():
    plain = [Texts(text([1, 2], 40.0, 90.0), [text([1, 2], 20.0, 1.0)])]
    drafted = [Texts(text([1, 2], 20.0, 80.0), [text([1, 3], 10.0, 1.0)])]
    row = summarize_depths({128: (plain, drafted)})["128"]
    assert row.plain.samples == (100.0, 200.0) and row.speculative.samples == (200.0, 400.0)
    assert (row.speed_up.value, row.speed_up.low, row.speed_up.high) == (2.0, 2.0, 2.0)
    assert (row.plain_ttft_ms.samples, row.ttft_ms.samples) == ((90.0,), (80.0,))
    assert (row.num_texts, row.num_equal) == (2, 1)
    assert row.acceptance_length == 2.0


def test_depths_on_a_tiny_model(tiny_path, say):
    options = ContextOptions(EngineConfig("cpu", threads=1), 2, depths=(16, 48), num_tokens=6)
    measures = measure_context(tiny_path, options, say)
    assert list(measures.depths) == ["16", "48"]
    assert (measures.device, measures.drafting) == ("CPU", "lookup in the text so far")
    for row in measures.depths.values():
        assert row.num_equal == row.num_texts == len(row.plain.samples) == 6
        assert len(row.ttft_ms.samples) == 2 and row.ttft_ms.low > 0.0
        assert row.acceptance_length >= 1.0
    assert "speculative at depth 48: round 2 of 2" in say.lines


def test_a_depth_beyond_the_model_is_refused(tiny_path, say):
    options = ContextOptions(EngineConfig("cpu", threads=1), 1, depths=(10**7,))
    with pytest.raises(Exception, match="was trained for"):
        measure_context(tiny_path, options, say)
