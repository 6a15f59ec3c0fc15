"""Turns of a conversation on a tiny model: what is measured is what it says."""

import pytest

from benchmarks.multiturn import MultiturnMeasures, measure_multiturn


@pytest.fixture(scope="module")
def measures(tiny_path) -> MultiturnMeasures:
    return measure_multiturn(tiny_path, 1, 2, lambda text: None, context=128)


def test_a_follow_up_reads_only_what_is_new(measures):
    # the reply's last token, the question, and what the template puts around them
    assert 10 <= measures.new_tokens.low <= measures.new_tokens.high <= 128
    assert len(measures.second_ms.samples) == len(measures.fresh_ms.samples) == 2
    assert measures.kept_mib.low > 0 and measures.save_ms.low > 0


def test_replies_after_a_hit_are_the_same(measures):
    assert measures.num_equal == measures.num_replies == 2
    assert measures.acceptance_length["hit"] == measures.acceptance_length["fresh"] >= 1.0
