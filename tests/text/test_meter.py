"""What a template uses is counted in full, however often it is asked."""

from collections import UserDict
from typing import Any

import pytest

from draftree.errors import TokenizerError
from draftree.text.meter import Meter

PLAIN = {"role": "user", "content": "Hi", "n": 3, "x": None, "on": True, "share": 0.5}
NESTED: dict[str, Any] = {"messages": [PLAIN, PLAIN, {"a": ("b", [])}], 7: ("c", PLAIN)}


def _weigh(value: Any) -> int:
    if isinstance(value, str):
        return len(value) + 2
    if isinstance(value, dict | UserDict):
        return 16 + sum(_weigh(key) + _weigh(member) for key, member in value.items())
    if isinstance(value, list | tuple | type({}.keys()) | type({}.values())):
        return 16 + sum(map(_weigh, value))
    if isinstance(value, type({}.items())):
        return 16 + sum(_weigh(key) + _weigh(member) for key, member in value)
    return 16


class _Text(str):
    pass


class _List(list):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize(
    "value",
    [
        *("text", _Text("text"), 1, True, None, 2.5, object()),
        *([], {}, (), PLAIN, NESTED, [NESTED, NESTED], _List(["a", 1]), UserDict(PLAIN)),
        *(NESTED.items(), NESTED.keys(), NESTED.values()),
    ],
)
def test_weights_are_those_of_all_parts(value: Any) -> None:
    meter = Meter(1 << 40, 5.0)
    assert meter.weigh(value) == meter.weigh(value) == _weigh(value)


def test_a_limit_that_is_set_later_counts_for_all_that_follows() -> None:
    meter = Meter(1 << 62, 5.0)
    meter.weigh(NESTED)
    meter.limit(100)
    meter.charge_value("a" * 40, [1, 2])
    with pytest.raises(TokenizerError, match="too much text"):
        meter.charge_value("a" * 40)
    with pytest.raises(TokenizerError, match="too large a list"):
        meter.weigh(["a" * 200])
