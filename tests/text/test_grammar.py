"""Masks say what may follow, checks and proposals agree with them; bad formats are explained."""

import json
import re

import numpy as np
import pytest

from draftree.errors import GrammarError
from draftree.text.grammar import (
    Cursor,
    FormatKind,
    GrammarCompiler,
    ResponseFormat,
    _read_problem,
    json_rule,
)
from draftree.text.tokenizer import Tokenizer
from tests.text.metadata import byte_metadata, sentencepiece_metadata

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
MERGES = ("a g", "ag e", '" :', "t r", "r u", "tr u", "n a", "na m", "nam e", '{ "')


def byte_tokenizer() -> Tokenizer:
    extra = (("<|endoftext|>", 3), ("<|im_end|>", 3), ("<unused>", 5), ("<tag>", 4))
    return Tokenizer.from_metadata(byte_metadata(*extra, merges=MERGES))


def spm_tokenizer() -> Tokenizer:
    return Tokenizer.from_metadata(sentencepiece_metadata(0))


TOKENIZERS = {"bytes": byte_tokenizer, "sentencepiece": spm_tokenizer}


def compile_format(tokenizer: Tokenizer, kind: FormatKind, definition: object = None) -> Cursor:
    rules = ResponseFormat(kind, definition).write_rules("content")
    return GrammarCompiler(tokenizer).compile(f"start: content\n{rules}").copy()


