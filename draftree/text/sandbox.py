"""Jinja for templates that came with a file nobody has checked.

Set up as the `transformers` library sets it up, so that models' own templates work; no access to
Python's insides (Jinja's sandbox), and every loop, call, filter, operator and list is metered.
Imports jinja2, so import it only where a template is rendered.
"""

from collections.abc import Callable, Iterator
from datetime import datetime
from functools import wraps
from json import dumps
from types import CodeType
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from draftree.text.meter import Meter

_FILTERS = (
    *("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first"),
    *("float", "format", "groupby", "indent", "int", "items", "join", "last", "length", "list"),
    *("lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round", "safe"),
    *("select", "selectattr", "sort", "string", "title", "trim", "truncate", "unique", "upper"),
    "wordcount",
)
_DICT_NAMES = frozenset(dir(dict))
_SAFE_NAMES: dict[type, frozenset[str]] = {
    str: frozenset(("startswith", "endswith", "strip", "lstrip", "rstrip", "split")),
    LoopContext: frozenset(("index", "index0", "first", "last", "length", "previtem", "nextitem")),
}
# These make long texts of short ones, or bytes, which nothing here measures.
_REFUSED_METHODS = frozenset(
    ("center", "encode", "expandtabs", "format_map", "ljust", "rjust", "translate", "zfill")
)
# The arguments that decide how much a filter makes, in order.
_ARGUMENTS = {
    "join": ("d",),
    "replace": ("old", "new"),
    "indent": ("width",),
    "round": ("precision",),
}
_MAX_PRECISION = 100
_MAX_JSON_INDENT = 16


class Sandbox(ImmutableSandboxedEnvironment):
    """A Jinja environment for one rendering, with one meter."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, meter: Meter) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=self.finalize_output,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
        )
        self.meter = meter
        self.filters = {name: self._guard_filter(name, FILTERS[name]) for name in _FILTERS}
        self.filters["tojson"] = self._write_json
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = self._format_now

    def tick(self, text_len: int) -> None:
        """Runs at the start of each loop turn and macro call that writes so much fixed text."""
        self.meter.charge(1 + text_len)

    def finalize_output(self, value: Any) -> Any:
        self.meter.charge(self.meter.weigh(value))
        return value

    def concat_values(self, *values: Any) -> str:
        """The operator ~."""
        self.meter.charge(sum(map(self.meter.weigh, values)))
        return "".join(map(str, values))

    def cut_value(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """value[start:stop:step]"""
        result = value[start:stop:step]
        self.meter.charge_value(result)
        return result

    def weigh_literal(self, value: Any) -> Any:
        """A list, tuple or dict that the template writes out."""
        self.meter.charge_value(value)
        self.meter.weigh(value)
        return value

    def getattr(self, obj: Any, attribute: str) -> Any:
        """The same as Jinja's, the usual cases first: it asks about every attribute anew."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_NAMES:
            if attribute in obj:
                return obj[attribute]
            return self.undefined(obj=obj, name=attribute)
        if attribute in _SAFE_NAMES.get(kind, ()):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"it may not use {attribute!r} (of {type(obj).__name__})")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.meter.charge_operator(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, list | tuple):
            self.meter.weigh(result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        inner = super().wrap_str_format(value)
        if inner is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            self.meter.charge_format(value.__self__, *args, *kwargs.values())
            return inner(*args, **kwargs)

        return checked

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = __self.meter
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, int | float | bytes) or name in _REFUSED_METHODS:
            raise SecurityError(f"the method {name} is not allowed")
        if isinstance(owner, str) and name == "join" and args:
            args = (list(args[0]), *args[1:])
            meter.charge_join(owner, args[0])
        elif isinstance(owner, str) and name == "replace" and len(args) > 1:
            meter.charge_replace(owner, args[0], args[1])
        elif __obj is dict or __obj is __self.globals["namespace"]:
            for value in (*args, *kwargs.values()):
                meter.weigh(value)
        result = super().call(__context, __obj, *args, **kwargs)
        meter.charge_value(result)
        return result

    def _guard_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            own, (value, *others) = args[:skipped], args[skipped:]
            for argument in (value, *others, *kwargs.values()):
                self.meter.weigh(argument)
            named = dict(zip(_ARGUMENTS.get(name, ()), others, strict=False)) | kwargs
            if name == "join":
                value = list(value)
                self.meter.charge_join(str(named.get("d", "")), value)
            elif name == "format":
                self.meter.charge_format(str(value), *others, *kwargs.values())
            elif name == "replace":
                old, new = str(named.get("old")), str(named.get("new"))
                self.meter.charge_replace(str(value), old, new)
            elif name == "indent":
                width = named.get("width", 4)
                width_len = width if isinstance(width, int) else len(str(width))
                self.meter.charge((1 + str(value).count("\n")) * width_len)
            elif name == "round" and abs(named.get("precision", 0)) > _MAX_PRECISION:
                raise SecurityError("the filter round was given too large a number")
            result = function(*own, value, *others, **kwargs)
            self.meter.charge_value(result)
            return result

        return guarded

    def _write_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        if isinstance(indent, str) or (indent or 0) > _MAX_JSON_INDENT:
            raise SecurityError("the filter tojson was given too large an indent")
        self.meter.charge(self.meter.weigh(value) * (1 + (indent or 0)))
        return dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def _format_now(self, template: str) -> str:
        self.meter.charge_format(template)
        return datetime.now().strftime(template)


class GenerationTag(Extension):
    """{% generation %}…{% endgeneration %} marks text for training; here it is only its body."""

    tags = frozenset(("generation",))  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _MeterInsertion(NodeTransformer):
    """Puts the meter into everything that can repeat or grow and that Jinja does not route."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concat_values", node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        return _call("cut_value", [node.node, *(bound or nodes.Const(None) for bound in bounds)])

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._weigh(node) if node.ctx == "load" else self.generic_visit(node)

    def _weigh(self, node: nodes.Literal) -> nodes.Node:
        self.generic_visit(node)
        return _call("weigh_literal", [node])

    def _add_tick(self, node: Any) -> nodes.Node:
        text_len = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("tick", [nodes.Const(text_len)])))
        result: nodes.Node = node
        return result

    visit_For = visit_Macro = visit_CallBlock = visit_Block = _add_tick
    visit_List = visit_Dict = _weigh


def compile_template(source: str, meter: Meter) -> CodeType:
    sandbox = Sandbox(meter)
    tree: nodes.Template = _MeterInsertion().visit(sandbox.parse(source))
    tree.set_environment(sandbox)
    return sandbox.compile(tree)


def render_template(code: CodeType, meter: Meter, variables: dict[str, Any]) -> Iterator[str]:
    """The text in pieces; what goes wrong in the template is raised as whatever it is."""
    sandbox = Sandbox(meter)
    template = sandbox.template_class.from_code(sandbox, code, sandbox.make_globals(None))
    return template.generate(variables)


def _call(method: str, args: list[Any]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))
