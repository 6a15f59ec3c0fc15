"""Bare JSON calls: a whole reply or nothing; streamed where the grammar vouches for it."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.text.grammar import GrammarCompiler
from draftree.text.tools.generic import GenericDialect
from tests.examples import examples
from tests.text.test_grammar import byte_tokenizer, walk
from tests.text.tools.example import TOOLS, all_cuts, new_parser, read_reply

DIALECT = GenericDialect()
PARIS = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
NOW = '{"name": "now", "arguments": {}}'
PARIS_CALL, NOW_CALL = ("get_weather", '{"city": "Paris"}'), ("now", "{}")

WHOLE = [
    (PARIS, [PARIS_CALL]),
    (f"  {PARIS}\n", [PARIS_CALL]),
    (f"```json\n{PARIS}\n```", [PARIS_CALL]),
    (f"```\n{PARIS}\n```\n", [PARIS_CALL]),
    (f"[{PARIS}, {NOW}]", [PARIS_CALL, NOW_CALL]),
    (f"{PARIS}\n{NOW}", [PARIS_CALL, NOW_CALL]),
    (f"{PARIS}; {NOW}", [PARIS_CALL, NOW_CALL]),
    ('{"name":"now","parameters":{}}', [NOW_CALL]),
    ('{\n  "name": "now",\n  "arguments": {}\n}', [NOW_CALL]),
]


@pytest.mark.parametrize(("reply", "calls"), WHOLE)
def test_a_reply_that_is_nothing_but_calls(reply: str, calls: list) -> None:
    for chunks in all_cuts(reply):
        assert read_reply(DIALECT, chunks) == ("", calls), chunks


@pytest.mark.parametrize(
    "reply",
    [
        "plain text",
        f"Here: {PARIS}",
        f"{PARIS} is a call",
        '{"name": "Ann", "age": 3}',
        '{"name": "unknown_tool", "arguments": {}}',
        f'[{NOW}, {{"name": "unknown_tool", "arguments": {{}}}}]',
        '{"name": "now", "arguments": {"a": NaN}}',
        '{"name": "now", "argum',
        '{"answer": 1}',
        "```python\nprint()\n```",
        "[1, 2]",
        "",
        " \n",
    ],
)
def test_anything_else_is_text(reply: str) -> None:
    for chunks in all_cuts(reply):
        assert read_reply(DIALECT, chunks) == (reply, [])


def test_text_is_shown_as_soon_as_it_cannot_be_a_call() -> None:
    parser = new_parser(DIALECT)
    assert parser.push(' {"na') == []
    assert [p.text for p in parser.push('tion": 1')] == [' {"nation": 1']
    assert [p.text for p in parser.push(" and {")] == [" and {"]


@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_forced_calls_are_streamed(key: str) -> None:
    dialect = GenericDialect(key)
    reply = f"{PARIS}\n{NOW}".replace("arguments", key)
    for chunks in all_cuts(reply):
        assert read_reply(dialect, chunks, is_trusted=True) == ("", [PARIS_CALL, NOW_CALL])
    parser = new_parser(dialect, is_trusted=True)
    seen = [[p.call.arguments for p in parser.push(c) if p.call] for c in reply]
    assert sum(bool(part) for part in seen) > 15


@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_forced_calls_follow_the_grammar(key: str) -> None:
    tokenizer, dialect = byte_tokenizer(), GenericDialect(key)
    rules = dialect.write_rules(TOOLS, [t.parameters for t in TOOLS])
    for seed in range(6):
        cursor = GrammarCompiler(tokenizer).compile(f"start: call\n{rules}").copy()
        reply = walk(cursor, tokenizer, np.random.default_rng(seed), limit=3000)
        text, ((name, arguments),) = read_reply(dialect, list(reply), is_trusted=True)
        assert text == "" and json.loads(reply) == {"name": name, key: json.loads(arguments)}


PIECES = [
    PARIS,
    NOW,
    "```json",
    "```",
    "\n",
    " ",
    "[",
    "]",
    ",",
    '{"name"',
    ": ",
    '"now"',
    "x",
    "}",
]


@given(st.lists(st.sampled_from(PIECES), max_size=8), st.booleans())
@examples(300)
def test_any_cut_gives_the_same(chunks: list[str], is_trusted: bool) -> None:
    reply = "".join(chunks)
    whole = read_reply(DIALECT, [reply], is_trusted=is_trusted)
    assert read_reply(DIALECT, chunks, is_trusted=is_trusted) == whole
    assert read_reply(DIALECT, list(reply), is_trusted=is_trusted) == whole
    if not whole[1]:
        assert whole[0] == reply


def test_descriptions() -> None:
    text = DIALECT.describe(TOOLS)
    assert all(tool.name in text for tool in TOOLS) and '"arguments"' in text
    assert "get_weather" in DIALECT.write_result("get_weather", "sunny")
    assert read_reply(DIALECT, [DIALECT.write_call("now", {})]) == ("", [NOW_CALL])
