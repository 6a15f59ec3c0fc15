"""Reasoning and content come out the same, however the stream is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.text.segments import Segment, SegmentKind, Segments
from tests.examples import examples

REASONING, CONTENT = SegmentKind.REASONING, SegmentKind.CONTENT


def split(*chunks: str, is_reasoning: bool = False) -> dict[SegmentKind, str]:
    segments = Segments(is_reasoning=is_reasoning)
    texts = {REASONING: "", CONTENT: ""}
    for segment in [*(s for chunk in chunks for s in segments.push(chunk)), *segments.finish()]:
        assert segment.text, "no empty segments"
        assert segment.kind is CONTENT or not texts[CONTENT], "reasoning never follows content"
        texts[segment.kind] += segment.text
    return texts


CASES = [
    ("plain answer", False, "", "plain answer"),
    ("<think>\nhm\n</think>\n\nanswer", False, "hm", "answer"),
    ("\n <think>hm</think>answer", False, "hm", "answer"),
    ("<think>\n\n</think>\n\nanswer\n", False, "", "answer\n"),
    ("hm\n\nso\n</think>\nanswer", True, "hm\n\nso", "answer"),
    ("never closed\n", True, "never closed\n", ""),
    ("<think>never closed </thin", False, "never closed </thin", ""),
    ("text with <think>tags</think>", False, "", "text with <think>tags</think>"),
    ("<think>a</think>b</think><think>", False, "a", "b</think><think>"),
    ("<think>a <think> b</think>c", False, "a <think> b", "c"),
    ("<thinking>", False, "", "<thinking>"),
    ("<thi", False, "", "<thi"),
    ("  \n", False, "", "  \n"),
    ("", False, "", ""),
]


@pytest.mark.parametrize(("text", "is_reasoning", "reasoning", "content"), CASES)
def test_whole_and_letter_by_letter(text, is_reasoning, reasoning, content):
    wanted = {REASONING: reasoning, CONTENT: content}
    assert split(text, is_reasoning=is_reasoning) == wanted
    assert split(*text, is_reasoning=is_reasoning) == wanted


PIECES = ["<think>", "</think>", "<th", "ink>", "</", "think>", "\n", " ", "a", "<"]


@given(st.lists(st.sampled_from(PIECES), max_size=12), st.booleans())
@examples(400)
def test_any_cut_gives_the_same(chunks, is_reasoning):
    text = "".join(chunks)
    whole = split(text, is_reasoning=is_reasoning)
    assert split(*chunks, is_reasoning=is_reasoning) == whole
    assert split(*text, is_reasoning=is_reasoning) == whole


def test_nothing_is_lost_without_tags():
    assert split("a\n\nb\n") == {REASONING: "", CONTENT: "a\n\nb\n"}


def test_text_is_shown_as_soon_as_it_can_be():
    segments = Segments()
    assert segments.push("<thi") == []
    assert segments.push("nk>\nlet me see\n") == [Segment(REASONING, "let me see")]
    assert segments.push("... </") == [Segment(REASONING, "\n... ")]
    assert segments.push("think>\n\nIt") == [Segment(CONTENT, "It")]
    assert segments.push(" is <think>") == [Segment(CONTENT, " is <think>")]
    assert segments.finish() == []
