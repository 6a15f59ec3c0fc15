"""Messages and tools of a chat request, in the words of chat templates.

In: a checked body. Out: what `Engine.chat` takes, or the text of the prompt. Knows no replies.
"""

from typing import TYPE_CHECKING, Any

from draftree.serve.length import check_length, count_characters
from draftree.serve.openai_fields import AssistantMessage, ChatRequest, Message
from draftree.serve.wire import ApiError
from draftree.text.template import plain_content

if TYPE_CHECKING:
    from draftree.chat import Engine


def continues(body: ChatRequest) -> bool:
    """Whether the reply goes on from the last message."""
    last = body.messages[-1]
    is_begun = isinstance(last, AssistantMessage) and not last.tool_calls
    return is_begun and body.continue_final_message is not False


def check_beginning(body: ChatRequest) -> None:
    """What a reply goes on from is one message."""
    is_begun = continues(body)
    if body.continue_final_message and not is_begun:
        sentence = "continue_final_message needs a last message of the assistant's, without calls."
        raise ApiError(400, sentence, param="continue_final_message")
    if body.add_generation_prompt is is_begun:
        sentence = "add_generation_prompt must be the opposite of continue_final_message."
        raise ApiError(400, sentence, param="add_generation_prompt")
    before = body.messages[-2:-1]
    if is_begun and before and isinstance(before[0], AssistantMessage):
        sentence = "The last two messages are both the assistant's; a reply can continue only one."
        raise ApiError(400, sentence, param="messages")


def read_messages(body: ChatRequest) -> list[dict[str, Any]]:
    messages = [_message(message) for message in body.messages]
    if continues(body):  # as llama.cpp joins what a reply goes on from
        last = messages[-1]
        last["content"] = plain_content(last.get("content"), delimiter="\n\n")
    return messages


def read_tools(body: ChatRequest) -> list[dict[str, Any]] | None:
    return [tool.model_dump(exclude_none=True) for tool in body.tools or ()] or None


def render_prompt(engine: "Engine", body: ChatRequest) -> str:
    """The text that the model continues."""
    messages, tools = read_messages(body), read_tools(body)
    check_length(engine, count_characters(messages) + count_characters(tools))
    kwargs = body.chat_template_kwargs
    thinking = kwargs.enable_thinking if kwargs is not None and engine.can_think else None
    return engine.render_chat(
        messages, tools=tools or (), thinking=thinking, continue_final=continues(body)
    )


def show_prompt(engine: "Engine", body: ChatRequest) -> str:
    """The same as the model's tokens spell it, what the tokenizer adds included."""
    ids = engine.tokenizer.encode_chat(render_prompt(engine, body))
    return b"".join(map(engine.tokenizer.token_bytes, ids)).decode("utf-8", "replace")


def _message(message: Message) -> dict[str, Any]:
    """What is empty is left out."""
    plain = message.model_dump(exclude_none=True)
    if plain["role"] == "developer":
        plain["role"] = "system"
    refusal = plain.pop("refusal", None)
    if refusal and not plain.get("content"):
        plain["content"] = refusal
    for call in plain.get("tool_calls", ()):
        call["type"] = "function"
    if not plain.get("tool_calls"):
        plain.pop("tool_calls", None)
    return plain
