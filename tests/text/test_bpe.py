"""Byte-level BPE on vocabularies small enough to check by hand."""

from draftree.text.bpe import byte_of_character
from draftree.text.tokenizer import Tokenizer
from tests.text.metadata import byte_metadata


def test_every_byte_has_its_character():
    table = byte_of_character()
    assert sorted(table.values()) == list(range(256))
    assert (table["a"], table["Ġ"], table["Ċ"], table["ÿ"]) == (97, 32, 10, 255)


def test_earlier_merges_win():
    tokenizer = Tokenizer.from_metadata(byte_metadata(merges=("b c", "a b", "ab c", "Ġ a")))
    assert tokenizer.encode("abc") == [97, 256]
    assert tokenizer.encode("abab a") == [257, 257, 259]
    assert tokenizer.encode("bcb") == [256, 98]


def test_a_repeated_merge_keeps_its_first_place():
    twice = byte_metadata(merges=("b c", "a b"))
    twice["tokenizer.ggml.merges"] = ["b c", "a b", "b c"]
    assert Tokenizer.from_metadata(twice).encode("abc") == [97, 256]


def test_whole_words_come_first_where_the_scheme_says_so():
    metadata = byte_metadata(("abc", 1), merges=("a b",))
    assert Tokenizer.from_metadata(metadata).encode("abc") == [256, 99]
    metadata["tokenizer.ggml.pre"] = "llama-bpe"
    assert Tokenizer.from_metadata(metadata).encode("abc") == [257]


def test_text_outside_the_vocabulary_is_spelled_in_bytes():
    tokenizer = Tokenizer.from_metadata(byte_metadata())
    assert tokenizer.encode("é\n") == [0xC3, 0xA9, 10]
