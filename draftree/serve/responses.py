"""OpenAI's Responses API, as Codex uses it. Translation only; nothing is stored.

In: HTTP requests. Out: calls on the engine, and a Wire that writes the reply.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

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
from draftree.serve.openai_fields import JsonFormat, compress_options
from draftree.serve.reply import answer
from draftree.serve.responses_fields import (
    FunctionCall,
    FunctionCallOutput,
    FunctionChoice,
    FunctionTool,
    InputMessage,
    InputText,
    Item,
    NamespaceTool,
    ReasoningItem,
    RefusalText,
    ResponsesRequest,
    SchemaFormat,
)
from draftree.serve.responses_reply import ResponseOptions, ResponseWire
from draftree.serve.service import Service
from draftree.serve.statistics import wants_statistics
from draftree.serve.telemetry import show_telemetry
from draftree.serve.wire import ApiError
from draftree.text.grammar import FormatKind, ResponseFormat

if TYPE_CHECKING:
    from draftree.chat import Engine

MODELS: Final = (ResponsesRequest,)
_LOGPROBS: Final = "message.output_text.logprobs"


def make_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/responses", openapi_extra=describe_body(ResponsesRequest))
    async def responses(request: Request) -> Response:
        body = await read_body(request, service, ResponsesRequest)
        check(body)
        request.state.user = body.user or body.safety_identifier
        call = make_call(body, service.options.temperature, request.state.identity.seed)
        wire = ResponseWire(_reply_options(service, request, body), call)
        calls, told, progress = show_telemetry(
            [call],
            wire,
            wire,
            has_timings=body.timings_per_token,
            has_progress=body.return_progress,
        )
        return await answer(
            request,
            service,
            calls,
            told,
            is_stream=bool(body.stream),
            prompt_field="input",
            progress=progress,
        )

    return router


def check(body: ResponsesRequest) -> None:
    """What no single field can tell."""
    choice = body.tool_choice
    names = [name for name, _, _ in _functions(body)]
    chosen = None
    if isinstance(choice, FunctionChoice):
        chosen = _full_name(choice.namespace, choice.name)
    check_tools(names, chosen, is_forced=choice == "required")
    if body.top_logprobs and _LOGPROBS not in (body.include or ()):
        sentence = f"top_logprobs needs include to have {_LOGPROBS!r}."
        raise ApiError(400, sentence, param="top_logprobs")
    if body.max_tokens not in (None, body.max_output_tokens or body.max_tokens):
        sentence = "max_tokens and max_output_tokens differ; give one of them."
        raise ApiError(400, sentence, param="max_tokens")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream to be true.", param="stream_options")


def make_call(body: ResponsesRequest, temperature: float, seed: int) -> ObservedCall:
    effort = body.reasoning.effort if body.reasoning is not None else None
    choice = body.tool_choice
    if isinstance(choice, FunctionChoice):
        name = _full_name(choice.namespace, choice.name)
        tool_choice: Any = {"type": "function", "function": {"name": name}}
    else:
        tool_choice = choice or "auto"
    call = partial(
        ask,
        conversation=read_conversation(body),
        tools=[_tool(*function) for function in _functions(body)] or None,
        tool_choice=tool_choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        response_format=_response_format(body),
        thinking=False if effort == "none" else None,
        thinking_budget=EFFORT_BUDGETS.get(effort or ""),
        max_tokens=body.max_output_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if _LOGPROBS in (body.include or ()) else None,
        sampling=choose_sampling(_or(body.temperature, temperature), seed, body.top_p),
        **compress_options(body.draftree),
    )
    return ObservedCall(call)


def render_prompt(engine: "Engine", body: ResponsesRequest) -> str:
    """What the model is to read."""
    conversation = read_conversation(body)
    tools = [_tool(*function) for function in _functions(body)]
    check_length(engine, conversation.text_len + count_characters(tools))
    return engine.render_chat(conversation.messages, tools=tools)


def read_conversation(body: ResponsesRequest) -> Conversation:
    conversation = Conversation()
    if body.instructions:
        conversation.add_text("system", body.instructions)
    if isinstance(body.input, str):
        conversation.add_text("user", body.input)
    else:
        for item in body.input:
            _add_item(conversation, item)
    return conversation


def _add_item(conversation: Conversation, item: Item) -> None:
    match item:
        case InputMessage():
            role = "system" if item.role == "developer" else item.role
            conversation.add_text(role, _text(item.content))
        case FunctionCall():
            name = _full_name(item.namespace, item.name)
            conversation.add_call(item.call_id, name, item.arguments)
        case FunctionCallOutput():
            conversation.add_result(item.call_id, _text(item.output))
        case ReasoningItem():
            for part in item.content or ():
                conversation.add_reasoning(part.text)


def _text(content: str | Sequence[InputText | RefusalText]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text if isinstance(part, InputText) else part.refusal for part in content)


def _functions(body: ResponsesRequest) -> Iterator[tuple[str, FunctionTool, NamespaceTool | None]]:
    """Every function by the name that the model knows it by."""
    for tool in body.tools or ():
        if isinstance(tool, FunctionTool):
            yield tool.name, tool, None
        elif isinstance(tool, NamespaceTool):
            for function in tool.tools:
                yield _full_name(tool.name, function.name), function, tool


def _full_name(namespace: str | None, name: str) -> str:
    return f"{namespace}.{name}" if namespace else name


def _tool(name: str, function: FunctionTool, namespace: NamespaceTool | None) -> dict[str, Any]:
    about = namespace.description if namespace is not None else None
    description = "\n\n".join(filter(None, (about, function.description)))
    return describe_tool(name, description, function.parameters, function.strict)


def _response_format(body: ResponsesRequest) -> ResponseFormat | None:
    wanted = body.text.format if body.text is not None else None
    if isinstance(wanted, SchemaFormat):
        return ResponseFormat(FormatKind.JSON_SCHEMA, wanted.schema_)
    return wanted.read() if isinstance(wanted, JsonFormat) else None


def _reply_options(service: Service, request: Request, body: ResponsesRequest) -> ResponseOptions:
    repeated = {"tools", "tool_choice", "reasoning", "text"}
    plain = body.model_dump(include=repeated, by_alias=True, exclude_none=True)
    settings = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens or body.max_tokens,
        "temperature": _or(body.temperature, service.options.temperature),
        "top_p": _or(body.top_p, 1.0),
        "tools": plain.get("tools", []),
        "tool_choice": plain.get("tool_choice", "auto"),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": None, "summary": None, **plain.get("reasoning", {})},
        "text": {"format": {"type": "text"}, **plain.get("text", {})},
        "metadata": body.metadata or {},
        "previous_response_id": None,
        "background": False,
        "store": False,
        "truncation": "disabled",
        "user": body.user,
    }
    return ResponseOptions(
        model=body.model or service.options.model_id,
        created=request.state.identity.created,
        settings=settings,
        namespaces={
            name: (namespace.name, function.name)
            for name, function, namespace in _functions(body)
            if namespace is not None
        },
        has_logprobs=_LOGPROBS in (body.include or ()),
        has_statistics=wants_statistics(request.headers, body.draftree),
        token=request.state.identity.token,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
