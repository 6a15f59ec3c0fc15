"""JSON calls between tags: whole, streamed, malformed, in any cut; and their grammar."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.text.grammar import GrammarCompiler
from draftree.text.tools.hermes import HermesDialect
from tests.examples import examples
from tests.text.test_grammar import byte_tokenizer, walk
from tests.text.tools.example import TOOLS, all_cuts, read_reply

DIALECT = HermesDialect()
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
BRACES = (
    '<tool_call>\n{"name": "store", "arguments": {"items": ["}\\n</tool", "\\"{["]}}\n</tool_call>'
)
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
PARIS_CALL = ("get_weather", '{"city": "Paris"}')
BRACES_CALL = ("store", '{"items": ["}\\n</tool", "\\"{["]}')
NOW_CALL = ("now", "{}")

CASES = [
    ("plain text", "plain text", []),
    (PARIS, "", [PARIS_CALL]),
    (f"Let me see.\n\n{PARIS}", "Let me see.", [PARIS_CALL]),
    (f"{PARIS}\n{NOW}\n{BRACES}\n", "", [PARIS_CALL, NOW_CALL, BRACES_CALL]),
    (f"{PARIS}\n\nThere.\n", "There.\n", [PARIS_CALL]),
    (f"a {NOW} b {NOW} c", "a b c", [NOW_CALL, NOW_CALL]),
    ("a <tool_cal", "a <tool_cal", []),
    ("a  \n", "a  \n", []),
    ("<tool_call>\n", "<tool_call>\n", []),
]


@pytest.mark.parametrize("is_trusted", [False, True])
@pytest.mark.parametrize(("reply", "text", "calls"), CASES)
def test_calls_in_any_cut(reply: str, text: str, calls: list, is_trusted: bool) -> None:
    for chunks in all_cuts(reply):
        assert read_reply(DIALECT, chunks, is_trusted=is_trusted) == (text, calls), chunks


MALFORMED = [
    "<tool_call>\nnot JSON\n</tool_call>",
    '<tool_call>\n{"name": "now"}\n</tool_call>',
    '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "now", "arguments": [1]}\n</tool_call>',
    '<tool_call>\n{"name": "now", "arguments": {"a": NaN}}\n</tool_call>',
    '<tool_call>\n{"name": "now", "arguments": {"a": "\\ud800"}}\n</tool_call>',
    '<tool_call>\n["now"]\n</tool_call>',
    "<tool_call></tool_call>",
    "<tool_call>" + "[" * 5000 + "</tool_call>",
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par',
]


@pytest.mark.parametrize("reply", MALFORMED)
def test_malformed_calls_come_out_as_text(reply: str) -> None:
    for chunks in ([reply], list(reply)):
        assert read_reply(DIALECT, chunks) == (reply, [])
        around = [" before \n", *chunks, " after"]
        assert read_reply(DIALECT, around) == (" before \n" + reply + " after", [])


def test_after_a_malformed_call_others_are_found() -> None:
    bad = MALFORMED[0]
    assert read_reply(DIALECT, list(f"x {bad} {PARIS} y")) == (f"x {bad} y", [PARIS_CALL])


def test_a_model_may_spell_calls_in_its_own_way() -> None:
    reply = '<tool_call>{"arguments":{"city":"Köln"},"name":"get_weather"}</tool_call>'
    assert read_reply(DIALECT, list(reply)) == ("", [("get_weather", '{"city": "Köln"}')])
    twice = '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert read_reply(DIALECT, [twice]) == ("", [("now", '{"a": 1}')])
    unknown = '<tool_call>{"name": "no_such_tool", "arguments": {}}</tool_call>'
    assert read_reply(DIALECT, [unknown]) == ("", [("no_such_tool", "{}")])


def test_arguments_are_streamed_where_the_grammar_vouches_for_them() -> None:
    parser = DIALECT.new_parser(TOOLS, is_trusted=True, new_id=lambda: "id")
    seen = [[p.call.arguments for p in parser.push(c) if p.call] for c in PARIS]
    assert "".join(a for part in seen for a in part) == PARIS_CALL[1]
    assert sum(bool(part) for part in seen) > len(PARIS_CALL[1])  # a piece a character, and a name
    assert parser.finish() == []


def test_a_trusted_call_that_is_cut_short_keeps_what_it_has() -> None:
    cut = PARIS[: PARIS.index("ris")]
    assert read_reply(DIALECT, list(cut), is_trusted=True) == (
        "",
        [("get_weather", '{"city": "Pa')],
    )


def test_a_trusted_parser_does_not_trust_what_looks_otherwise() -> None:
    """The tag may be spelled out by ordinary tokens, where no grammar applies."""
    for reply in (MALFORMED[0], "write <tool_call> and then JSON", "<tool_call>\n{"):
        for chunks in ([reply], list(reply)):
            assert read_reply(DIALECT, chunks, is_trusted=True) == (reply, [])


PIECES = ["<tool_call>", "</tool_call>", "<tool", "_call>", "\n", " ", "x", "{", "}", '"', NOW]
PIECES += ['{"name": "get_weather", "arguments": ', '{"city": "P"}', "}\n", PARIS, BRACES]


@given(st.lists(st.sampled_from(PIECES), max_size=10), st.booleans())
@examples(500)
def test_any_cut_gives_the_same(chunks: list[str], is_trusted: bool) -> None:
    reply = "".join(chunks)
    whole = read_reply(DIALECT, [reply], is_trusted=is_trusted)
    assert read_reply(DIALECT, chunks, is_trusted=is_trusted) == whole
    assert read_reply(DIALECT, list(reply), is_trusted=is_trusted) == whole
    if "<tool_call>" not in reply and not whole[1]:
        assert whole[0] == reply


def test_forced_calls_follow_the_grammar() -> None:
    """Random replies under the grammar are calls, to the last character."""
    tokenizer = byte_tokenizer()
    rules = DIALECT.write_rules(TOOLS, [t.parameters for t in TOOLS])
    names = set()
    for seed in range(12):
        rng = np.random.default_rng(seed)
        cursor = GrammarCompiler(tokenizer).compile(f"start: call\n{rules}").copy()
        reply = walk(cursor, tokenizer, rng, limit=3000)
        text, ((name, arguments),) = read_reply(DIALECT, list(reply), is_trusted=True)
        assert text == "" and read_reply(DIALECT, [reply])[1] == [
            (name, json.dumps(json.loads(arguments), ensure_ascii=False))
        ]
        names.add(name)
    assert len(names) > 1


def test_written_calls_are_read_again() -> None:
    arguments = {"city": 'Ba"den\n', "days": 3}
    reply = DIALECT.write_call("get_weather", arguments)
    assert read_reply(DIALECT, [reply], is_trusted=True) == read_reply(DIALECT, [reply])
    ((_, text),) = read_reply(DIALECT, [reply])[1]
    assert json.loads(text) == arguments
    assert "get_weather" in DIALECT.describe(TOOLS) and "<tool_call>" in DIALECT.describe(TOOLS)
    assert "sunny" in DIALECT.write_result("get_weather", "sunny")
