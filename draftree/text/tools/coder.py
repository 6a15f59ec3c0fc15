"""Calls as tags within tags, the way Qwen3-Coder writes them: every argument has a tag of its own.

Texts stand as they are; anything else is JSON. Arguments are passed on one at a time.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftree.text.grammar import json_rule, quote
from draftree.text.tools.dialect import Tool, ToolParser, WrittenCall
from draftree.text.tools.hermes import HermesDialect
from draftree.text.tools.parser import CallStyle, TagParser

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>\s*", re.DOTALL)
_TRUSTED = re.compile(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>\n", re.DOTALL)
_BODY_RULES = r"""start: WS? "<function=" NAME ">" parameter* WS? "</function>" WS? "</tool_call>"
parameter: WS? "<parameter=" NAME ">" value
value[lazy]: /(.|\n)*<\/parameter>/
NAME: /[^>\n]+/
WS: /[ \t\r\n]+/
"""
_PARAMETER_END, _FUNCTION_END = "\n</parameter>\n", "</function>"


class CoderDialect(HermesDialect):
    """The same tags around another kind of call."""

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        body = "".join(
            f"<parameter={key}>\n{_write_value(value)}\n</parameter>\n"
            for key, value in arguments.items()
        )
        return f"{self.opening}{_header(name)}{body}{_FUNCTION_END}\n{self._closing}"

    def write_rules(self, tools: Sequence[Tool], schemas: Sequence[Mapping[str, Any]]) -> str:
        pairs = enumerate(zip(tools, schemas, strict=True))
        rules = "".join(_write_body(f"body_{i}", tool.name, schema) for i, (tool, schema) in pairs)
        bodies = " | ".join(f"body_{i}" for i in range(len(tools)))
        end = quote(f"{_FUNCTION_END}\n{self._closing}")
        return (
            f"call_body: ({bodies}) {end}\n"
            f'call: "{self.opening}" call_body\ncalls: call ("\\n" call)*\n{rules}'
        )

    def new_parser(
        self, tools: Sequence[Tool], is_trusted: bool, new_id: Callable[[], str]
    ) -> ToolParser:
        schemas = {tool.name: tool.parameters for tool in tools}
        style = CallStyle(
            self.opening,
            self._closing,
            {_header(name): name for name in schemas},
            lambda body: _read_call(body, schemas),
            lambda name: _ParameterReader(schemas[name]),
            _BODY_RULES,
        )
        return TagParser(style, is_trusted, new_id)


def _header(name: str) -> str:
    return f"\n<function={name}>\n"


def _write_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _write_body(rule: str, name: str, schema: Mapping[str, Any]) -> str:
    """Required arguments must be there; the order is that of the schema."""
    required = set(schema.get("required", ()))
    shared = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema}
    parts, rules = [], ""
    for i, (key, value) in enumerate(schema.get("properties", {}).items()):
        part, start = f"{rule}_{i}", quote(f"<parameter={key}>\n")
        parts.append(part if key in required else f"{part}?")
        inner = f"{part}_value"
        rules += f"{part}: {start} {inner}\n" + _write_value_rule(inner, value, shared)
    return f"{rule}: {quote(_header(name))} {' '.join(parts)}\n{rules}"


def _write_value_rule(rule: str, schema: Any, shared: Mapping[str, Any]) -> str:
    """An argument's value and the tag that ends it."""
    if not isinstance(schema, Mapping) or _is_text(schema):
        choices = schema.get("enum", ()) if isinstance(schema, Mapping) else ()
        if choices:
            words = " | ".join(quote(f"{choice}{_PARAMETER_END}") for choice in choices)
            return f"{rule}: {words}\n"
        pattern = _PARAMETER_END.replace("\n", r"\n").replace("/", r"\/")
        return f"{rule}[lazy]: /(.|\\n)*{pattern}/\n"
    return f"{rule}: {rule}_json {quote(_PARAMETER_END)}\n" + json_rule(
        f"{rule}_json", {**shared, **schema}
    )


def _is_text(schema: Mapping[str, Any]) -> bool:
    """Whether a value is written as it is. Without a type it is."""
    kinds = schema.get("type")
    if kinds is None:
        lists = (schema.get("anyOf"), schema.get("oneOf"))
        options = [option for one in lists if isinstance(one, list) for option in one]
        if options:
            return any(_is_text(option) for option in options if isinstance(option, Mapping))
        return not schema.keys() & {"$ref", "properties", "items", "const"}
    return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)


def _read_value(text: str, schema: Any) -> str:
    """JSON text of an argument."""
    if isinstance(schema, Mapping) and not _is_text(schema):
        word = text.strip()
        for spelling in (word, word.lower()):  # True and False, as in Python
            try:
                return json.dumps(json.loads(spelling), ensure_ascii=False)
            except (ValueError, RecursionError):
                continue
    return json.dumps(text, ensure_ascii=False)


def _read_call(body: str, schemas: Mapping[str, Mapping[str, Any]]) -> WrittenCall | None:
    match = _FUNCTION.fullmatch(body)
    if match is None:
        return None
    name, inner = match[1], match[2]
    properties = schemas.get(name, {}).get("properties", {})
    parts, place = [], 0
    while found := _PARAMETER.match(inner, place):
        value = found[2].removeprefix("\n").removesuffix("\n")
        key = found[1]
        parts.append(f"{quote(key)}: {_read_value(value, properties.get(key))}")
        place = found.end()
    if inner[place:].strip():
        return None
    return WrittenCall(name, "{" + ", ".join(parts) + "}")


class _ParameterReader:
    """Arguments of a call that follows the grammar, one whole parameter at a time."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.is_done = False
        self._properties = schema.get("properties", {})
        self._held = ""
        self._separator = "{"

    def push(self, text: str) -> tuple[str, str]:
        self._held += text
        if _PARAMETER_END not in self._held[-len(text) - len(_PARAMETER_END) :]:
            found = None  # a long value is not searched again and again
        else:
            found = _TRUSTED.match(self._held)
        written = ""
        while found:
            value = _read_value(found[2], self._properties.get(found[1]))
            written += f"{self._separator}{quote(found[1])}: {value}"
            self._separator, self._held = ", ", self._held[found.end() :]
            found = _TRUSTED.match(self._held)
        if not self._held.startswith(_FUNCTION_END):
            return written, ""
        self.is_done = True
        written += "{}" if self._separator == "{" else "}"
        return written, self._held[len(_FUNCTION_END) :]
