"""What every HTTP API here shares: strict request models, errors, server-sent events.

In: bytes of a request. Out: a checked model, or an ApiError that names the field. Knows no API.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Protocol, TypeVar, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
)
from pydantic.json_schema import models_json_schema
from pydantic_core import CoreSchema, PydanticCustomError, from_json

REFUSED: Final = "refused"
IGNORED: Final = "ignored"
OUTLET: Final = "draftree.outlet"  # names of extensions of ASGI
TOO_LONG: Final = "exceed_context_size_error"  # llama.cpp's name of it
CROWDED: Final = "draftree.crowded"
IDENTITY: Final = "draftree.identity"
_MAX_PARTS: Final = 500_000  # of a body: objects, lists, and the quotes of names and texts
_MAX_ERRORS: Final = 1000
_NO_NUMBERS: Final = (b"NaN", b"Infinity")
_MAX_NAME: Final = 200
_JSON: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class Outlet(Protocol):
    """A shorter way for pieces of a body, past all that only its beginning and its end need."""

    @property
    def is_free(self) -> bool:
        """Whether pieces can be written now; otherwise they go the usual way, and wait."""
        ...

    def write_piece(self, data: bytes) -> None: ...


def _fail_fast(schema: Any) -> None:
    if isinstance(schema, list | tuple):
        for member in schema:
            _fail_fast(member)
    elif isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for member in schema.values():
            _fail_fast(member)


def _drop_empty(value: Any) -> Any:
    return None if value in ("", [], {}) else value


def _refuse_unknown(value: Any) -> None:
    if _drop_empty(value) is not None:
        raise PydanticCustomError("extra_forbidden", "Unknown field")


Nothing = Annotated[None, BeforeValidator(_drop_empty)]  # null, or what is empty


class WireModel(BaseModel):
    """A JSON object of a request. Fields that it does not declare are refused by name, unless they
    say nothing: clients send whole messages back, with all the fields that they know.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)
    __pydantic_extra__: dict[str, Annotated[None, BeforeValidator(_refuse_unknown)]]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """One wrong item of a list is enough: millions of them would take gigabytes to report."""
        schema = handler(source)
        _fail_fast(schema)
        return schema


Body = TypeVar("Body", bound=WireModel)


def optional(what: str, **limits: Any) -> Any:
    """A field that need not be given."""
    return Field(None, description=what, **limits)


def refused(why: str) -> Any:
    """A field that clients may send, but only with a value that asks for nothing."""
    return Field(None, description=why, json_schema_extra={REFUSED: True})


def ignored(what: str) -> Any:
    """A field that cannot change the text: all is taken, and a header of the reply names it."""
    return Field(None, description=what, json_schema_extra={IGNORED: True})


def find_ignored(body: WireModel, place: str = "") -> Iterator[str]:
    """Names of ignored fields that ask for something; those in lists are not looked for."""
    for name, field in type(body).model_fields.items():
        value = getattr(body, name)
        if isinstance(value, WireModel):
            yield from find_ignored(value, f"{place}{name}.")
        elif value is False or _drop_empty(value) is None:
            continue
        elif is_marked(field.json_schema_extra, IGNORED):
            yield f"{place}{name}"


def returned(why: str = "As it came in a reply; not used.") -> Any:
    """A field of replies, which come back as parts of a conversation."""
    return Field(None, description=why, exclude=True)


class ApiError(Exception):
    """A reply that is not 200. Each API writes it in its own words."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.details: Mapping[str, int] = {}  # what OpenAI's errors do not have

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}


def busy(status: int, message: str, retry_after: int) -> ApiError:
    """429 or 503: the request is fine, but not now."""
    kind = "rate_limit_error" if status == 429 else "service_unavailable_error"
    return ApiError(status, message, kind=kind, code=kind, retry_after=retry_after)


def engine_failure(sentence: str) -> ApiError:
    return ApiError(500, sentence, kind="server_error", code="engine_failure")


def parse_body(model: type[Body], raw: bytes) -> Body:
    # Quotes and brackets are counted before they become objects, which are much larger.
    num_quotes = raw.count(b'"') - raw.count(rb"\"")
    if num_quotes + raw.count(b"{") + raw.count(b"[") > _MAX_PARTS:
        sentence = f"The body has too many parts: more than {_MAX_PARTS}."
        raise ApiError(400, sentence, code="too_many_parts")
    try:
        body = model.model_validate_json(raw)
        if any(name in raw for name in _NO_NUMBERS):
            from_json(raw, allow_inf_nan=False)  # finds them in fields that may hold anything
    except ValidationError as error:
        raise _explain(model, error) from None
    except ValueError as error:
        sentence = f"NaN and Infinity are not JSON: {error}."
        raise ApiError(400, sentence, code="invalid_json") from None
    return body


def check_value(model: type[Body], value: dict[str, Any]) -> Body:
    """The same for a request that was translated."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _explain(model, error) from None


