"""Bodies that are wrong name what is wrong."""

import json
from typing import Annotated, Literal

import pydantic_core
import pytest
from pydantic import Discriminator, Field, Tag

from draftree.serve.wire import (
    ApiError,
    WireModel,
    busy,
    encode,
    event,
    parse_body,
    refused,
    to_json,
)


class Part(WireModel):
    type: Literal["text"]
    text: str


class User(WireModel):
    role: Literal["user"]
    content: str | list[Part]


class System(WireModel):
    role: Literal["system"]
    content: str


class Thought(WireModel):
    type: Literal["thought"]
    thought: Part


class Remark(WireModel):
    type: Literal["remark"] = "remark"
    text: str


def kind_of(item):
    return item.get("type", "remark") if isinstance(item, dict) else "remark"


Item = Annotated[
    Annotated[Thought, Tag("thought")] | Annotated[Remark, Tag("remark")], Discriminator(kind_of)
]


class Sample(WireModel):
    messages: list[Annotated[User | System, Field(discriminator="role")]]
    items: str | list[Item] | None = None
    choice: Literal["none"] | Thought | None = None
    counts: dict[str, Annotated[int, Field(ge=0)]] | None = None
    stop: str | list[str] | None = None
    n: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, le=2)
    store: Literal[False] | None = refused("Nothing is stored.")


def explain(raw):
    with pytest.raises(ApiError) as caught:
        parse_body(Sample, raw if isinstance(raw, bytes) else json.dumps(raw).encode())
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff\xfe{}",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        rb'{"messages": [{"role": "user", "content": "\ud800"}]}',
        b"[" * 100_000,
        b'{"messages": ' + b"[" * 3000 + b"]" * 3000 + b"}",
        b'{"messages": [], "n": ' + b"9" * 5000 + b"}",
    ],
)
def test_what_is_not_json_is_said(raw):
    error = explain(raw)
    assert error.code == "invalid_json"
    assert "not valid JSON" in error.message


@pytest.mark.parametrize("value", [[], None, 5, "text"])
def test_body_must_be_an_object(value):
    assert explain(value).message == "The body must be a JSON object."


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"n": True}, "n", "valid integer"),
        ({"n": "1"}, "n", "valid integer"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"temperature": "1"}, "temperature", "valid number"),
        ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
        ({"temperature": float("nan")}, "temperature", "finite"),
        ({"stop": 5}, "stop", "valid string or Input should be a valid array"),
        ({"stop": ["a", 5]}, "stop[1]", "valid string"),
        ({"stop": {}}, "stop", "valid string"),
        ({"store": True}, "store", "Nothing is stored."),
        ({"unknown": 0}, "unknown", "Unknown field: unknown."),
        ({"unknown": [None]}, "unknown", "Unknown field: unknown."),
        ({"messages": [{"role": "poet", "content": ""}]}, "messages[0]", "'user', 'system'"),
        ({"messages": [{"content": ""}]}, "messages[0]", "role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "valid string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            "missing",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "text": ""}]}]},
            "messages[0].content[0].type",
            "'text'",
        ),
        (
            {"messages": [{"role": "system", "content": "", "mood": 1}]},
            "messages[0].mood",
            "Unknown field",
        ),
    ],
)
def test_field_is_named(fields, param, words):
    error = explain({"messages": [], **fields})
    assert error.param == param
    assert words in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": "", "user": 1}]}, "messages[0].user"),
        ({"messages": [{"role": "user", "user": {"content": 1}}]}, "messages[0].content"),
        ({"items": [{"type": "thought", "thought": {}}]}, "items[0].thought.type"),
        (
            {"items": [{"type": "thought", "thought": {"type": "text", "text": ""}, "mood": 1}]},
            "items[0].mood",
        ),
        ({"items": [{"text": "", "remark": {"text": 5}}]}, "items[0].remark"),
        ({"items": [{"text": 5, "remark": {"text": ""}}]}, "items[0].text"),
        ({"choice": {"type": "thought", "Thought": {"thought": 1}}}, "choice.thought"),
        ({"counts": {"[key]": -1}}, "counts.[key]"),
    ],
)
def test_a_field_with_the_name_of_a_union_s_member_is_not_taken_for_it(fields, param):
    assert explain({"messages": [], **fields}).param == param


def test_missing_field_is_named():
    assert (explain({}).param, explain({}).code) == ("messages", "missing_field")


def test_integers_are_numbers_but_not_the_other_way_round():
    assert parse_body(Sample, b'{"messages": [], "temperature": 1}').temperature == 1.0
    assert explain({"messages": [], "n": 1.0}).param == "n"


def test_busy_says_when_to_come_back():
    assert busy(429, "Later.", 7).headers == {"retry-after": "7"}
    assert ApiError(400, "No.").headers == {}


def test_events():
    assert event("{}") == "data: {}\n\n"
    assert event("{}", "ping") == "event: ping\ndata: {}\n\n"


@pytest.mark.parametrize(
    "text", ['"\\/', "\x00\b\t\n\r\x1f\x7f", "\u2028\u2029\ufeff", "é🙂", "</script>", ""]
)
def test_json_is_what_pydantic_writes(text):
    assert encode(to_json(text)) == pydantic_core.to_json(text)
    value = {"a": [text, None, 1.5, True]}
    assert encode(to_json(value)) == pydantic_core.to_json(value)
    assert "\n" not in to_json(value)  # or it would not be one event


def test_half_a_surrogate_pair_can_be_sent():
    assert encode("a\ud800b") == b"a?b"
