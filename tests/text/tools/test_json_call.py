"""Replies that are nothing but JSON calls, in a dialect that has tags and in one that has none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.text.tools.generic import GenericDialect
from draftree.text.tools.hermes import HermesDialect
from tests.examples import examples
from tests.text.tools.example import TOOLS, all_cuts, new_parser, read_reply
from tests.text.tools.oracle import may_become, read_whole

DIALECT = HermesDialect()
NOW = '{"name": "now", "arguments": {}}'
TAGGED = f"<tool_call>\n{NOW}\n</tool_call>"
NAMES = {tool.name for tool in TOOLS}


@pytest.mark.parametrize("is_trusted", [False, True])
@pytest.mark.parametrize(
    ("reply", "text", "calls"),
    [
        (NOW, "", 1),
        (f"```json\n{NOW}\n```", "", 1),
        (f"{NOW}\n{NOW}", "", 2),
        (f"{NOW} {TAGGED}", NOW, 1),
        ('{"name": "Ann"}', '{"name": "Ann"}', 0),
        ('{"name": "Ann"} ' + TAGGED + " end", '{"name": "Ann"} end', 1),
    ],
)
def test_tags_may_be_forgotten(reply: str, text: str, calls: int, is_trusted: bool) -> None:
    for chunks in all_cuts(reply):
        found = read_reply(DIALECT, chunks, is_trusted=is_trusted)
        assert found == (text, [("now", "{}")] * calls), chunks


HELD = [
    '{"name": "now", "arguments": {"path": "a\\/b", "x": [1, {"y": null}',
    '```json\n{"name": "get_w',
    f'[{NOW}, {{"name"',
    f"```\n{NOW}\n```\n",
    '{"name": "now", "id": 3, "arguments": "{\\"a\\"',
]


@pytest.mark.parametrize("dialect", [DIALECT, GenericDialect()], ids=["tags", "bare"])
@pytest.mark.parametrize("beginning", HELD)
def test_what_may_become_a_call_is_held(beginning: str, dialect) -> None:
    parser = new_parser(dialect)
    assert [piece for letter in beginning for piece in parser.push(letter)] == []
    assert "".join(piece.text for piece in parser.push("\x00")) == beginning + "\x00"


@pytest.mark.parametrize("dialect", [DIALECT, GenericDialect()], ids=["tags", "bare"])
@pytest.mark.parametrize(
    "dead",
    [
        '{"name": "A',  # no such tool
        '{"name": "nowh',
        '{"name": 3',
        '```json\n{"name": "x',
        '{"name": "now"}',  # no arguments
        '{"name": "now", "arguments": [',
        '{"name": "now", "arguments": "text',
        '{"name": "now", "arguments": {a',
        '{"name": "now", "arguments": {"a": N',
        f"{NOW} i",
        f"```json\n{NOW}\n```\nI",
        f'[{NOW}, {{"name": "o',
        '{"na me',
    ],
)
def test_text_is_shown_as_soon_as_it_cannot_be_a_call(dead: str, dialect) -> None:
    """Whatever follows, however long: the reply is shown while it is written."""
    parser = new_parser(dialect)
    # The last letter decides, or the one before it that began something unknown.
    shown = [piece.text for letter in dead for piece in parser.push(letter)]
    assert "".join(shown).rstrip() == dead.rstrip()
    assert "".join(piece.text for piece in parser.push("word " * 5000)).count("word") == 5000


PIECES = [NOW, '{"name"', ": ", '"now"', '"get_weather"', '"x"', ", ", '"arguments"', "{}", "{"]
PIECES += ["}", "[", "]", "```", "```json", "\n", ";", "x", "1", '"', '"id"', "\\", '"{}"', "true"]
WHOLE = ['{"name": "now", "arguments": ', '{"name": "get_weather", "parameters": {"city": "']
REPLIES = st.lists(st.sampled_from(PIECES + WHOLE), max_size=9).map("".join)


@given(REPLIES)
@examples(500)
def test_held_for_exactly_as_long_as_it_may_be_calls(reply: str) -> None:
    parser = new_parser(GenericDialect())
    shown = ""
    for place, letter in enumerate(reply, 1):
        shown += "".join(piece.text for piece in parser.push(letter))
        is_open = may_become(reply[:place], NAMES)
        assert shown == ("" if is_open else reply[:place]), reply[:place]
    calls = read_whole(reply, NAMES) if may_become(reply, NAMES) else []
    assert read_reply(GenericDialect(), [reply]) == ("" if calls else reply, calls)
