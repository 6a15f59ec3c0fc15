"""Byte-level BPE on vocabularies small enough to check by hand."""

import re
import subprocess
import sys
from functools import cache
from string import ascii_lowercase, digits

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.text import bpe
from draftree.text.bpe import byte_of_character
from draftree.text.pretokenize import PRETOKENIZERS
from draftree.text.tokenizer import Tokenizer
from tests.examples import examples
from tests.text.metadata import byte_metadata, scheme_metadata
from tests.weights.gguf_bytes import ARRAY, STRING, GgufBytes, array, entry, string, text_entry

LETTERS = ascii_lowercase + digits
COUNT_ARENAS = """
import sys
from pathlib import Path
import tokenizers
from draftree.text.tokenizer import Tokenizer
from draftree.weights.gguf import open_gguf

sys._debugmallocstats()
checkpoint = open_gguf(Path(sys.argv[1]))
tokenizer = Tokenizer.from_metadata(checkpoint.metadata)
sys._debugmallocstats()
"""


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


def test_building_leaves_no_holes_in_the_memory_of_the_interpreter(tmp_path):
    """One object that stays among the texts of all tokens would keep a megabyte of them."""
    pairs = [f"{a} {b}" for a in LETTERS for b in LETTERS]
    triples = [f"{pair.replace(' ', '')} {c}" for pair in pairs for c in LETTERS]
    metadata = byte_metadata(merges=(*pairs, *triples))
    entries = [text_entry("general.architecture", "x")]
    for key, value in metadata.items():
        if isinstance(value, str):
            entries.append(text_entry(key, value))
        elif isinstance(value[0], str):
            items = b"".join(map(string, value))
            entries.append(entry(key, ARRAY, array(STRING, len(value), items)))
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(GgufBytes(entries).build())
    command = [sys.executable, "-c", COUNT_ARENAS, str(path)]
    run = subprocess.run(command, capture_output=True, check=True, text=True)
    before, after = map(int, re.findall(r"arenas allocated current += +(\d+)", run.stderr))
    assert after - before <= 2


@cache
def scheme_tokenizer(pre: str) -> Tokenizer:
    return Tokenizer.from_metadata(scheme_metadata(pre))


TEXTS = st.text(st.sampled_from("ab1' \n\r\t;.é\u0301日\u00a0\u2028\x1c"), max_size=60)


@pytest.mark.parametrize("pre", {scheme: name for name, scheme in PRETOKENIZERS.items()}.values())
@examples(100)
@given(lines=st.lists(TEXTS, min_size=1, max_size=6))
def test_long_texts_are_cut_where_no_token_reaches_over(pre, lines):
    tokenizer = scheme_tokenizer(pre)
    text = "x\ny".join(lines)
    whole = tokenizer.encode(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "_PIECE_LEN", 0)
        assert len(bpe._cut_lines(text)) >= len(lines)
        assert tokenizer.encode(text) == whole
