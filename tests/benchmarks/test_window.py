"""Windows of the standard library's own text."""

from itertools import chain

import pytest

from benchmarks.window import make_windows
from draftree.errors import BenchError


def encode(text):
    return list(text.encode())


def test_windows_are_full_and_go_on():
    windows = make_windows(encode, 6, 100)
    assert [len(window) for window in windows] == [100] * 6
    assert make_windows(encode, 6, 100) == windows
    longer = make_windows(encode, 2, 300)
    assert [*chain(*windows[::2])] == longer[0]
    assert [*chain(*windows[1::2])] == longer[1]


def test_prose_and_code_take_turns():
    prose, code = (
        bytes(window).decode("utf-8", "replace") for window in make_windows(encode, 2, 3000)
    )
    assert "assert" in prose
    assert "Heap queue" in code


def test_there_is_enough_for_twenty_thousand_tokens():
    assert len(make_windows(lambda text: list(text)[::6], 40, 512)) == 40


def test_more_than_there_is_is_refused():
    with pytest.raises(BenchError, match="ask for fewer tokens"):
        make_windows(encode, 10, 10_000_000)
