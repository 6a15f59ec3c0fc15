"""The shared nouns refuse nonsense and count right."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.core import DraftTree, RoundStats, SamplingParams, Usage, common_prefix_len


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 1.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 11.0),
        ("frequency_penalty", -11.0),
        ("seed", -1),
    ],
)
def test_sampling_params_name_what_is_wrong(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_greedy_and_penalties_are_recognised() -> None:
    assert SamplingParams().is_greedy and not SamplingParams(temperature=0.1).is_greedy
    assert not SamplingParams(temperature=1.0).has_penalties
    assert SamplingParams(presence_penalty=0.1).has_penalties


def test_chain_is_a_tree_without_branches() -> None:
    chain = DraftTree.chain((5, 6, 7))
    assert (chain.parents, chain.depths) == ((-1, 0, 1), (0, 1, 2))
    assert chain.is_chain and chain.num_nodes == 3
    assert not DraftTree((1, 2, 3), (-1, 0, 0), (0, 1, 1)).is_chain


def test_usage_rates() -> None:
    usage = Usage(completion_tokens=30, decode_ms=500.0, rounds=RoundStats(num_rounds=10))
    assert usage.acceptance_length == 3.0 and usage.tokens_per_second == 60.0
    assert Usage().acceptance_length == 0.0 and Usage().tokens_per_second == 0.0


@given(st.text("ab", max_size=9), st.text("ab", max_size=9))
def test_what_two_begin_with_is_counted(a: str, b: str) -> None:
    differs = (i for i, (own, other) in enumerate(zip(a, b, strict=False)) if own != other)
    expected = next(differs, min(len(a), len(b)))
    assert common_prefix_len(a, b) == expected
    assert common_prefix_len(tuple(a.encode()), tuple(b.encode())) == expected
