"""Memory for packed weights: apart from each other, on cache lines, in large pages if there are."""

import numpy as np

from draftree.kernels.cpu.arena import Arena, lazy_zeros


def test_arrays_follow_each_other_on_cache_lines() -> None:
    arena = Arena()
    first, second, third = arena.take(100), arena.take(64), arena.take(1)
    for number, array in enumerate((first, second, third)):
        assert array.ctypes.data % 64 == 0
        array[:] = number
    assert second.ctypes.data == first.ctypes.data + 128
    assert [set(a.tolist()) for a in (first, second, third)] == [{0}, {1}, {2}]


def test_what_is_larger_than_a_region_gets_its_own() -> None:
    arena = Arena()
    small, large = arena.take(1 << 20), arena.take(300 << 20)
    large[-1] = 7
    small[:] = 1
    assert len(large) == 300 << 20 and not np.shares_memory(small, large)
    assert arena.take(64).ctypes.data % 64 == 0


def test_zeros_are_zero_and_can_be_written() -> None:
    for count in (1, 100, 5000, 3 << 20):
        zeros = lazy_zeros(count)
        assert len(zeros) == count and not zeros.any() and zeros.ctypes.data % 64 == 0
        zeros[:] = 1


def test_the_rest_of_a_large_page_is_used_up_to_its_end() -> None:
    arena = Arena()
    assert arena.take_rest(64) is None  # nothing is there that a page could be left over of
    arena.take(100)
    left = -(arena.take(64).ctypes.data + 64) % (2 << 20)
    if left:  # a region may happen to begin where a page ends
        assert arena.take_rest(left + 1) is None
        rest = arena.take_rest(left)
        assert rest is not None and not rest.any()
        assert (rest.ctypes.data + left) % (2 << 20) == 0
        assert arena.take_rest(64) is None
