"""A draft whose context was copied, cut and put back proposes what it would have proposed."""

from functools import cache

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.drafts.dflash import BlockDrafter
from draftree.drafts.dflash_model import load_draft
from draftree.state.span import Span
from draftree.weights.file import open_checkpoint
from tests.made import make_draft
from tests.tiny import new_ops, open_target, tiny_path

FEATURES = np.random.default_rng(8).standard_normal((120, 3 * 128)).astype(np.float32)
OTHERS = np.random.default_rng(9).standard_normal((60, 3 * 128)).astype(np.float32)


@cache
def _drafter() -> BlockDrafter:
    target = open_target(tiny_path("qwen35-mtp"), num_threads=1)
    ops = new_ops(exact=True, num_threads=1)
    draft = load_draft(open_checkpoint(make_draft()), ops)
    return BlockDrafter(draft, target.model, ops)


@cache
def _expected(length: int) -> np.ndarray:
    """The block after so many tokens, by a draft that has seen nothing else."""
    drafter = _drafter()
    drafter.reset()
    drafter.extend_context(FEATURES[:length])
    return drafter.block_logits(9).copy()


@settings(max_examples=30, deadline=None)
@given(
    seen=st.integers(1, 120),
    copied=st.integers(0, 120),
    shared=st.integers(0, 120),
    length=st.integers(0, 120),
    more=st.integers(0, 30),
)
def test_context_comes_back(seen: int, copied: int, shared: int, length: int, more: int) -> None:
    """Copied after `seen` tokens; put into a draft that has read `shared` of them and others."""
    copied, shared, length = min(copied, seen), min(shared, seen), min(length, seen)
    end = min(length + more, len(FEATURES))
    expected = _expected(length), _expected(end)
    drafter = _drafter()
    drafter.reset()
    drafter.extend_context(FEATURES[:seen])
    spans = [
        Span(start, stop, drafter.copy(start, stop))
        for start, stop in ((0, copied), (copied, seen))
        if stop > start
    ]
    drafter.reset()
    drafter.extend_context(FEATURES[:shared])
    drafter.extend_context(OTHERS)
    drafter.restore(spans, min(shared, length), length)
    assert drafter.position == length
    assert np.array_equal(drafter.block_logits(9), expected[0])
    drafter.extend_context(FEATURES[length:end])
    assert drafter.position == end
    assert np.array_equal(drafter.block_logits(9), expected[1])


def test_going_back_into_features_that_were_not_read_yet() -> None:
    drafter = _drafter()
    expected = _expected(30)
    drafter.reset()
    drafter.extend_context(FEATURES[:20])
    drafter.block_logits(9)
    drafter.extend_context(FEATURES[20:40])
    drafter.restore((), 30, 30)
    assert np.array_equal(drafter.block_logits(9), expected)
