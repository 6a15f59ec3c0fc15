"""Memory that target and draft share."""

import numpy as np

from draftree.kernels.cpu.workspace import Scratch, Workspace


def test_scratch_is_reused_after_its_scope_and_not_inside_it() -> None:
    scratch = Scratch()
    with scratch.scope():
        large, small = scratch.take(128, 100), scratch.take(128, 10)
        with scratch.scope():
            inner = scratch.take(64, 50)
            assert inner.shape == (64, 50) and inner.dtype == np.float32
        again = scratch.take(64, 50)
        assert np.shares_memory(inner, again)
        assert not any(np.shares_memory(a, b) for a in (large, small) for b in (again,))
    assert np.shares_memory(scratch.take(128, 100), large)


def test_the_smallest_block_with_room_is_taken() -> None:
    scratch = Scratch()
    with scratch.scope():
        large, small = scratch.take(128, 100), scratch.take(128, 10)
    with scratch.scope():
        assert np.shares_memory(scratch.take(64, 20), small)
        assert np.shares_memory(scratch.take(64, 20), large)
        fresh = scratch.take(64, 20)
    assert not np.shares_memory(fresh, large) and not np.shares_memory(fresh, small)


def test_equal_frequencies_share_a_table_that_is_long_enough() -> None:
    room, slow, fast = Workspace(), np.array([1.0, 0.1]), np.array([1.0, 0.2])
    table = room.rope_table(slow, 100)
    assert table.shape == (100, 2, 2) and room.rope_table(slow.copy(), 90) is table
    longer, other = room.rope_table(slow, 101), room.rope_table(fast, 100)
    assert len(longer) == 101 and np.array_equal(longer[:100], table)
    assert not np.array_equal(other, table)


def test_rows_are_zero_and_lie_in_the_rest_of_a_large_page_if_they_fit() -> None:
    room = Workspace()
    assert not room.new_rows(4, 16).any()  # no page yet
    weights = room.weights.take(1000)
    weights[:] = 255
    few, many = room.new_rows(4, 16), room.new_rows(1024, 1024)
    assert few.shape == (4, 16) and not few.any() and not many.any()
    few[:] = many[:] = 1.0
    assert set(weights.tolist()) == {255}
    after = room.weights.take(64)
    assert not np.shares_memory(after, few) and not np.shares_memory(after, many)
