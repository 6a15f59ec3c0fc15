"""Tools that tests share, and ways to read replies in any cut."""

from collections.abc import Sequence
from itertools import count

from draftree.text.tools.dialect import Tool, ToolDialect, ToolParser, read_tools

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"type": "string", "enum": ["C", "F"]},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
STORE = {
    "type": "function",
    "function": {
        "name": "store",
        "parameters": {
            "type": "object",
            "properties": {
                "items": {"type": "array", "items": {"type": "string"}},
                "is_new": {"type": "boolean"},
            },
            "required": ["items"],
            "additionalProperties": False,
        },
    },
}
NOW = {
    "type": "function",
    "function": {"name": "now", "parameters": {"additionalProperties": False}},
}
TOOLS = read_tools([WEATHER, STORE, NOW])


def new_parser(
    dialect: ToolDialect, tools: Sequence[Tool] = TOOLS, *, is_trusted: bool = False
) -> ToolParser:
    ids = count()
    return dialect.new_parser(tools, is_trusted, lambda: f"call_{next(ids)}")


def read_reply(
    dialect: ToolDialect, chunks: Sequence[str], *, is_trusted: bool = False
) -> tuple[str, list[tuple[str, str]]]:
    """The text, and (name, arguments) of each call, all put together."""
    parser = new_parser(dialect, is_trusted=is_trusted)
    text, calls = "", []
    for piece in [*(p for chunk in chunks for p in parser.push(chunk)), *parser.finish()]:
        text += piece.text
        call = piece.call
        if call is None:
            assert piece.text, "no empty pieces"
            continue
        if call.id is not None:
            assert call.id == f"call_{len(calls)}" and call.name is not None
            calls.append([call.name, ""])
        assert call.index == len(calls) - 1, "calls come one after another"
        calls[-1][1] += call.arguments
    return text, [(name, arguments) for name, arguments in calls]


def all_cuts(text: str) -> list[list[str]]:
    """Whole, letter by letter, and cut once at every place."""
    return [[text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))]
