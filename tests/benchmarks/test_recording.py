"""Recordings of a terminal: what was printed, where, when and in which colour."""

import re
import sys
from xml.etree import ElementTree

import pytest

from benchmarks import recording
from draftree.errors import BenchError

PROGRAM = r"""
import os
os.write(1, b"plain \x1b[32mgreen\x1b[0m end\n"
    b"draft 1 ms, tree 2 ms\n"
    b"7 tokens in 0.10 s (70.0 tokens per second), AL 2.00; prompt of 3 tokens in 0.01 s\n")
"""


def texts(picture):
    root = ElementTree.fromstring(picture)
    return [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]


def test_what_a_command_prints_is_recorded(tmp_path):
    path = tmp_path / "images" / "run.svg"
    recording.record("say", [sys.executable, "-c", PROGRAM], path)
    picture = path.read_text(encoding="utf-8")
    assert texts(picture) == [
        *("$", "s", "a", "y", "plain", "green", "end"),
        "7 tokens, AL 2.00",  # without times
    ]
    assert re.search(r'style="fill:#74d09b">green', picture)
    assert "prefers-reduced-motion" in picture
    assert re.findall(r"https?://[^\"]+", picture) == ["http://www.w3.org/2000/svg"]


def test_a_command_that_fails_is_no_recording(tmp_path):
    with pytest.raises(BenchError, match="failed"):
        recording.record("fail", [sys.executable, "-c", "1 / 0"], tmp_path / "run.svg")
    assert not (tmp_path / "run.svg").exists()


def test_times_fill_the_recording():
    times = [
        time_s for time_s, _ in recording.slow_down("abc", [(5.0, "x"), (5.1, "y"), (5.2, "z")])
    ]
    assert times == sorted(times)
    begin_s, middle_s, end_s = times[-3:]
    assert end_s == pytest.approx(15.0)
    assert middle_s == pytest.approx((begin_s + end_s) / 2)


def test_lines_end_at_the_last_column():
    spans = recording.lay_out([(0.0, "a" * 100 + "\n"), (1.0, "\x1b[2mb\x1b[0m")])
    places = [(span.row, span.column, len(span.text), span.colour) for span in spans]
    assert places == [(0, 0, 96, ""), (1, 0, 4, ""), (2, 0, 1, "#7d8781")]
