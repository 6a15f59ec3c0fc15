"""Replies that are nothing but JSON calls, in a dialect that has tags."""

import pytest

from draftree.text.tools.hermes import HermesDialect
from tests.text.tools.example import all_cuts, read_reply

DIALECT = HermesDialect()
NOW = '{"name": "now", "arguments": {}}'
TAGGED = f"<tool_call>\n{NOW}\n</tool_call>"


@pytest.mark.parametrize("is_trusted", [False, True])
@pytest.mark.parametrize(
    ("reply", "text", "calls"),
    [
        (NOW, "", 1),
        (f"```json\n{NOW}\n```", "", 1),
        (f"{NOW}\n{NOW}", "", 2),
        (f"{NOW} {TAGGED}", NOW, 1),
        ('{"name": "Ann"}', '{"name": "Ann"}', 0),
        ('{"name": "Ann"} ' + TAGGED + " end", '{"name": "Ann"} end', 1),
    ],
)
def test_tags_may_be_forgotten(reply: str, text: str, calls: int, is_trusted: bool) -> None:
    for chunks in all_cuts(reply):
        found = read_reply(DIALECT, chunks, is_trusted=is_trusted)
        assert found == (text, [("now", "{}")] * calls), chunks
