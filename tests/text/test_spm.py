"""SentencePiece vocabularies, against ids that llama.cpp gave for the same vocabularies."""

import pytest

from draftree.errors import TokenizerError
from draftree.text.tokenizer import Tokenizer
from tests.text.metadata import read_data, sentencepiece_metadata

DATA = read_data("sentencepiece.json")
WORDS, PHRASES, BARE = 0, 1, 2


@pytest.mark.parametrize("index", range(3), ids=[v["name"] for v in DATA["vocabularies"]])
def test_ids_are_those_of_llama_cpp(index):
    tokenizer = Tokenizer.from_metadata(sentencepiece_metadata(index))
    reference = DATA["vocabularies"][index]
    for text, ids, plain in zip(
        DATA["texts"], reference["ids"], reference["plain_ids"], strict=True
    ):
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.encode(text, add_special=False, parse_special=False) == plain, text
        assert tokenizer.encode(text) == ids, "remembered words give the same ids"


def test_tokens_over_word_borders_are_found():
    phrase = Tokenizer.from_metadata(sentencepiece_metadata(PHRASES))
    words = Tokenizer.from_metadata(sentencepiece_metadata(WORDS))
    pieces = [phrase.token_bytes(i) for i in phrase.encode("of the", add_special=False)]
    assert pieces == [b" of the"]
    assert len(words.encode("of the", add_special=False)) > 1


def test_the_space_that_encode_adds_is_taken_away_again():
    tokenizer = Tokenizer.from_metadata(sentencepiece_metadata(WORDS))
    ids = tokenizer.encode("hello<s>world [TOOL]  x")
    assert tokenizer.decode(ids) == "<s>hello<s>world [TOOL]  x"
    assert tokenizer.decode(ids, skip_special=True) == "helloworld [TOOL]  x"
    assert b"".join(map(tokenizer.token_bytes, ids[1:3])).startswith(b" h")


def test_no_space_is_added_where_the_file_says_so():
    tokenizer = Tokenizer.from_metadata(sentencepiece_metadata(BARE))
    ids = tokenizer.encode(" hello", add_special=False)
    assert tokenizer.decode(ids) == " hello"


def test_special_ids_have_defaults():
    tokenizer = Tokenizer.from_metadata(sentencepiece_metadata(WORDS))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.stop_ids) == (1, 2, {2})
    assert tokenizer.encode("") == [1]


def test_bytes_without_a_token_become_unknown():
    metadata = sentencepiece_metadata(WORDS)
    metadata["tokenizer.ggml.tokens"][3 + 0xE6] = "[no byte]"
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.encode("日", add_special=False)[1] == 0
    metadata |= {"tokenizer.ggml.unknown_token_id": None}
    with pytest.raises(TokenizerError, match="byte 0xe6"):
        Tokenizer.from_metadata(metadata).encode("日")


def test_long_text_is_merged_in_time():
    tokenizer = Tokenizer.from_metadata(sentencepiece_metadata(WORDS))
    for text in ("a" * 20_000, "ab" * 10_000, " " * 20_000, "the theory " * 2_000):
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


@pytest.mark.parametrize(
    ("scores", "sentence"),
    [
        (None, "no tokenizer.ggml.scores"),
        ([0.0], "1 entries for"),
        (["a"], "not a list of numbers"),
    ],
)
def test_damaged_scores(scores, sentence):
    metadata = sentencepiece_metadata(WORDS) | {"tokenizer.ggml.scores": scores}
    with pytest.raises(TokenizerError, match=sentence):
        Tokenizer.from_metadata(metadata)
