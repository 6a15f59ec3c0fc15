"""Tags: nothing is held back for longer than it may become a call, and no call is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.text.tools.coder import CoderDialect
from draftree.text.tools.hermes import HermesDialect
from tests.examples import examples
from tests.text.tools.example import all_cuts, new_parser, read_reply
from tests.text.tools.oracle import may_become_body

HERMES, CODER = HermesDialect(), CoderDialect()
CALL = {dialect: dialect.write_call("store", {"items": ["a"]}) for dialect in (HERMES, CODER)}
STORE = ("store", '{"items": ["a"]}')
PARAMETER = "\n<function=store>\n<parameter=items>\n"


@pytest.mark.parametrize("is_trusted", [False, True])
@pytest.mark.parametrize(
    ("dialect", "dead"),
    [
        (HERMES, "<tool_call> t"),
        (HERMES, "<tool_call>\n{n"),
        (HERMES, '<tool_call>\n{"name": "now"}'),
        (HERMES, '<tool_call>\n{"name":"now", "arguments": {}, }'),
        (HERMES, '<tool_call>\n{"name":"now", "arguments": {}} b'),
        (CODER, "<tool_call> t"),
        (CODER, "<tool_call>\n<function>"),
        (CODER, "<tool_call>\n<function=a\n"),
        (CODER, "<tool_call><function=now> w"),
        (CODER, f"<tool_call>{PARAMETER}\n[]</parameter></function>w".replace("\n", "")),
    ],
)
def test_text_after_a_tag_is_shown_as_soon_as_it_is_no_call(dialect, dead, is_trusted) -> None:
    parser = new_parser(dialect, is_trusted=is_trusted)
    shown = [piece.text for letter in f"See {dead}" for piece in parser.push(letter)]
    assert "".join(shown).rstrip() == f"See {dead}".rstrip()
    assert "".join(piece.text for piece in parser.push("word " * 5000)).count("word") == 5000
    calls = [piece.call for piece in parser.push(CALL[dialect]) if piece.call]
    assert calls[0].name == "store"  # a tag that begins nothing does not hide a call


@pytest.mark.parametrize("is_trusted", [False, True])
def test_arguments_may_hold_tags(is_trusted: bool) -> None:
    reply = '<tool_call>{"name": "store", "arguments": {"items": ["</tool_call>"]}}</tool_call>.'
    for chunks in all_cuts(reply):
        found = read_reply(HERMES, chunks, is_trusted=is_trusted)
        assert found == (".", [("store", '{"items": ["</tool_call>"]}')])
    reply = f"<tool_call>{PARAMETER}</tool_call>\n</parameter>\n</function>\n</tool_call>."
    for chunks in all_cuts(reply):
        found = read_reply(CODER, chunks, is_trusted=is_trusted)
        assert found == (".", [("store", '{"items": "</tool_call>"}')])


PIECES = ['{"name"', '"name"', ": ", '"now"', ", ", '"arguments"', "{}", "{", "}", "[", "]", "\n"]
PIECES += [
    "x",
    "1",
    '"',
    '"id"',
    "\\",
    '"{}"',
    "true",
    "</tool_call>",
    '{"name": "f", "parameters"',
]
PIECES += ['{"arguments": {}, "name": "', '{"name": "now", "arguments": {"a": "']


@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
@examples(500)
def test_held_for_exactly_as_long_as_it_may_be_a_call(body: str) -> None:
    parser = new_parser(HERMES)
    assert parser.push("<tool_call>") == []
    shown = ""
    for place, letter in enumerate(body, 1):
        pieces = parser.push(letter)
        shown += "".join(piece.text for piece in pieces)
        is_open = may_become_body(body[:place])
        if is_open is None:
            assert [piece.call is not None for piece in pieces] == [True] or shown
            return
        assert (shown == "") == is_open
        if not is_open:  # what may be white space before a call, or the beginning of a tag, waits
            waiting = f"<tool_call>{body[:place]}".removeprefix(shown)
            assert waiting.strip() in ("", "<")
            return
