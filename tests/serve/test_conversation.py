"""Pieces become messages that any template takes."""

import pytest

from draftree.serve.conversation import Conversation, check_tools, choose_sampling
from draftree.serve.wire import ApiError


def test_pieces_of_one_role_are_one_message():
    conversation = Conversation()
    conversation.add_text("system", "a")
    conversation.add_text("system", "b")
    conversation.add_text("user", "c")
    conversation.add_text("system", "d")
    conversation.add_reasoning("e")
    conversation.add_text("assistant", "f")
    conversation.add_call("1", "add", "{}")
    conversation.add_call("2", "add", '{"a": 1}')
    conversation.add_result("1", "g")
    conversation.add_result("2", "h")
    conversation.add_text("user", "i")
    calls = [
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}},
        {"id": "2", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
    ]
    assert conversation.messages == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "c\nd"},
        {"role": "assistant", "content": "f", "reasoning_content": "e", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "g"},
        {"role": "tool", "tool_call_id": "2", "content": "h"},
        {"role": "user", "content": "i"},
    ]
    length = conversation.text_len
    conversation.add_text("user", "x" * 100)
    assert conversation.text_len == length + len("\n") + 100


@pytest.mark.parametrize(
    ("names", "chosen", "is_forced", "param"),
    [
        (["a", "a"], None, False, "tools"),
        ([], None, True, "tool_choice"),
        ([], "a", False, "tool_choice"),
        (["a"], "b", False, "tool_choice"),
    ],
)
def test_tools_that_do_not_go_together(names, chosen, is_forced, param):
    with pytest.raises(ApiError) as caught:
        check_tools(names, chosen, is_forced=is_forced)
    assert caught.value.param == param
    check_tools(["a", "b"], "b", is_forced=True)


def test_sampling():
    plain, other = choose_sampling(0.5, 1), choose_sampling(0.5, 2, top_p=0.0, top_k=3)
    assert (plain.temperature, plain.top_p, plain.top_k) == (0.5, 1.0, 0)
    assert 0 < other.top_p < 1e-6 and other.top_k == 3
    assert plain.seed != other.seed
