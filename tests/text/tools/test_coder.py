"""Calls as nested tags: values become JSON by their schema, in any cut; and their grammar."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.text.grammar import GrammarCompiler
from draftree.text.tools.coder import CoderDialect
from draftree.text.tools.dialect import read_tools
from tests.examples import examples
from tests.text.test_grammar import byte_tokenizer
from tests.text.tools.example import TOOLS, all_cuts, new_parser, read_reply

DIALECT = CoderDialect()


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def call(name: str, *parameters: tuple[str, str]) -> str:
    body = "".join(parameter(key, value) for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


PARIS = call("get_weather", ("city", "Paris"), ("days", "3"))
PARIS_CALL = ("get_weather", '{"city": "Paris", "days": 3}')
CODE = call("get_weather", ("city", 'if a < b:\n    print("</parameter>")\n'))
CODE_CALL = ("get_weather", '{"city": "if a < b:\\n    print(\\"</parameter>\\")\\n"}')
NOW, NOW_CALL = call("now"), ("now", "{}")
STORE = call("store", ("items", '["a", "b"]'), ("is_new", "true"))
STORE_CALL = ("store", '{"items": ["a", "b"], "is_new": true}')


@pytest.mark.parametrize("is_trusted", [False, True])
@pytest.mark.parametrize(
    ("reply", "text", "calls"),
    [
        (PARIS, "", [PARIS_CALL]),
        (NOW, "", [NOW_CALL]),
        (f"Look:\n{PARIS}\n{STORE}\n{NOW}", "Look:", [PARIS_CALL, STORE_CALL, NOW_CALL]),
        (call("get_weather", ("city", "")), "", [("get_weather", '{"city": ""}')]),
        ("no call <tool", "no call <tool", []),
    ],
)
def test_calls_in_any_cut(reply: str, text: str, calls: list, is_trusted: bool) -> None:
    for chunks in all_cuts(reply):
        assert read_reply(DIALECT, chunks, is_trusted=is_trusted) == (text, calls), chunks


def test_texts_may_hold_tags_where_the_grammar_vouches_for_them() -> None:
    for chunks in all_cuts(CODE):
        assert read_reply(DIALECT, chunks, is_trusted=True) == ("", [CODE_CALL])


MALFORMED = [
    "<tool_call>\nnothing\n</tool_call>",
    "<tool_call>\n<function=now>\n</tool_call>",
    "<tool_call>\n<function=now>\nwords\n</function>\n</tool_call>",
    "<tool_call>\n<function=now>\n<parameter=a>\n1\n</function>\n</tool_call>",
    f"<tool_call>\n<function=store>\n{parameter('items', '[]')}words</function>\n</tool_call>",
    PARIS[:-5],
]


@pytest.mark.parametrize("reply", MALFORMED)
def test_malformed_calls_come_out_as_text(reply: str) -> None:
    for chunks in ([reply], list(reply)):
        assert read_reply(DIALECT, ["a ", *chunks, " b"]) == (f"a {reply} b", [])


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("city", "3", '"3"'),
        ("days", "3", "3"),
        ("days", "three", '"three"'),
        ("unknown", "3", '"3"'),
        ("is_new", "True", "true"),
        ("is_new", "false", "false"),
        ("items", ' [1, {"a": null}] ', '[1, {"a": null}]'),
    ],
)
def test_values_become_json_by_their_schema(key: str, value: str, expected: str) -> None:
    name = "store" if key in ("is_new", "items") else "get_weather"
    reply = call(name, (key, value))
    assert read_reply(DIALECT, [reply]) == ("", [(name, f'{{"{key}": {expected}}}')])


def test_a_looser_spelling_is_understood() -> None:
    reply = (
        "<tool_call><function=get_weather><parameter=city>Rome</parameter></function></tool_call>"
    )
    assert read_reply(DIALECT, list(reply)) == ("", [("get_weather", '{"city": "Rome"}')])


def test_arguments_are_streamed_one_by_one() -> None:
    parser = DIALECT.new_parser(TOOLS, is_trusted=True, new_id=lambda: "id")
    seen = [p.call.arguments for c in PARIS for p in parser.push(c) if p.call]
    assert seen == ["", '{"city": "Paris"', ', "days": 3', "}"]


PIECES = [PARIS, STORE, "<tool_call>", "</tool_call>", "\n", " ", "x", "<function=now>\n", "<"]
PIECES += ["<parameter=city>\n", "\n</parameter>\n", "</function>", "\n<function=get_weather>\n"]


@given(st.lists(st.sampled_from(PIECES), max_size=10), st.booleans())
@examples(400)
def test_any_cut_gives_the_same(chunks: list[str], is_trusted: bool) -> None:
    reply = "".join(chunks)
    whole = read_reply(DIALECT, [reply], is_trusted=is_trusted)
    assert read_reply(DIALECT, chunks, is_trusted=is_trusted) == whole
    assert read_reply(DIALECT, list(reply), is_trusted=is_trusted) == whole


def test_forced_calls_follow_the_grammar() -> None:
    tokenizer = byte_tokenizer()
    rules = DIALECT.write_rules(TOOLS, [t.parameters for t in TOOLS])
    found = set()
    for seed in range(40):
        cursor = GrammarCompiler(tokenizer).compile(f"start: call\n{rules}").copy()
        try:
            reply = walk_short(cursor, tokenizer, np.random.default_rng(seed))
        except TimeoutError:
            continue
        text, ((name, arguments),) = read_reply(DIALECT, list(reply), is_trusted=True)
        value = json.loads(arguments)
        required = next(t.parameters.get("required", []) for t in TOOLS if t.name == name)
        assert text == "" and set(required) <= set(value)
        assert value.get("unit", "C") in ("C", "F") and isinstance(value.get("days", 0), int)
        found.add((name, *value))
    assert len(found) > 2, found


def test_names_and_choices_in_any_script() -> None:
    schema = {
        "type": "object",
        "properties": {"größe": {"type": "string", "enum": ['\u00fc\n"', "b"]}},
        "required": ["größe"],
    }
    tools = read_tools([{"function": {"name": "f", "parameters": schema}}])
    rules = DIALECT.write_rules(tools, [schema])
    cursor = GrammarCompiler(byte_tokenizer()).compile(f"start: call\n{rules}")
    reply = call("f", ("größe", '\u00fc\n"'))
    tokens = byte_tokenizer().encode(reply)
    assert cursor.count_valid(tokens) == len(tokens)
    pieces = new_parser(DIALECT, tools, is_trusted=True).push(reply)
    arguments = "".join(piece.call.arguments for piece in pieces if piece.call)
    assert arguments == '{"größe": "\u00fc\\n\\""}'


def walk_short(cursor, tokenizer, rng) -> str:
    """Like walk, but texts that are free are ended by what must follow them."""
    text, ending = b"", tokenizer.encode("\n</parameter>\n")
    for _ in range(300):
        if cursor.is_complete:
            return text.decode()
        allowed = [i for i in range(tokenizer.vocab_size) if cursor.count_valid((i,))]
        tokens = [int(rng.choice(allowed))]
        if len(allowed) > 100 and rng.random() < 0.5 and cursor.count_valid(ending) == len(ending):
            tokens = ending
        for token in tokens:
            text += tokenizer.token_bytes(token)
            cursor.advance(token)
    raise TimeoutError


def test_written_calls_are_read_again() -> None:
    arguments = {"city": 'Ba"den', "days": 3, "unit": "C"}
    reply = DIALECT.write_call("get_weather", arguments)
    for is_trusted in (False, True):
        ((_, text),) = read_reply(DIALECT, [reply], is_trusted=is_trusted)[1]
        assert json.loads(text) == arguments
    assert "get_weather" in DIALECT.describe(TOOLS)
    assert "<function=" in DIALECT.describe(TOOLS)
    assert "sunny" in DIALECT.write_result("get_weather", "sunny")