def mask_of(cursor: Cursor, tokenizer: Tokenizer) -> np.ndarray:
    """As booleans; the buffer is larger than the vocabulary and full of rubbish."""
    bits = np.full((tokenizer.vocab_size + 31) // 32 + 2, 0xA5A5A5A5, dtype=np.uint32)
    cursor.fill_mask(bits)
    flags = np.unpackbits(bits.view(np.uint8), bitorder="little").astype(bool)
    assert not flags[tokenizer.vocab_size :].any()
    return flags[: tokenizer.vocab_size]


def walk(cursor: Cursor, tokenizer: Tokenizer, rng: np.random.Generator, limit: int = 400) -> str:
    """Random allowed tokens to the end. The shortest come first at times, so that texts end."""
    text = b""
    for _ in range(limit):
        if cursor.is_complete:
            return text.decode()
        mask = mask_of(cursor, tokenizer)
        allowed = np.flatnonzero(mask)
        assert len(allowed), "a dead end"
        checked = [i for i in range(tokenizer.vocab_size) if cursor.count_valid((i,))]
        assert checked == allowed.tolist(), "check and mask differ"
        forced = cursor.propose_forced()
        if forced:
            assert allowed.tolist() == [forced[0]]
            assert cursor.count_valid(forced) == len(forced)
        token = int(rng.choice(allowed))
        if token in tokenizer.stop_ids:
            return text.decode()
        text += tokenizer.token_bytes(token)
        cursor.advance(token)
    raise AssertionError(f"the text does not end: {text!r}")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_random_texts_follow_the_schema(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    for seed in range(6):
        cursor = compile_format(tokenizer, FormatKind.JSON_SCHEMA, PERSON)
        value = json.loads(walk(cursor, tokenizer, np.random.default_rng(seed)))
        assert list(value) == ["name", "age", "tags"] and 0 <= value["age"] <= 120
        assert len(value["name"]) <= 8 and set(value["tags"]) <= {"red", "blue"}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("pattern", [r"[0-9]{2,4}/(ab|cd)?", r"a\.b\d", "(true|false), ok"])
def test_random_texts_match_the_pattern(name: str, pattern: str) -> None:
    tokenizer = TOKENIZERS[name]()
    texts = set()
    for seed in range(20):
        cursor = compile_format(tokenizer, FormatKind.REGEX, pattern)
        texts.add(walk(cursor, tokenizer, np.random.default_rng(seed)))
    assert all(re.fullmatch(pattern, text) for text in texts) and len(texts) > 1, texts


def test_lark_grammars_and_objects() -> None:
    tokenizer = byte_tokenizer()
    lark = 'start: word ("-" word)*\nword: "ab" | /[0-9]/\n'
    for seed in range(4):
        cursor = compile_format(tokenizer, FormatKind.LARK, lark)
        text = walk(cursor, tokenizer, np.random.default_rng(seed))
        assert re.fullmatch("(ab|[0-9])(-(ab|[0-9]))*", text)
    cursor = compile_format(tokenizer, FormatKind.JSON_OBJECT)
    tokens = tokenizer.encode('{"x": [1, {"y": null}]}')
    assert cursor.count_valid(tokens) == len(tokens)
    assert cursor.count_valid(tokenizer.encode("[1]")) == 0
    beyond = tokenizer.vocab_size  # rows that a model may have, and its tokenizer not
    assert cursor.count_valid((beyond,)) == 0
    assert cursor.count_valid((*tokens, beyond)) == len(tokens)


def test_gbnf_grammars() -> None:
    tokenizer = byte_tokenizer()
    gbnf = 'root ::= word ("-" word)*  # words\nword ::= "ab" | [0-9]{2,3} | "\\"" [^x]\n'
    texts = set()
    for seed in range(12):
        cursor = compile_format(tokenizer, FormatKind.GBNF, gbnf)
        texts.add(walk(cursor, tokenizer, np.random.default_rng(seed)))
    assert len(texts) > 1
    word = '(ab|[0-9]{2,3}|"[^x])'
    assert all(re.fullmatch(f"{word}(-{word})*", text, re.DOTALL) for text in texts), texts


@pytest.mark.parametrize("layout", ["{}", '{"a":1}', '{"a": 1}', '{\n  "a": 1\n}', '{ "a" : 1 }'])
def test_white_space_is_free_but_not_endless(layout: str) -> None:
    tokenizer = byte_tokenizer()
    cursor = compile_format(tokenizer, FormatKind.JSON_OBJECT)
    for token in tokenizer.encode(layout):
        assert cursor.count_valid((token,)) == 1
        cursor.advance(token)
    assert cursor.is_complete
    cursor = compile_format(tokenizer, FormatKind.JSON_OBJECT)
    assert cursor.count_valid(tokenizer.encode("{\n" + " " * 60)) == 42


def test_stop_tokens_only_where_the_text_may_end() -> None:
    tokenizer = byte_tokenizer()
    assert len(tokenizer.stop_ids) == 2
    cursor = compile_format(tokenizer, FormatKind.REGEX, "[0-9]+")
    for token, is_end in (("7", False), ("8", True)):
        for stop in tokenizer.stop_ids:
            assert mask_of(cursor, tokenizer)[stop] == is_end == cursor.count_valid((stop,))
        cursor.advance(tokenizer.encode(token)[0])
    special = [i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)]
    text = compile_format(tokenizer, FormatKind.REGEX, "(.|\n)*x")
    assert not mask_of(text, tokenizer)[special].any()


def test_a_copy_goes_its_own_way() -> None:
    tokenizer = byte_tokenizer()
    cursor = compile_format(tokenizer, FormatKind.REGEX, "ab|cd")
    other = cursor.copy()
    cursor.advance(tokenizer.encode("a")[0])
    assert other.count_valid(tokenizer.encode("cd")) == 2
    assert cursor.count_valid(tokenizer.encode("b")) == 1


LINKS = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(9000)}
CHAIN = {"$ref": "#/$defs/d0", "$defs": {**LINKS, "d9000": {"type": "null"}}}
BAD = [
    (FormatKind.JSON_SCHEMA, {"type": "objekt"}, "Invalid type: objekt"),
    (FormatKind.JSON_SCHEMA, {"properties": {"a": {"$ref": "#/nope"}}}, "/nope"),
    (FormatKind.JSON_SCHEMA, {"not": {"type": "string"}}, "not"),
    (FormatKind.JSON_SCHEMA, {"type": "array", "uniqueItems": True}, "uniqueItems"),
    (FormatKind.JSON_SCHEMA, {"type": "string", "pattern": "("}, "unclosed group"),
    (FormatKind.JSON_SCHEMA, {"type": "integer", "minimum": 5, "maximum": 2}, "minimum"),
    (FormatKind.JSON_SCHEMA, {"x": float("nan")}, "JSON"),
    (FormatKind.JSON_SCHEMA, {"x": object()}, "JSON"),
    (FormatKind.JSON_SCHEMA, {"$ref": "#"}, "no text fits it"),
    (FormatKind.JSON_SCHEMA, CHAIN, "references"),
    (FormatKind.JSON_SCHEMA, "text", "must be an object"),
    (FormatKind.JSON_SCHEMA, None, "must be an object"),
    (FormatKind.REGEX, "a(", "unclosed group"),
    (FormatKind.REGEX, "(?=a)b", "look-around"),
    (FormatKind.REGEX, {"a": 1}, "must be text"),
    (FormatKind.LARK, "start: foo", "foo"),
    (FormatKind.LARK, None, "must be text"),
    (FormatKind.GBNF, 'a ::= "b"', "No 'root' rule found"),
    (FormatKind.GBNF, "root ::= foo", "foo"),
    (FormatKind.GBNF, 'root ::= "a', "cannot be read"),
    (FormatKind.GBNF, f"root ::= {'(' * 3000}a{')' * 3000}", "nested too deeply"),
    (FormatKind.GBNF, 'root ::= "a"\n' * 257, "more than 256 rules"),
    (FormatKind.GBNF, {"root": 1}, "must be text"),
]


