"""Streams of tokens and text give the same whole, however they are cut."""

from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from draftree.errors import TokenizerError
from draftree.text.detokenize import Detokenizer, StopStrings
from draftree.text.tokenizer import Tokenizer
from tests.examples import examples
from tests.text.metadata import byte_metadata, scheme_metadata, sentencepiece_metadata


@cache
def tokenizers() -> tuple[Tokenizer, ...]:
    return (
        Tokenizer.from_metadata(byte_metadata(("<c>", 3), ("<think>", 4), ("[PAD]", 5))),
        Tokenizer.from_metadata(scheme_metadata("qwen35")),
        Tokenizer.from_metadata(sentencepiece_metadata(0)),
        Tokenizer.from_metadata(sentencepiece_metadata(2)),
    )


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


@pytest.mark.parametrize("index", range(4))
@given(data=st.data())
@examples(150)
def test_any_ids_give_what_decode_gives(index, data):
    tokenizer = tokenizers()[index]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids, skip_special=True)


def test_rows_that_are_no_token_add_nothing():
    tokenizer = tokenizers()[0]
    accent = tokenizer.encode("é")
    assert "".join(stream(tokenizer, [accent[0], tokenizer.vocab_size, accent[1], 10**6])) == "é"
    with pytest.raises(TokenizerError):
        tokenizer.decode([tokenizer.vocab_size])


@pytest.mark.parametrize("index", range(3))
@given(text=st.text(st.characters(blacklist_characters="\u2581", blacklist_categories=["Cs"])))
@settings(max_examples=100, deadline=None)
def test_any_text_comes_back_without_half_characters(index, text):
    tokenizer = tokenizers()[index]
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_real_text(qwen3):
    text = "🦙 héllo 日本語 👩‍👩‍👧 हिन्दी\n"
    pieces = stream(qwen3, qwen3.encode(text))
    assert "".join(pieces) == text
    assert "" in pieces[:-1]  # some characters take several tokens


def test_half_a_character_waits():
    detokenizer = Detokenizer(tokenizers()[0])
    assert [detokenizer.push(byte) for byte in "é".encode()] == ["", "é"]
    assert [detokenizer.push(byte) for byte in (0xF0, 0x9F, 0x41)] == ["", "", "\ufffdA"]
    assert detokenizer.push(0xE2) == ""
    assert detokenizer.finish() == "\ufffd"


def test_a_skipped_token_does_not_break_a_character():
    detokenizer = Detokenizer(tokenizers()[0])
    assert [detokenizer.push(i) for i in (0xC3, 256, 0xA9)] == ["", "", "é"]


def test_a_continuation_keeps_its_first_space():
    tokenizer = tokenizers()[2]
    ids = tokenizer.encode("hello", add_special=False)
    fresh = Detokenizer(tokenizer)
    going_on = Detokenizer(tokenizer, is_continuation=True)
    assert "".join(fresh.push(i) for i in ids) == "hello"
    assert "".join(going_on.push(i) for i in ids) == " hello"


def run_stops(stops: list[str], chunks: list[str]) -> tuple[str, bool]:
    stopper = StopStrings(stops)
    shown, is_met = "", False
    for chunk in chunks:
        text, is_met = stopper.push(chunk)
        shown += text
    return shown + stopper.finish(), is_met


def reference_stop(stops: list[str], text: str) -> tuple[str, bool]:
    """Read character by character; stop when the text so far ends with a stop string."""
    for end in range(len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end - max(map(len, met))], True
    return text, False


LETTERS = st.text("ab<", max_size=14)


@given(
    stops=st.lists(st.text("ab<", min_size=1, max_size=5), max_size=4),
    chunks=st.lists(LETTERS, max_size=8),
)
@example(stops=["abcd", "bc"], chunks=["abcd"])
@example(stops=["aab"], chunks=["a", "a", "a", "b"])
@examples(500)
def test_stop_strings_do_not_depend_on_chunks(stops, chunks):
    assert run_stops(stops, chunks) == reference_stop(stops, "".join(chunks))


def test_text_is_held_back_only_while_it_may_become_a_stop():
    stopper = StopStrings(["</end>", "\n\n"])
    assert stopper.push("hello</") == ("hello", False)
    assert stopper.push("b>\n") == ("</b>", False)
    assert stopper.push("x</en") == ("\nx", False)
    assert stopper.push("d>rest") == ("", True)
    assert stopper.push("more") == ("", True)
    assert stopper.finish() == ""


def test_text_that_was_no_stop_is_shown_at_the_end():
    stopper = StopStrings(["stop"])
    assert stopper.push("a sto") == ("a ", False)
    assert stopper.finish() == "sto"
    assert stopper.finish() == ""


def test_no_stops_hold_nothing_back():
    assert StopStrings([]).push("text") == ("text", False)


def test_empty_stop_strings_are_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        StopStrings(["a", ""])
