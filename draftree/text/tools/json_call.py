"""Calls written as JSON objects with a name and arguments: reading and writing them, and replies
that are nothing else, which even models that know tags write at times.
"""

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from draftree.text.grammar import Recognizer, quote
from draftree.text.tools.dialect import Piece, ToolCallDelta, ToolParser, WrittenCall

_FENCES = ("```json", "```")
_CHARACTER = r'([^"\\\x00-\x1f]|\\["\\\/bfnrt]|\\u[0-9a-fA-F]{4})'
# JSON as Python reads it, which is more than the library's own rules take.
_MEMBERS = rf"""
name: "\"name\"" colon NAME
arguments: ("\"arguments\"" | "\"parameters\"") colon (object | PACKED)
extra: KEY colon value
value: object | "[" ws (value (comma value)*)? ws "]" | STRING | NUMBER | "true" | "false" | "null"
object: "{{" ws (STRING colon value (comma STRING colon value)*)? ws "}}"
colon: ws ":" ws
comma: ws "," ws
ws: /[ \t\r\n]+/?
STRING: /"{_CHARACTER}*"/
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+\-]?[0-9]+)?/
KEY: /"{_CHARACTER}*"/ & ~/"(name|arguments|parameters)"/
PACKED: /"( |\\[nrt])*\{{{_CHARACTER}*"/
"""
# A call between tags, of any name, and a reply that is nothing but calls of known ones.
BODY_RULES = rf"""start: ws call ws "</tool_call>"
call: "{{" ws (extra comma)* (named_first | named_last) (comma extra)* ws "}}"
named_first: name comma (extra comma)* arguments
named_last: arguments comma (extra comma)* name
NAME: /"{_CHARACTER}+"/
{_MEMBERS}"""
_REPLY_RULES = rf"""start: ws ("```json" | "```")? ws item (SKIP? item)* SKIP? ("```" ws)?
item: call | "[" ws call (comma call)* ws "]"
call: "{{" ws name comma (extra comma)* arguments (comma extra)* ws "}}"
SKIP: /[ \t\r\n,;]+/
{_MEMBERS}NAME: """


def write_json_call(name: str, arguments: Mapping[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def read_json_call(text: str) -> WrittenCall | None:
    """A call in JSON text that holds nothing else."""
    try:
        return _read_value(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _read_value(value: Any) -> WrittenCall | None:
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # JSON within JSON, as clients send it
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()  # halves of surrogate pairs are no text
    return WrittenCall(name, text)


class WholeParser:
    """For replies that are nothing but calls, with or without a fence around them: held back for as
    long as they may be that. inner: reads whatever is something else.
    """

    def __init__(
        self, names: Collection[str], new_id: Callable[[], str], inner: ToolParser | None = None
    ) -> None:
        self._names, self._new_id, self._inner = names, new_id, inner
        words = " | ".join(quote(quote(name)) for name in sorted(names))
        self._recognizer = Recognizer(_REPLY_RULES + words)
        self._held: str | None = ""  # None: it is something else

    def push(self, text: str) -> list[Piece]:
        if self._held is None:
            return self._pass_on(text)
        self._held += text
        if self._recognizer.push(text) == "":
            return []
        held, self._held = self._held, None
        return self._pass_on(held)

    def finish(self) -> list[Piece]:
        held, self._held = self._held, None
        calls = self._read(held) if held else []
        if not calls:
            pieces = self._pass_on(held or "")
            return pieces + (self._inner.finish() if self._inner is not None else [])
        return [
            Piece("", ToolCallDelta(i, self._new_id(), call.name, call.arguments))
            for i, call in enumerate(calls)
        ]

    def _pass_on(self, text: str) -> list[Piece]:
        if self._inner is not None:
            return self._inner.push(text)
        return [Piece(text)] if text else []

    def _read(self, text: str) -> list[WrittenCall]:
        text = text.strip()
        for fence in _FENCES:
            text = text.removeprefix(fence)
        text = text.removesuffix(_FENCES[1])
        decoder, values, place = json.JSONDecoder(), [], 0
        try:
            while place < len(text):
                while place < len(text) and text[place] in " \n\t\r,;":
                    place += 1
                if place < len(text):
                    value, place = decoder.raw_decode(text, place)
                    values += value if isinstance(value, list) else [value]
            calls = [_read_value(value) for value in values]
        except (ValueError, RecursionError):
            return []
        known = [call for call in calls if call is not None and call.name in self._names]
        return known if len(known) == len(calls) else []
