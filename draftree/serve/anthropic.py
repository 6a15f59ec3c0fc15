"""The Anthropic API: messages and the count of their tokens. Translation only.

In: HTTP requests. Out: calls on the engine, and a Wire that writes the reply.
"""

import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from draftree.serve.anthropic_fields import (
    AnyChoice,
    AssistantTurn,
    ClientTool,
    CountRequest,
    MessagesRequest,
    NoChoice,
    PromptFields,
    TextBlock,
    Thinking,
    ThinkingBlock,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from draftree.serve.anthropic_reply import MessageOptions, MessageWire
from draftree.serve.body import describe_body, read_body
from draftree.serve.conversation import (
    EFFORT_BUDGETS,
    Conversation,
    ask,
    check_tools,
    choose_sampling,
    describe_tool,
)
from draftree.serve.length import check_length, count_characters
from draftree.serve.observed import ObservedCall
from draftree.serve.openai_fields import compress_options
from draftree.serve.reply import answer
from draftree.serve.service import Service
from draftree.serve.statistics import wants_statistics
from draftree.serve.wire import ApiError
from draftree.text.grammar import FormatKind, ResponseFormat

if TYPE_CHECKING:
    from draftree.chat import Engine

MODELS: Final = (MessagesRequest, CountRequest)
# Says who pays, and differs between requests: pairs of a name and a value, or any line.
_NOT_FOR_THE_MODEL: Final = re.compile(
    r"\A(?:\s*x-anthropic-[\w-]+:(?:(?:[ \t]*[\w-]+=[^;\n]*(?:;|(?=\n|\Z)))+|[^\n]*)[ \t]*\n?)+"
)


def make_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/messages", openapi_extra=describe_body(MessagesRequest))
    async def messages(request: Request) -> Response:
        body = await read_body(request, service, MessagesRequest)
        if isinstance(body.thinking, ThinkingEnabled) and not service.check_ready().can_think:
            request.state.ignored.append("thinking")
            body = body.model_copy(update={"thinking": None})
        check(body)
        request.state.user = body.metadata.user_id if body.metadata else None
        call = make_call(body, service.options.temperature, request.state.identity.seed)
        wire = MessageWire(_reply_options(request, body), call)
        return await answer(
            request, service, [call], wire, is_stream=bool(body.stream), prompt_field="messages"
        )

    @router.post("/v1/messages/count_tokens", openapi_extra=describe_body(CountRequest))
    async def count_tokens(request: Request) -> dict[str, int]:
        body = await read_body(request, service, CountRequest)
        return {"input_tokens": await service.run_beside(lambda engine: _count(engine, body))}

    return router


def check(body: PromptFields) -> None:
    """What no single field can tell."""
    choice, thinking = body.tool_choice, body.thinking
    names = [tool.name for tool in body.tools or ()]
    chosen = choice.name if isinstance(choice, ToolChoice) else None
    check_tools(names, chosen, is_forced=isinstance(choice, AnyChoice))
    if continues(body):
        _check_begun(body.messages[-1], thinking)
    most = body.max_tokens if isinstance(body, MessagesRequest) else None
    if isinstance(thinking, ThinkingEnabled) and most and thinking.budget_tokens >= most:
        sentence = "thinking.budget_tokens must be less than max_tokens."
        raise ApiError(400, sentence, param="thinking.budget_tokens")


def continues(body: PromptFields) -> bool:
    """Whether the reply goes on from the last message."""
    return isinstance(body.messages[-1], AssistantTurn)


def _check_begun(turn: Turn, thinking: Thinking | None) -> None:
    blocks = () if isinstance(turn.content, str) else turn.content
    sentence = None
    if any(not isinstance(block, TextBlock) for block in blocks):
        sentence = "messages: a reply that was begun for the assistant must be text alone."
    elif isinstance(thinking, ThinkingEnabled):
        sentence = "messages: a reply that was begun for the assistant cannot think first."
    if sentence is not None:
        raise ApiError(400, sentence, param="messages")


def make_call(body: MessagesRequest, temperature: float, seed: int) -> ObservedCall:
    choice = body.tool_choice
    if body.temperature is not None:
        temperature = body.temperature
    call = partial(
        ask,
        conversation=read_conversation(body),
        tools=_tools(body),
        tool_choice=_tool_choice(body),
        parallel_tool_calls=not getattr(choice, "disable_parallel_tool_use", None),
        response_format=_response_format(body),
        thinking=_thinking(body),
        thinking_budget=_thinking_budget(body),
        max_tokens=body.max_tokens,
        sampling=choose_sampling(temperature, seed, body.top_p, body.top_k),
        continue_final=continues(body),
        **compress_options(body.draftree),
    )
    return ObservedCall(call, body.stop_sequences or ())


def read_conversation(body: PromptFields) -> Conversation:
    conversation = Conversation()
    for text in _texts(body.system):
        rest = _NOT_FOR_THE_MODEL.sub("", text)
        if rest or not text:
            conversation.add_text("system", rest)
    for turn in body.messages:
        _add_turn(conversation, turn)
    return conversation


def _add_turn(conversation: Conversation, turn: Turn) -> None:
    if isinstance(turn.content, str):
        conversation.add_text(turn.role, turn.content)
        return
    for block in turn.content:
        match block:
            case TextBlock():
                conversation.add_text(turn.role, block.text)
            case ThinkingBlock():
                conversation.add_reasoning(block.thinking)
            case ToolUseBlock():
                arguments = json.dumps(block.input, ensure_ascii=False)
                conversation.add_call(block.id, block.name, arguments)
            case ToolResultBlock():
                text = "\n".join(_texts(block.content))
                text = f"Error: {text}" if block.is_error else text
                conversation.add_result(block.tool_use_id, text)


def _texts(content: str | list[TextBlock] | None) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [block.text for block in content or ()]


def _count(engine: "Engine", body: CountRequest) -> int:
    check(body)
    conversation = read_conversation(body)
    tools, thinking = _tools(body), _thinking(body) if engine.can_think else None
    check_length(engine, conversation.text_len + count_characters(tools))
    ids = engine.encode_chat(
        conversation.messages, tools=tools or (), thinking=thinking, continue_final=continues(body)
    )
    return len(ids)


def _tools(body: PromptFields) -> list[dict[str, Any]] | None:
    if not body.tools or isinstance(body.tool_choice, NoChoice):
        return None
    return [_tool(tool) for tool in body.tools]


def _tool(tool: ClientTool) -> dict[str, Any]:
    return describe_tool(tool.name, tool.description, tool.input_schema, tool.strict)


def _tool_choice(body: PromptFields) -> str | dict[str, Any]:
    if isinstance(body.tool_choice, ToolChoice):
        return {"type": "function", "function": {"name": body.tool_choice.name}}
    return "required" if isinstance(body.tool_choice, AnyChoice) else "auto"


def _thinking(body: PromptFields) -> bool | None:
    if isinstance(body.thinking, ThinkingEnabled | ThinkingDisabled):
        return isinstance(body.thinking, ThinkingEnabled)
    return None


def _thinking_budget(body: PromptFields) -> int | None:
    if isinstance(body.thinking, ThinkingEnabled):
        return body.thinking.budget_tokens
    effort = body.output_config.effort if body.output_config else None
    return EFFORT_BUDGETS.get(effort or "")


def _response_format(body: PromptFields) -> ResponseFormat | None:
    if body.output_config is None or body.output_config.format is None:
        return None
    return ResponseFormat(FormatKind.JSON_SCHEMA, body.output_config.format.schema_)


def _reply_options(request: Request, body: MessagesRequest) -> MessageOptions:
    return MessageOptions(
        model=body.model or "",
        shows_thinking=getattr(body.thinking, "display", None) != "omitted",
        has_statistics=wants_statistics(request.headers, body.draftree),
        token=request.state.identity.token,
    )
