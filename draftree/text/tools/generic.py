"""Calls as bare JSON objects, for models that were taught no tags: the whole reply is the call.

A reply that may be one is held back to its end, unless the grammar vouches for it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftree.text.grammar import json_rule, quote
from draftree.text.tools.dialect import Tool, ToolParser
from draftree.text.tools.json_call import WholeParser, read_json_call, write_json_call
from draftree.text.tools.parser import CallStyle, JsonReader, TagParser

_START = '{"name": "'


class GenericDialect:
    """key: what the arguments are called."""

    opening = ""

    def __init__(self, key: str = "arguments") -> None:
        self._key = key

    def describe(self, tools: Sequence[Tool]) -> str:
        lines = "\n".join(json.dumps(t.definition["function"], ensure_ascii=False) for t in tools)
        example = self.write_call("function-name", {"argument": "value"})
        return (
            f"You can call these functions:\n{lines}\n\n"
            f"To call one, reply with this JSON and nothing else:\n{example}"
        )

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return write_json_call(name, arguments, self._key)

    def write_result(self, name: str, content: str) -> str:
        return f"Result of {name}:\n{content}"

    def write_rules(self, tools: Sequence[Tool], schemas: Sequence[Mapping[str, Any]]) -> str:
        rules = "".join(
            f"body_{i}: {quote(_START + self._header(tool.name))} args_{i}\n"
            + json_rule(f"args_{i}", schema)
            for i, (tool, schema) in enumerate(zip(tools, schemas, strict=True))
        )
        bodies = " | ".join(f"body_{i}" for i in range(len(tools)))
        return f'call: ({bodies}) "}}"\ncalls: call ("\\n" call)*\n{rules}'

    def new_parser(
        self, tools: Sequence[Tool], is_trusted: bool, new_id: Callable[[], str]
    ) -> ToolParser:
        names = {tool.name for tool in tools}
        if not is_trusted:
            return WholeParser(names, new_id)
        headers = {self._header(name): name for name in names}
        style = CallStyle(_START, "}", headers, read_json_call, lambda name: JsonReader())
        return TagParser(style, True, new_id)

    def _header(self, name: str) -> str:
        return f'{name}", "{self._key}": '
