"""Conversations put together from blocks or items, and what else APIs of that kind share.

In: pieces of a conversation, in order. Out: messages as chat templates expect them: one of each
role in a row, a system message only at the beginning. Knows no API.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from draftree.core import SamplingParams
from draftree.serve.length import check_length, count_characters
from draftree.serve.wire import ApiError

if TYPE_CHECKING:
    from draftree.chat import Engine, Generation

EFFORT_BUDGETS: Final = {"minimal": 256, "low": 1024, "medium": 4096}
TINY_TOP_P: Final = 1e-9  # keeps the likeliest token alone, as 0 does


class Conversation:
    """messages: what has been said so far."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def add_text(self, role: str, text: str) -> None:
        """role: user, assistant or system. Instructions that come later are shown as the user's,
        since few templates know them anywhere but at the beginning.
        """
        if role == "system" and any(message["role"] != "system" for message in self.messages):
            role = "user"
        message = self._open(role)
        message["content"] = "\n".join(filter(None, (message["content"], text)))

    def add_reasoning(self, text: str) -> None:
        message = self._open("assistant")
        parts = (message.get("reasoning_content"), text)
        message["reasoning_content"] = "\n".join(filter(None, parts))

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        """arguments: JSON text."""
        function = {"name": name, "arguments": arguments}
        calls = self._open("assistant").setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def add_result(self, call_id: str, text: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    @property
    def text_len(self) -> int:
        return count_characters(self.messages)

    def _open(self, role: str) -> dict[str, Any]:
        """The last message, if it is of this role, else a new one."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": ""})
        return self.messages[-1]


def ask(
    engine: "Engine", *, conversation: Conversation, max_tokens: int | None, **options: Any
) -> "Generation":
    check_length(engine, conversation.text_len + count_characters(options.get("tools")))
    limit = max_tokens or engine.plan.max_ctx
    return engine.chat(conversation.messages, max_tokens=limit, **options)


def describe_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None
) -> dict[str, Any]:
    """A function in the words of chat templates."""
    function = {
        "name": name,
        "description": description,
        "parameters": parameters,
        "strict": strict,
    }
    known = {key: value for key, value in function.items() if value is not None}
    return {"type": "function", "function": known}


def check_tools(names: Sequence[str], chosen: str | None, *, is_forced: bool) -> None:
    """chosen: the one tool that must be called; is_forced: any of them must."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ApiError(400, f"tools: two have the name {twice!r}.", param="tools")
    if (is_forced or chosen is not None) and not names:
        sentence = "tool_choice asks for a call, but there are no tools."
        raise ApiError(400, sentence, param="tool_choice")
    if chosen is not None and chosen not in names:
        sentence = f"tool_choice names {chosen!r}, which is not among the tools."
        raise ApiError(400, sentence, param="tool_choice")


def choose_sampling(
    temperature: float, seed: int, top_p: float | None = None, top_k: int | None = None
) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        top_k=max(top_k or 0, 0),
        top_p=1.0 if top_p is None else max(top_p, TINY_TOP_P),
        seed=seed,
    )