def _explain(model: type[WireModel], error: ValidationError) -> ApiError:
    if error.error_count() > _MAX_ERRORS:
        sentence = f"More than {_MAX_ERRORS} fields are unknown or wrong."
        return ApiError(400, sentence, code="invalid_value")
    found = error.errors(include_url=False, include_context=False, include_input=False)
    if found[0]["type"] == "json_invalid":
        reason = found[0]["msg"].removeprefix("Invalid JSON: ")
        return ApiError(400, f"The body is not valid JSON: {reason}.", code="invalid_json")
    if not found[0]["loc"]:
        return ApiError(400, "The body must be a JSON object.")
    named = [(_name(model, item["loc"]), item) for item in found]
    # Of the members of a union, the one that was followed furthest was meant.
    param, first = max(named, key=lambda pair: len(pair[1]["loc"]))
    top = str(first["loc"][0]) if first["loc"] else ""
    field = model.model_fields.get(top)
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"Unknown field: {param}.", param=param, code="unknown_field")
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing.", param=param, code="missing_field")
    if field is not None and is_marked(field.json_schema_extra, REFUSED):
        sentence = f"{param} is not supported here. {field.description}"
        return ApiError(400, sentence, param=param, code="unsupported_field")
    reasons = dict.fromkeys(item["msg"] for name, item in named if name == param)
    sentence = f"{param}: {' or '.join(reasons)}." if param else f"{' or '.join(reasons)}."
    return ApiError(400, sentence, param=param or None, code="invalid_value")


def is_marked(extra: object, mark: str) -> bool:
    return isinstance(extra, Mapping) and bool(extra.get(mark))


def _name(model: type[WireModel], location: tuple[int | str, ...]) -> str:
    """The path of a field as the client wrote it. What names a member of a union in the location is
    left out, and told from a field of the same name by the models themselves.
    """
    name, kinds = "", [_members(model)]  # of which the value at this place may be
    for part in location:
        members = [member for kind in kinds for member in kind]
        if any(len(kind) > 1 for kind in kinds):
            kinds = [_members(member) for member in members if _is_called(member, str(part))]
        elif isinstance(part, int):
            name += f"[{part}]"
            kinds = [_members(item) for kind in members for item in get_args(kind)]
        elif any(_is_object(member) for member in members):
            name += f".{part}" if name else part
            kinds = [_members(inner) for kind in members for inner in _fields(kind, part)]
    return name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}…"


def _members(kind: Any) -> list[Any]:
    """The members of a union, or the type alone; None is no member, since nothing names it."""
    if get_origin(kind) is Annotated:
        return _members(get_args(kind)[0])
    if get_origin(kind) not in (Union, UnionType):
        return [kind]
    members = [member for member in get_args(kind) if member is not NoneType]
    return members if len(members) > 1 else _members(members[0])


def _is_called(member: Any, label: str) -> bool:
    """Whether a label may name this member of a union: a model by its own name or by its tag."""
    (kind,) = _members(member)[:1]
    if not _is_model(kind):
        return True
    values = [_members(field.annotation)[0] for field in kind.model_fields.values()]
    return label == kind.__name__ or any(label in get_args(value) for value in values)


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _is_object(kind: Any) -> bool:
    return _is_model(kind) or get_origin(kind) is dict


def _fields(kind: Any, name: str) -> list[Any]:
    """The type of an object's field, if it has one of that name."""
    if _is_model(kind):
        fields = kind.model_fields.items()
        return [field.annotation for key, field in fields if name == (field.alias or key)]
    return list(get_args(kind)[1:]) if get_origin(kind) is dict else []


def to_json(value: Any) -> str:
    return _JSON.encode(value)


def encode(text: str) -> bytes:
    """Text of a model may hold halves of characters' pairs, which UTF-8 has no bytes for."""
    return text.encode("utf-8", "replace")


def event(data: str, name: str | None = None) -> str:
    """One server-sent event; data is JSON, which has no line ends."""
    return f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n"


def schema_of(models: Iterable[type[WireModel]]) -> dict[str, Any]:
    """The models and all that they hold, by name, as OpenAPI components."""
    _, schema = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    definitions: dict[str, Any] = schema.get("$defs", {})
    return definitions
