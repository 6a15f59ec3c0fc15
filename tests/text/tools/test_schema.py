"""Closed schemas: nothing is made up, and nothing that is listed becomes impossible."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.text.grammar import GrammarCompiler, json_rule
from draftree.text.tools.schema import close_objects
from tests.examples import examples
from tests.text.test_grammar import byte_tokenizer

COMPILER = GrammarCompiler(byte_tokenizer())
TEXT = {"type": "string"}
A, B = ({"type": "object", "properties": {key: TEXT}, "required": [key]} for key in "ab")


def takes(schema: Any, value: Any) -> bool:
    rule = json_rule("start", {**schema, "x-guidance": {"lenient": True}})
    cursor = COMPILER.compile(rule).copy()
    for token in byte_tokenizer().encode(json.dumps(value)):
        if cursor.is_complete or not cursor.count_valid((token,)):
            return False
        cursor.advance(token)
    return cursor.is_complete or bool(cursor.count_valid((min(byte_tokenizer().stop_ids),)))


def holding(inner: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": inner}, "required": ["x"], **more}


DEFS = {"$defs": {"a": A, "b": B}}
REF_A, REF_B = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}


@pytest.mark.parametrize(
    ("schema", "good", "made_up"),
    [
        (A, {"a": ""}, {"a": "", "c": 1}),
        (holding(A), {"x": {"a": ""}}, {"x": {"a": "", "c": 1}}),
        (holding({"type": "array", "items": A}), {"x": [{"a": ""}]}, {"x": [{"a": "", "c": 1}]}),
        (holding(REF_A, **DEFS), {"x": {"a": ""}}, {"x": {"a": "", "c": 1}}),
        (holding({"anyOf": [A, {"type": "null"}]}), {"x": {"a": ""}}, {"x": {"a": "", "c": 1}}),
        (holding({"oneOf": [A, B]}), {"x": {"b": ""}}, {"x": {"b": "", "c": 1}}),
        (holding({"allOf": [REF_A]}, **DEFS), {"x": {"a": ""}}, {"x": {"a": "", "c": 1}}),
        ({"type": "object", "properties": {}}, {}, {"c": 1}),
    ],
)
def test_arguments_are_not_made_up(schema: Any, good: Any, made_up: Any) -> None:
    before = json.dumps(schema)
    closed = close_objects(schema)
    assert takes(schema, good) and takes(schema, made_up)
    assert takes(closed, good) and not takes(closed, made_up)
    assert json.dumps(schema) == before  # the prompt shows it as it was


BOTH = {"a": "", "b": ""}


@pytest.mark.parametrize(
    ("schema", "good"),
    [
        ({**A, "additionalProperties": True}, {"a": "", "c": 1}),
        ({**A, "additionalProperties": TEXT}, {"a": "", "c": ""}),
        ({"type": "object", "properties": {"a": TEXT}, "required": ["a", "b"]}, BOTH),
        ({"type": "object", "patternProperties": {"^c": TEXT}}, {"c1": ""}),
        ({**A, "patternProperties": {"^c": TEXT}}, {"a": "", "c1": ""}),
        ({"type": "object", "allOf": [A, B]}, BOTH),
        ({**A, "allOf": [B]}, BOTH),
        ({"anyOf": [A, B], "type": "object"}, BOTH),
        (holding({"allOf": [REF_A, REF_B]}, **DEFS), {"x": BOTH}),
        (holding({**A, "$ref": "#/$defs/b"}, **DEFS), {"x": BOTH}),
        (holding({"type": "object"}), {"x": {"any": 1}}),
        (holding({"type": "object", "properties": {}}), {"x": {"any": 1}}),
        (holding({}), {"x": {"any": 1}}),
    ],
)
def test_what_a_schema_allows_by_its_words_stays_possible(schema: Any, good: Any) -> None:
    assert takes(schema, good) and takes(close_objects(schema), good)


LEAVES = st.sampled_from([TEXT, {"type": "null"}, REF_A, REF_B, {"type": "object"}, True, 3, None])
KEYS = st.sampled_from(["properties", "allOf", "anyOf", "items", "$ref", "required", "a", "$defs"])
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(KEYS, SCHEMAS, max_size=4))
@examples(300)
def test_any_schema_can_be_closed(schema: dict[str, Any]) -> None:
    """Only ever by that one word, and twice is once."""
    closed = close_objects(schema)
    text = json.dumps(closed).replace(', "additionalProperties": false', "")
    assert text.replace('"additionalProperties": false', "") == json.dumps(schema)
    assert close_objects(closed) == closed


def test_deep_schemas_are_left_to_be_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"properties": {"a": schema}}
    assert close_objects(schema) is schema
