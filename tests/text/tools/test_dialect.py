"""Tools as clients send them are checked, and what is wrong is named."""

import re

import pytest

from draftree.text.tools.dialect import derive_call_ids, read_tools
from tests.text.tools.example import NOW, STORE, WEATHER


def test_what_is_left_out_is_filled_in() -> None:
    weather, store, now = read_tools([WEATHER, STORE, {"function": {"name": "now"}}])
    assert weather.name == "get_weather" and weather.description == "The weather of a city."
    assert store.description == "" and not store.is_strict
    assert now.parameters == {"type": "object", "properties": {}}
    assert weather.definition == WEATHER
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    assert read_tools([strict])[0].is_strict


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([WEATHER, "x"], "tools[1] must be an object"),
        ([{"type": "web_search"}], "tools[0] must be an object"),
        ([{"type": "function"}], "tools[0].function must be"),
        ([{"function": {"name": ""}}], "tools[0].function.name"),
        ([{"function": {"name": 'a"b'}}], "tools[0].function.name"),
        ([{"function": {"name": "x" * 200}}], "tools[0].function.name"),
        ([NOW, {"function": {"name": "f", "parameters": []}}], "tools[1].function.parameters"),
        ([{"function": {"name": "f", "parameters": {"properties": []}}}], "properties"),
        ([{"function": {"name": "f", "parameters": {"required": "a"}}}], "required"),
        ([{"function": {"name": "f", "description": 3}}], "description"),
        ([NOW, NOW], "two tools have the name 'now'"),
    ],
)
def test_bad_tools_are_named(tools: list, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        read_tools(tools)


def test_derived_ids_are_those_of_the_request() -> None:
    def ids(*request: object) -> list[str]:
        new_id = derive_call_ids(*request)
        return [new_id() for _ in range(3)]

    first = ids("Hi \ud800", 5)
    assert first == ids("Hi \ud800", 5) and len(set(first)) == 3
    assert all(re.fullmatch("call_[0-9a-f]{24}", i) for i in first)
    assert not {*first} & {*ids("Hi \ud801", 5), *ids("Hi \ud800", 6), *ids("5 Hi \ud800", 5)}
