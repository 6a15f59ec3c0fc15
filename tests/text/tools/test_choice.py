"""Dialects by template, and conversations for templates that know no tools."""

import json

import pytest

from draftree.errors import TokenizerError
from draftree.text.template import CHATML
from draftree.text.tokenizer import Tokenizer
from draftree.text.tools.choice import choose_dialect, lists_tools, spell_out
from draftree.text.tools.coder import CoderDialect
from draftree.text.tools.dialect import ToolDialect
from draftree.text.tools.generic import GenericDialect
from draftree.text.tools.hermes import HermesDialect
from tests.text.tools.example import TOOLS

CODER = "{% for tool in tools %}<tool_call>\n<function=name>\n{% endfor %}"
PARAMETERS = 'for tool in tools: {"name": function name, "parameters": dictionary}'


def test_real_templates(smollm2: Tokenizer, qwen3: Tokenizer) -> None:
    assert isinstance(choose_dialect(smollm2.chat_template or "", False), GenericDialect)
    assert isinstance(choose_dialect(qwen3.chat_template or "", True), HermesDialect)
    assert lists_tools(qwen3.chat_template or "")
    assert not lists_tools(smollm2.chat_template or "")


@pytest.mark.parametrize(
    ("template", "has_tag", "kind"),
    [
        (CODER, True, CoderDialect),
        (CHATML, True, HermesDialect),
        (CHATML, False, GenericDialect),
        (PARAMETERS, False, GenericDialect),
    ],
)
def test_other_templates(template: str, has_tag: bool, kind: type[ToolDialect]) -> None:
    assert isinstance(choose_dialect(template, has_tag), kind)


def test_arguments_are_called_what_the_template_calls_them() -> None:
    assert "parameters" in choose_dialect(PARAMETERS, False).write_call("f", {})
    assert "arguments" in choose_dialect(CHATML, False).write_call("f", {})


def test_a_conversation_is_spelled_out() -> None:
    call = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": call}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    plain = spell_out(messages, TOOLS, GenericDialect())
    assert [m["role"] for m in plain] == ["system", "user", "assistant", "user"]
    assert all(set(m) == {"role", "content"} for m in plain)
    assert "get_weather" in plain[0]["content"]
    assert json.loads(plain[2]["content"]) == {
        "name": "get_weather",
        "arguments": {"city": "Paris"},
    }
    assert "get_weather" in plain[3]["content"] and "sunny" in plain[3]["content"]


def test_tools_join_the_system_message() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    first, second = spell_out(messages, TOOLS, HermesDialect())
    assert first["content"].startswith("Be brief.\n\n") and "store" in first["content"]
    assert second is messages[1]
    assert spell_out(messages, (), HermesDialect()) == messages


def test_arguments_that_are_no_json_are_shown_as_they_were() -> None:
    call = {"function": {"name": "now", "arguments": "{oops"}}
    message = {"role": "assistant", "content": "Well.", "tool_calls": [call, call]}
    (plain,) = spell_out([message], (), GenericDialect())
    assert plain["content"].startswith("Well.\n") and plain["content"].count("{oops") == 2


@pytest.mark.parametrize("call", ["x", {}, {"function": {}}, {"function": {"name": 3}}])
def test_calls_without_a_name_are_refused(call: object) -> None:
    with pytest.raises(TokenizerError, match="does not name its function"):
        spell_out([{"role": "assistant", "tool_calls": [call]}], (), GenericDialect())
