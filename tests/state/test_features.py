"""The ring of features returns what was appended, for as long as it is kept."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.state.features import FeatureRing


def _rows(first: int, last: int) -> np.ndarray:
    """Rows that tell their position."""
    return np.arange(first, last, dtype=np.float32)[:, None] + np.array([0.0, 0.5], np.float32)


@given(
    capacity=st.integers(1, 12),
    start=st.integers(0, 30),
    counts=st.lists(st.integers(0, 30), max_size=12),
)
def test_the_newest_rows_are_there(capacity: int, start: int, counts: list[int]) -> None:
    """However they arrive: singly, in pieces that wrap, in pieces larger than the ring."""
    ring = FeatureRing(np.zeros((capacity, 2), dtype=np.float32))
    ring.reset(start)
    end = start
    for count in counts:
        ring.append(_rows(end, end + count))
        end += count
        assert (ring.start, ring.end) == (max(start, end - capacity), end)
        assert np.array_equal(ring.read(ring.start, end), _rows(ring.start, end))
        middle = (ring.start + end) // 2
        assert np.array_equal(ring.read(middle, end), _rows(middle, end))


def test_rows_that_are_gone_or_not_there_yet_are_refused() -> None:
    ring = FeatureRing(np.zeros((4, 2), dtype=np.float32))
    ring.append(_rows(0, 6))
    for first, last in ((1, 5), (3, 7), (5, 4)):
        with pytest.raises(AssertionError):
            ring.read(first, last)


def test_reset_forgets() -> None:
    ring = FeatureRing(np.zeros((4, 2), dtype=np.float32))
    ring.append(_rows(0, 3))
    ring.reset()
    assert ring.start == ring.end == 0 and len(ring.read(0, 0)) == 0
    ring.append(_rows(7, 9))
    assert np.array_equal(ring.read(0, 2), _rows(7, 9))


def test_what_is_read_is_a_copy() -> None:
    ring = FeatureRing(np.zeros((4, 2), dtype=np.float32))
    ring.append(_rows(0, 4))
    read = ring.read(0, 4)
    ring.append(_rows(4, 8))
    assert np.array_equal(read, _rows(0, 4))
