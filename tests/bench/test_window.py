"""The beginning of a text that is always there."""

import pytest

from draftree.bench.window import make_window
from draftree.errors import BenchError


def encode(text):
    return list(text.encode())


def test_a_window_is_full_and_begins_the_same():
    window = make_window(encode, 3000)
    assert len(window) == 3000 and make_window(encode, 100) == window[:100]
    assert "assert" in bytes(window).decode("utf-8", "replace")


def test_more_than_there_is_is_refused():
    with pytest.raises(BenchError, match="ask for fewer"):
        make_window(encode, 10_000_000)
