"""Schemas of arguments, closed: an object that lists properties has no others, or it says so.

Small models invent arguments where they may. What shares its value with another schema (allOf, a
reference with more beside it) stays open: neither of the two lists everything.
"""

from collections.abc import Iterable, Mapping
from typing import Any

_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
# Each says something of an object's members; two of them share its value.
_PARTS = {"properties", "patternProperties", "additionalProperties", "unevaluatedProperties"}
_PARTS |= {"propertyNames", "minProperties", "dependentRequired", "dependencies", "$dynamicRef"}
_PARTS |= {"allOf", "anyOf", "oneOf", "$ref", "if", "not", "dependentSchemas"}


def close_objects(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    shared: set[str] = set()  # references to what must stay open
    while True:
        places: set[str] = set()
        before = len(shared)
        try:
            closed: Mapping[str, Any] = _close(schema, "#", False, shared, places)
        except RecursionError:  # too deep for a grammar as well
            return schema
        if len(shared) == before:
            return closed if shared <= places else schema


def _close(value: Any, place: str, is_shared: bool, shared: set[str], places: set[str]) -> Any:
    if not isinstance(value, Mapping):
        return value
    places.add(place)
    is_shared |= place in shared
    parts = value.keys() & _PARTS
    is_joint = is_shared or len(parts) > 1
    if is_joint and isinstance(value.get("$ref"), str):
        shared.add(value["$ref"])
    closed = dict(value)
    for key, inner in value.items():
        is_inner_shared = is_joint if key in _PARTS - {"properties"} else is_shared
        if key in _NAMED and isinstance(inner, Mapping):
            members: Iterable[tuple[Any, Any]] = inner.items()
            if key in ("$defs", "definitions"):
                is_inner_shared = False
        elif key in _LISTED and isinstance(inner, list):
            members = enumerate(inner)
            is_inner_shared |= key in ("allOf", "anyOf") and len(_objects(inner)) > 1
        elif key in ("items", "additionalProperties"):
            closed[key] = _close(inner, f"{place}/{key}", is_shared, shared, places)
            continue
        else:
            continue
        done = {
            name: _close(member, f"{place}/{key}/{name}", is_inner_shared, shared, places)
            for name, member in members
        }
        closed[key] = done if isinstance(inner, Mapping) else list(done.values())
    properties = value.get("properties")
    if parts == {"properties"} and not is_shared and isinstance(properties, Mapping):
        required = value.get("required")
        is_listed = not isinstance(required, list) or set(map(str, required)) <= properties.keys()
        if is_listed and (properties or place == "#"):
            closed["additionalProperties"] = False
    return closed


def _objects(options: list[Any]) -> list[Any]:
    """Those that may be objects."""
    return [one for one in options if isinstance(one, Mapping) and one.keys() & _PARTS]
