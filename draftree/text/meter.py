"""What one rendering of a chat template may use: how much it makes, and how long it takes.

Everything a template makes is charged before or as it is made, and never given back, so memory is
bounded too. It does not know about Jinja.
"""

import re
from collections.abc import ItemsView, KeysView, Mapping, ValuesView
from time import monotonic
from typing import Any

from draftree.errors import TokenizerError

_ITEM_SIZE = 16  # of anything that is not text, in characters
_PLAIN_KINDS = frozenset((bool, int, float, type(None)))
_MAX_INTEGER_BITS = 4096
_WIDE_FORMAT = re.compile(r"%[^%a-zA-Z]*(\d{4}|\*)|\{[^{}]*(\d{4}|\{)")


class Meter:
    """Charges sizes in characters and list items against a limit, and watches the clock."""

    def __init__(self, size_limit: int, time_limit_s: float) -> None:
        self._limit = size_limit
        self._left = size_limit
        self._deadline = monotonic() + time_limit_s
        # Weights by identity, with the value kept alive: templates cannot change lists in place.
        self._weights: dict[int, tuple[object, int]] = {}

    def limit(self, size: int) -> None:
        """Allow so much from now on; what was weighed is known."""
        self._limit = self._left = size

    def charge(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise TokenizerError("The chat template makes too much text; use another template.")
        if monotonic() > self._deadline:
            raise TokenizerError("The chat template takes too long; use another template.")

    def charge_value(self, *values: object) -> None:
        """For a copy of each text, list or dict, but not of what is in it."""
        size = 0
        for value in values:
            if isinstance(value, str):
                size += len(value)
            elif isinstance(value, list | tuple | dict):
                size += _ITEM_SIZE * len(value)
        self.charge(size)

    def weigh(self, value: object) -> int:
        """How large the value is when written out; something shared counts each time."""
        kind = type(value)
        if kind is str or isinstance(value, str):
            return len(value) + 2  # type: ignore[arg-type]
        if kind in _PLAIN_KINDS:
            return _ITEM_SIZE
        known = self._weights.get(id(value))
        if known is not None:
            return known[1]
        if isinstance(value, dict) or (kind is not list and isinstance(value, Mapping)):
            weight = sum(map(self.weigh, value)) + sum(map(self.weigh, value.values()))
        elif isinstance(value, list | tuple):
            weight = sum(map(self.weigh, value))
        else:
            return _ITEM_SIZE + self._weigh_view(value)
        weight += _ITEM_SIZE
        if weight > self._limit:
            raise TokenizerError("The chat template makes too large a list; use another template.")
        self._weights[id(value)] = (value, weight)
        return weight

    def _weigh_view(self, value: object) -> int:
        if isinstance(value, ItemsView):
            return sum(self.weigh(part) for pair in value for part in pair)
        if isinstance(value, KeysView | ValuesView):
            return sum(map(self.weigh, value))
        if type(value).__name__ == "Namespace":
            raise TokenizerError("The chat template uses a namespace as a value.")
        return 0

    def charge_operator(self, operator: str, left: Any, right: Any) -> None:
        """Before `left operator right` is computed."""
        if operator == "+" and isinstance(left, str):
            self.charge_value(left, right)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length()
            if operator == "**":
                bits = left.bit_length() * abs(right)
            if bits > _MAX_INTEGER_BITS:
                raise TokenizerError("The chat template computes with too large numbers.")
            self.charge(1)
        elif operator == "*":
            value, count = (right, left) if isinstance(left, int) else (left, right)
            is_repeated = isinstance(value, str | list | tuple) and isinstance(count, int)
            self.charge(self.weigh(value) * max(count, 0) if is_repeated else 1)
        elif operator == "%" and isinstance(left, str):
            self.charge_format(left, right)
        else:
            self.charge_value(left, right)

    def charge_format(self, template: str, *values: object) -> None:
        """Before values are written into a template with % or {} places."""
        if _WIDE_FORMAT.search(template.replace("{{", "").replace("}}", "")):
            raise TokenizerError("The chat template asks for a width that is not allowed.")
        places = template.count("%") + template.count("{")
        self.charge(len(template) + 1000 * places + places * sum(map(self.weigh, values)))

    def charge_join(self, separator: str, items: list[Any]) -> None:
        self.charge(len(separator) * len(items) + sum(map(self.weigh, items)))

    def charge_replace(self, text: str, old: str, new: str) -> None:
        self.charge(len(text) + text.count(old) * len(new))
