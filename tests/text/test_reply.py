"""Reasoning, text and calls come out the same, however the reply is cut; stop strings end it."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.text.reply import DeltaKind, ReplyReader
from draftree.text.segments import Segments
from draftree.text.tools.coder import CoderDialect
from draftree.text.tools.generic import GenericDialect
from draftree.text.tools.hermes import HermesDialect
from tests.examples import examples
from tests.text.tools.example import TOOLS

NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CODER = "<tool_call>\n<function=now>\n</function>\n</tool_call>"


def read(
    *chunks: str,
    dialect=None,
    is_open: bool = False,
    stop: tuple[str, ...] = (),
    is_trusted: bool = False,
    is_single: bool = False,
) -> tuple[str, str, list[tuple[str, str]], bool]:
    """Reasoning, text, calls, and whether the reply was stopped."""
    ids = count()
    parser = None
    if dialect is not None:
        parser = dialect.new_parser(TOOLS, is_trusted, new_id=lambda: str(next(ids)))
    reader = ReplyReader(
        segments=Segments(is_reasoning=is_open), stop=stop, parser=parser, is_single=is_single
    )
    texts = {DeltaKind.REASONING: "", DeltaKind.TEXT: ""}
    calls: list[list[str]] = []
    for piece in [*(p for chunk in chunks for p in reader.push(chunk)), *reader.finish()]:
        if piece.tool_call is None:
            assert piece.text
            texts[piece.kind] += piece.text
            continue
        assert piece.kind is DeltaKind.TOOL_CALL and not piece.text
        if piece.tool_call.id is not None:
            calls.append([str(piece.tool_call.name), ""])
        calls[-1][1] += piece.tool_call.arguments
    found = [(name, arguments) for name, arguments in calls]
    return texts[DeltaKind.REASONING], texts[DeltaKind.TEXT], found, reader.is_stopped


@pytest.mark.parametrize(
    ("reply", "options", "expected"),
    [
        ("hello", {}, ("", "hello", [], False)),
        ("<think>hm</think>\n\nhello", {}, ("hm", "hello", [], False)),
        ("hm\n</think>\n\nhello", {"is_open": True}, ("hm", "hello", [], False)),
        (f"<think>a {NOW} b</think>{NOW}", {}, (f"a {NOW} b", "", [("now", "{}")], False)),
        ("one STOP two", {"stop": ("STOP",)}, ("", "one ", [], True)),
        ("<think>STOP</think>x STOP", {"stop": ("STOP",)}, ("STOP", "x ", [], True)),
        (f"a {NOW} b{NOW}", {"is_single": True}, ("", "a b", [("now", "{}")], True)),
        (f"{NOW} STOP {NOW}", {"stop": ("STOP",)}, ("", "", [("now", "{}")], True)),
        ("x <tool_cSTOP", {"stop": ("STOP",)}, ("", "x <tool_c", [], True)),
        ("x ST", {"stop": ("STOP",)}, ("", "x ST", [], False)),
    ],
)
def test_whole_and_letter_by_letter(reply: str, options: dict, expected: tuple) -> None:
    for is_trusted in (False, True):
        settings_ = {"dialect": HermesDialect(), "is_trusted": is_trusted, **options}
        assert read(reply, **settings_) == expected
        assert read(*reply, **settings_) == expected


PIECES = ["<think>", "</think>", "</", "think>", "\n", " ", "a", "STOP", "ST", "OP", NOW, CODER]
PIECES += ["<tool_call>", "</tool_call>", "<tool", '{"name": "now", "arguments": {}}', "```json"]
DIALECTS = {"hermes": HermesDialect(), "coder": CoderDialect(), "generic": GenericDialect()}


@given(
    st.lists(st.sampled_from(PIECES), max_size=12),
    st.sampled_from([None, *DIALECTS]),
    st.fixed_dictionaries(
        {
            "is_open": st.booleans(),
            "stop": st.sampled_from([(), ("STOP",), ("ST", "a")]),
            "is_trusted": st.booleans(),
            "is_single": st.booleans(),
        }
    ),
)
@examples(600)
def test_any_cut_gives_the_same(chunks: list[str], name: str | None, options: dict) -> None:
    reply = "".join(chunks)
    dialect = DIALECTS[name] if name else None
    whole = read(reply, dialect=dialect, **options)
    assert read(*chunks, dialect=dialect, **options) == whole
    assert read(*reply, dialect=dialect, **options) == whole


def test_after_the_end_there_is_nothing() -> None:
    reader = ReplyReader(stop=("x",))
    assert [p.text for p in reader.push("ax")] == ["a"]
    assert reader.is_stopped and reader.push("more") == [] and reader.finish() == []


def test_reasoning_is_known_while_it_lasts() -> None:
    reader = ReplyReader(segments=Segments())
    states = []
    for chunk in ("<think>", "hm", "</think>", "so"):
        reader.push(chunk)
        states.append(reader.is_reasoning)
    assert states == [True, True, False, False]
    assert not ReplyReader().is_reasoning
