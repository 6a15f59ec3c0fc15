"""Tool calls in a model's own way of writing: the words that all dialects share.

In: tools as clients describe them. Out: checked tools, and what a dialect has to offer: a text
that describes tools, grammars for calls, and a parser. Which one a model speaks: see choice.
"""

import hashlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

Message = Mapping[str, Any]

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. parameters: a JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    is_strict: bool = False  # arguments must follow the schema to the letter

    @property
    def definition(self) -> dict[str, Any]:
        """As templates expect it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a call. The first piece of each carries its id and name, all of them arguments."""

    index: int
    id: str | None
    name: str | None
    arguments: str  # a fragment of JSON text


class Piece(NamedTuple):
    """Either text or a part of a call."""

    text: str
    call: ToolCallDelta | None = None


class WrittenCall(NamedTuple):
    """A whole call. arguments: JSON text."""

    name: str
    arguments: str


class ToolParser(Protocol):
    """Finds calls in text, however it is cut. What is not a call comes out as it was."""

    def push(self, text: str) -> list[Piece]: ...
    def finish(self) -> list[Piece]:
        """What was held back because it might have become a call."""
        ...


class ToolDialect(Protocol):
    opening: str  # the tag that calls begin with; empty if there is none

    def describe(self, tools: Sequence[Tool]) -> str:
        """A system text for templates that do not list tools themselves."""
        ...

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str: ...

    def write_result(self, name: str, content: str) -> str: ...

    def write_rules(self, tools: Sequence[Tool], schemas: Sequence[Mapping[str, Any]]) -> str:
        """Lark rules: `call` is one whole call, `call_body` what follows its opening tag,
        `calls` one or more calls. schemas: of each tool's arguments.
        """
        ...

    def new_parser(
        self, tools: Sequence[Tool], is_trusted: bool, new_id: Callable[[], str]
    ) -> ToolParser:
        """is_trusted: calls follow the grammar, so arguments may be passed on as they arrive."""
        ...


def derive_call_ids(prompt: str, seed: int) -> Callable[[], str]:
    """Ids that differ between calls, prompts and seeds, but not between runs of one request."""
    base = hashlib.sha256(b"%d " % seed + prompt.encode("utf-8", "surrogatepass"))
    numbers = itertools.count()

    def new_id() -> str:
        digest = base.copy()
        digest.update(b"%d" % next(numbers))
        return f"call_{digest.hexdigest()[:24]}"

    return new_id


def read_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Check tools in the form {"type": "function", "function": {"name": …}}."""
    read = tuple(_read_tool(tool, place) for place, tool in enumerate(tools))
    names = [tool.name for tool in read]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two tools have the name {twice!r}")
    return read


def _read_tool(tool: Any, place: int) -> Tool:
    where = f"tools[{place}]"
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise ValueError(f'{where} must be an object with "type": "function"')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise ValueError(f"{where}.function must be an object")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{where}.function.name must be letters, digits, or one of _ - . :")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise ValueError(f"{where}.function.parameters must be a JSON schema")
    description = function.get("description")
    if not isinstance(description, str | None):
        raise ValueError(f"{where}.function.description must be text")
    schema = {"type": "object", "properties": {}, **(parameters or {})}
    if not isinstance(schema["properties"], Mapping):
        raise ValueError(f"{where}.function.parameters.properties must be an object")
    if not isinstance(schema.get("required", []), list):
        raise ValueError(f"{where}.function.parameters.required must be a list")
    return Tool(name, description or "", schema, bool(function.get("strict")))
