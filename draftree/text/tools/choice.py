"""Which dialect a model speaks, read from its chat template, and conversations for templates that
know no tools.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from draftree.errors import TokenizerError
from draftree.text.template import plain_content
from draftree.text.tools.coder import CoderDialect
from draftree.text.tools.dialect import Message, Tool, ToolDialect
from draftree.text.tools.generic import GenericDialect
from draftree.text.tools.hermes import HermesDialect


def choose_dialect(template: str, has_tag: bool) -> ToolDialect:
    """has_tag: the vocabulary has a token for the tag that calls begin with."""
    if "<function=" in template:
        return CoderDialect()
    if "<tool_call>" in template or (has_tag and not lists_tools(template)):
        return HermesDialect()
    is_parameters = '"parameters"' in template and '"arguments"' not in template
    return GenericDialect("parameters" if is_parameters else "arguments")


def lists_tools(template: str) -> bool:
    """Whether the template describes tools and writes calls itself."""
    return "tools" in template


def spell_out(
    messages: Sequence[Message], tools: Sequence[Tool], dialect: ToolDialect
) -> list[Message]:
    """The same conversation in plain messages: tools in the system message, calls and results as
    text.
    """
    names: dict[str, str] = {}  # call id -> function
    plain = [_spell_message(message, dialect, names) for message in messages]
    if not tools:
        return plain
    text = dialect.describe(tools)
    if plain and plain[0].get("role") in ("system", "developer"):
        first = {**plain[0], "content": f"{_text_of(plain[0])}\n\n{text}"}
        return [first, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _spell_message(message: Message, dialect: ToolDialect, names: dict[str, str]) -> Message:
    if message.get("role") == "tool":
        known = names.get(str(message.get("tool_call_id")), "the function")
        name = str(message.get("name") or known)
        return {"role": "user", "content": dialect.write_result(name, _text_of(message))}
    calls = message.get("tool_calls")
    if not calls:
        return message
    parts = [_text_of(message)] if message.get("content") else []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise TokenizerError("A tool call in the conversation does not name its function.")
        names[str(call.get("id"))] = function["name"]
        parts.append(dialect.write_call(function["name"], _arguments_of(function)))
    return {"role": message["role"], "content": "\n".join(parts)}


def _arguments_of(function: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):  # the model wrote it; show it to the model as it was
            return {"arguments": function["arguments"]}
    return arguments if isinstance(arguments, Mapping) else {}


def _text_of(message: Message) -> str:
    return plain_content(message.get("content")) or ""
