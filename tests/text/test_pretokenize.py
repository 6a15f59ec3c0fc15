"""How text is cut into words, seen through ids that llama.cpp gave for the same vocabulary."""

import pytest

from draftree.errors import TokenizerError
from draftree.text.pretokenize import PRETOKENIZERS, find_pretokenizer
from draftree.text.tokenizer import Tokenizer
from tests.text.metadata import read_data, scheme_metadata

SCHEMES = ["default", "gpt-2", "llama-bpe", "qwen2", "qwen35", "smollm"]


@pytest.mark.parametrize("pre", SCHEMES)
def test_ids_are_those_of_llama_cpp(pre):
    data = read_data("schemes.json")
    tokenizer = Tokenizer.from_metadata(scheme_metadata(pre))
    for text, ids in zip(data["texts"], data["ids"][pre], strict=True):
        assert tokenizer.encode(text) == ids, text


def test_the_reference_ids_tell_the_schemes_apart():
    ids = read_data("schemes.json")["ids"]
    assert len({str(ids[pre]) for pre in SCHEMES}) == len(SCHEMES)


def test_unknown_schemes_are_named():
    with pytest.raises(TokenizerError, match=r"'gpt-5'.* supported are ") as caught:
        find_pretokenizer("gpt-5")
    assert all(name in str(caught.value) for name in PRETOKENIZERS)


def test_a_file_without_a_scheme_is_cut_by_default():
    metadata = scheme_metadata("default")
    del metadata["tokenizer.ggml.pre"]
    data = read_data("schemes.json")
    tokenizer = Tokenizer.from_metadata(metadata)
    assert [tokenizer.encode(text) for text in data["texts"]] == data["ids"]["default"]
