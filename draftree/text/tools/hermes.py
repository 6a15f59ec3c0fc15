"""Calls as JSON between <tool_call> and </tool_call>, the way Hermes and Qwen write them."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftree.text.grammar import json_rule, quote
from draftree.text.tools.dialect import Tool, ToolParser
from draftree.text.tools.json_call import BODY_RULES, WholeParser, read_json_call, write_json_call
from draftree.text.tools.parser import CallStyle, JsonReader, TagParser


class HermesDialect:
    opening = "<tool_call>"
    _closing = "</tool_call>"

    def describe(self, tools: Sequence[Tool]) -> str:
        lines = "\n".join(json.dumps(tool.definition, ensure_ascii=False) for tool in tools)
        example = self.write_call("function-name", {"argument": "value"})
        return (
            f"You can call these functions:\n<tools>\n{lines}\n</tools>\n\n"
            f"To call one or more of them, write for each call:\n{example}"
        )

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{self.opening}\n{write_json_call(name, arguments)}\n{self._closing}"

    def write_result(self, name: str, content: str) -> str:
        return f"<tool_response>\n{content}\n</tool_response>"

    def write_rules(self, tools: Sequence[Tool], schemas: Sequence[Mapping[str, Any]]) -> str:
        rules = "".join(
            f"body_{i}: {quote(_header(tool.name))} args_{i}\n" + json_rule(f"args_{i}", schema)
            for i, (tool, schema) in enumerate(zip(tools, schemas, strict=True))
        )
        bodies = " | ".join(f"body_{i}" for i in range(len(tools)))
        end = quote("}\n" + self._closing)
        return (
            f"call_body: ({bodies}) {end}\n"
            f'call: "{self.opening}" call_body\ncalls: call ("\\n" call)*\n{rules}'
        )

    def new_parser(
        self, tools: Sequence[Tool], is_trusted: bool, new_id: Callable[[], str]
    ) -> ToolParser:
        style = CallStyle(
            self.opening,
            self._closing,
            {_header(tool.name): tool.name for tool in tools},
            read_json_call,
            lambda name: JsonReader(),
            BODY_RULES,
        )
        return WholeParser(
            {tool.name for tool in tools}, new_id, TagParser(style, is_trusted, new_id)
        )


def _header(name: str) -> str:
    return f'\n{{"name": "{name}", "arguments": '
