"""Chat templates: models' own, the built-in one, and conversations that do not fit."""

import json

import pytest

from draftree.errors import FetchError, TokenizerError
from draftree.text.template import ChatTemplate
from draftree.text.tokenizer import Tokenizer
from draftree.weights import hub
from draftree.weights.file import open_checkpoint
from tests.golden import golden
from tests.needs import needs
from tests.text.metadata import byte_metadata

CODER = "qwen2.5-coder-0.5b"
USER = {"role": "user", "content": "Hi"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather & <wind> in Köln",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def render(source: str, *messages: dict, **variables) -> str:
    return ChatTemplate(source, bos="<s>", eos="</s>").render(messages or [USER], **variables)


def test_smollm2_prompts(smollm2):
    template = ChatTemplate.for_tokenizer(smollm2)
    cases = json.loads(golden("smollm2/completions.json").read_text(encoding="utf-8"))
    chats = [case for case in cases if case["mode"] == "chat"]
    assert len(chats) == 8
    for case in chats:
        text = template.render([{"role": "user", "content": case["user_text"]}])
        assert text == case["prompt"]
        assert smollm2.encode_chat(text) == case["prompt_ids"]


def has_model(name: str) -> bool:
    try:
        return hub.resolve(name).exists()
    except FetchError:
        return False


@needs(f"`draftree pull {CODER}`", has_model(CODER))
def test_qwen25_template():
    tokenizer = Tokenizer.from_metadata(open_checkpoint(hub.resolve(CODER)).metadata)
    template = ChatTemplate.for_tokenizer(tokenizer)
    system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    assert template.render([USER]) == (
        f"<|im_start|>system\n{system}<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    text = template.render([USER], tools=[TOOL], add_generation_prompt=False)
    assert json.dumps(TOOL, ensure_ascii=False) in text
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n")


CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}
    ],
}
REPLY = {"role": "tool", "content": "rain"}


def test_qwen3_template_with_tools(qwen3):
    """Missing content, and arguments as JSON text, as OpenAI clients send them."""
    text = ChatTemplate.for_tokenizer(qwen3).render([USER, CALL, REPLY], tools=[TOOL])
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{call}<|im_end|>\n" in text
    assert "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n" in text


def test_qwen3_thinking_can_be_turned_off(qwen3):
    template = ChatTemplate.for_tokenizer(qwen3)
    assert template.render([USER]).endswith("<|im_start|>assistant\n")
    off = template.render([USER], enable_thinking=False)
    assert off.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_chatml_is_built_in():
    tokenizer = Tokenizer.from_metadata(byte_metadata())
    text = ChatTemplate.for_tokenizer(tokenizer).render([{"role": "system", "content": "S"}, USER])
    assert text == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (
        ChatTemplate("", bos="", eos="")
        .render([USER], add_generation_prompt=False)
        .endswith("Hi<|im_end|>\n")
    )


def test_special_tokens_are_known():
    assert render("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}") == "<s>Hi</s>"


def test_set_up_as_models_expect():
    source = """\
{%- for n in range(9) %}
    {%- if n == 1 %}{% continue %}{% endif %}
    {%- if n == 3 %}{% break %}{% endif %}
    {{- n }}
{%- endfor %}
{% generation %}
{{ {'b': '<ü>', 'a': 1} | tojson }}
{% endgeneration %}
    {% if true %}
{{ [1] | tojson(indent=2) }}
    {% endif %}
{{ strftime_now('%Y') | length }}"""
    assert render(source) == '02{"b": "<ü>", "a": 1}\n[\n  1\n]\n4'


def test_content_in_parts():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "user\none\ntwo<|im_end|>" in render("", {"role": "user", "content": parts})
    assert "user\nHi<|im_end|>" in render("", {"role": "user", "content": ["Hi"]})


def test_missing_content_reaches_templates_that_test_for_it():
    source = "{% for m in messages %}{{ 'none' if m.content is none else m.content }}{% endfor %}"
    assert render(source, USER, CALL) == "Hinone"
    assert render("{% for m in messages %}[{{ m.content + '' }}]{% endfor %}", CALL) == "[]"


def test_broken_tool_arguments_are_shown_as_they_are():
    function = {"name": "f", "arguments": "{broken"}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    assert render("{{ messages[0].tool_calls[0].function.arguments }}", call) == "{broken"


def test_messages_are_left_as_they_were():
    before = json.dumps([USER, CALL, REPLY])
    messages = json.loads(before)
    render("", *messages)
    assert json.dumps(messages) == before


def test_long_conversations_fit():
    messages = [{"role": "user", "content": "word " * 1000}] * 400
    assert len(render("", *messages)) > 2_000_000


BAD_TEMPLATES = [
    ("{% if %}", "cannot be used: Expected an expression"),
    ("{{ x", "cannot be used"),
    ("{{ 'a' | nothing }}", "No filter named 'nothing'"),
    ("{{ messages[0].no.thing }}", "has no attribute 'no'"),
    ("{{ raise_exception('No system role!') }}", "failed on this conversation: No system role!"),
    ("{{ 1 // 0 }}", "failed on this conversation"),
    ("x" * 100_001, "longer than 100,000"),
    ("{% include 'other' %}", "no loader"),
]


@pytest.mark.parametrize(("source", "sentence"), BAD_TEMPLATES)
def test_template_errors_are_sentences(source, sentence):
    with pytest.raises(TokenizerError, match=sentence) as caught:
        render(source)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [[{"type": "image_url"}], [3], 5, {"text": "x"}])
def test_other_content_is_refused(content):
    with pytest.raises(TokenizerError, match=r"text only|must be text"):
        render("", {"role": "user", "content": content})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        (
            "command-r",
            "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi<|END_OF_TURN_TOKEN|>"
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        ),
        (
            "granite",
            "<|start_of_role|>user<|end_of_role|>Hi<|end_of_text|>\n"
            "<|start_of_role|>assistant<|end_of_role|>",
        ),
        (
            "llama3",
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("phi3", "<|user|>\nHi<|end|>\n<|assistant|>\n"),
        ("phi4", "<|im_start|>user<|im_sep|>Hi<|im_end|><|im_start|>assistant<|im_sep|>"),
    ],
)
def test_templates_by_name(name, expected):
    template = ChatTemplate.for_tokenizer(Tokenizer.from_metadata(byte_metadata(), name))
    assert template.render([USER]) == expected
    turns = [{"role": "assistant", "content": "Yes"}, USER]
    assert template.render([USER, *turns]).endswith(expected)


def test_a_template_as_text():
    tokenizer = Tokenizer.from_metadata(byte_metadata(), "Say {{ messages[0].content }}!")
    assert ChatTemplate.for_tokenizer(tokenizer).render([USER]) == "Say Hi!"


def test_a_template_that_is_neither_a_name_nor_a_file():
    with pytest.raises(TokenizerError, match="known names are chatml, command-r"):
        Tokenizer.from_metadata(byte_metadata(), "no-such-template")