@pytest.mark.parametrize(("kind", "definition", "words"), BAD)
def test_bad_formats_are_explained(kind: FormatKind, definition: object, words: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(words)) as caught:
        compile_format(byte_tokenizer(), kind, definition)
    assert "\n" not in str(caught.value) and " | " not in str(caught.value)
    assert "<" not in str(caught.value)  # neither a trace nor the library's own marks


def test_a_failure_of_the_library_is_one_sentence() -> None:
    """As it fails at 512 tools of 40 parameters each."""
    trace = "".join(f"\n   {i}: <unknown>" for i in range(30))
    message = f"panic: assertion failed: grammar.symbols.len() < 9\n<backtrace>{trace}"
    assert _read_problem(message).startswith("there is too much of it")


@pytest.mark.parametrize("depth", [200, 5000])
def test_deep_schemas_are_refused(depth: int) -> None:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    with pytest.raises(GrammarError, match="recursion"):
        compile_format(byte_tokenizer(), FormatKind.JSON_SCHEMA, schema)


def test_large_schemas_neither_hang_nor_crash() -> None:
    tokenizer = byte_tokenizer()
    for schema in (
        {"type": "string", "pattern": "(((a{1,1000}){1,1000}){1,1000})"},
        {"type": "array", "items": {"type": "null"}, "minItems": 10**7},
        {"enum": [f"x{i}" for i in range(5000)]},
        {"$defs": {"n": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}, "$ref": "#/$defs/n"},
    ):
        cursor = compile_format(tokenizer, FormatKind.JSON_SCHEMA, schema)
        assert mask_of(cursor, tokenizer).any()


def test_grammars_are_compiled_once() -> None:
    compiler = GrammarCompiler(byte_tokenizer())
    first = compiler.compile(json_rule("start", PERSON))
    assert compiler.compile(json_rule("start", PERSON)) is first
    for i in range(80):
        compiler.compile(f'start: "{i}"')
    assert compiler.compile(json_rule("start", PERSON)) is not first


def test_a_model_without_an_end() -> None:
    tokenizer = Tokenizer.from_metadata(byte_metadata())
    with pytest.raises(GrammarError, match="ends a text"):
        compile_format(tokenizer, FormatKind.JSON_OBJECT)


def test_an_impossible_token_is_an_error() -> None:
    tokenizer = byte_tokenizer()
    cursor = compile_format(tokenizer, FormatKind.REGEX, "ab")
    with pytest.raises(GrammarError, match="cannot go on"):
        cursor.advance(tokenizer.encode("x")[0])
