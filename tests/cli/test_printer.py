"""Text that would steer a terminal is shown, not obeyed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.cli.printer import show_controls


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ünïcödé 漢字 👋\n\ttab", "plain ünïcödé 漢字 👋\n\ttab"),
        ("\x1b[2J", "␛[2J"),
        ("a\x07b\x00c\r", "a␇b␀c␍"),
        ("\x7f\x9b", "\ufffd\ufffd"),
    ],
)
def test_show_controls(text, shown):
    assert show_controls(text) == shown


@given(st.text())
def test_nothing_that_steers_a_terminal_is_left(text):
    shown = show_controls(text)
    assert len(shown) == len(text)
    assert all(ord(c) >= 32 or c in "\n\t" for c in shown)
    assert not any(127 <= ord(c) < 160 for c in shown)
