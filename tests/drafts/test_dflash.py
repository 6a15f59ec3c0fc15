"""A draft whose context was copied, cut and put back proposes what it would have proposed."""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.drafts.dflash import BlockDrafter
from draftree.drafts.dflash_model import load_draft, read_draft_size
from draftree.kernels.cpu.ops import CpuOps
from draftree.state.span import Span
from draftree.weights.file import open_checkpoint
from tests.made import make_draft
from tests.tiny import new_ops, open_target, pool, tiny_path

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


WINDOW, RING = 90, 256
LONG = np.random.default_rng(10).standard_normal((900, 3 * 128)).astype(np.float32)


@dataclass(frozen=True)
class Rings:
    """The same draft with a ring, and with a cache of all positions."""

    ring: BlockDrafter
    whole: BlockDrafter

    def compare(self, length: int) -> None:
        """The ring's block against that of all features, less those before its first position."""
        self.whole.reset()
        self.whole.extend_context(LONG[:length])
        self.whole._ops.step.set_first(self.ring._first)
        assert self.ring.position == length
        assert np.array_equal(self.ring.block_logits(9), self.whole.block_logits(9))


@cache
def _rings(kv_dtype: type[np.number] = np.float32) -> Rings:
    target = open_target(tiny_path("qwen35-mtp"), num_threads=1).model
    drafters = []
    for ring_len in (RING, 0):
        sizes = {"max_tokens": 64, "max_nodes": 16, "max_ctx": 1000, "ring_len": ring_len}
        ops = CpuOps(pool(1), exact=True, kv_dtype=kv_dtype, **sizes)
        draft = load_draft(open_checkpoint(make_draft(window=WINDOW)), ops)
        drafters.append(BlockDrafter(draft, target, ops))
    return Rings(*drafters)


@pytest.mark.parametrize("kv_dtype", [np.float32, np.float16, np.int8])
def test_a_ring_proposes_what_a_cache_of_all_positions_does(kv_dtype: type[np.number]) -> None:
    rings, rng = _rings(kv_dtype), np.random.default_rng(4)
    for drafter in (rings.ring, rings.whole):
        drafter.reset()
    done = 0
    while done < 3 * RING:
        count = int(rng.integers(1, 100))
        for drafter in (rings.ring, rings.whole):
            drafter.extend_context(LONG[done : done + count])
        done += count
        assert np.array_equal(rings.ring.block_logits(9), rings.whole.block_logits(9)), done


@settings(max_examples=40, deadline=None)
@given(
    seen=st.integers(1, 900),
    cuts=st.sets(st.integers(1, 899), max_size=4),
    shared=st.integers(0, 900),
    others=st.integers(0, 60),
    length=st.integers(0, 900),
)
def test_a_ring_comes_back(
    seen: int, cuts: set[int], shared: int, others: int, length: int
) -> None:
    """Copied after `seen` tokens, what was there; put into a ring that has read others since."""
    shared, length = min(shared, seen), min(length, seen)
    drafter = _rings().ring
    drafter.reset()
    drafter.extend_context(LONG[:seen])
    first = drafter.first
    edges = [first, *(cut for cut in sorted(cuts) if first < cut < seen), seen]
    spans = [Span(start, end, drafter.copy(start, end)) for start, end in pairwise(edges)]
    drafter.reset()
    drafter.extend_context(LONG[:shared])
    drafter.extend_context(OTHERS[:others])
    known = {*range(drafter.first, shared), *range(first, seen)}
    drafter.restore(spans, min(shared, length), length)
    expected = length
    while expected > max(length + 16 - RING, 0) and expected - 1 in known:
        expected -= 1
    assert drafter.first == expected
    _rings().compare(length)


def test_going_back_behind_a_reply_keeps_the_whole_context() -> None:
    """As many positions as the ring has to spare, without a copy."""
    rings = _rings()
    spare = RING - WINDOW - 16
    rings.ring.reset()
    rings.ring.extend_context(LONG[:700])
    rings.ring.block_logits(9)
    rings.ring.restore((), 700 - spare, 700 - spare)
    assert rings.ring.first == 700 + 16 - RING == 700 - spare - WINDOW
    rings.compare(700 - spare)


def test_context_that_is_gone_is_neither_copied_nor_looked_at() -> None:
    rings = _rings()
    rings.ring.reset()
    rings.ring.extend_context(LONG[:700])
    assert rings.ring.first == 700 + 16 - RING
    with pytest.raises(AssertionError, match="overwritten"):
        rings.ring.copy(rings.ring.first - 1, 700)
    rings.ring.restore((), 500, 500)
    assert rings.ring.first == 460
    rings.compare(500)
    rings.ring.restore((), 300, 300)
    assert rings.ring.first == 300  # nothing is left
    rings.compare(300)
    rings.ring.extend_context(LONG[300:400])
    rings.compare(400)


def test_how_far_back_a_draft_looks() -> None:
    sizes = {
        window: read_draft_size(open_checkpoint(make_draft(window=window))) for window in (0, 90)
    }
    assert sizes[90].context_len == 90
    assert sizes[0].context_len == 4096  # one of its layers has no window
