"""The OpenAI API: chat completions, text completions. Translation only.

In: HTTP requests. Out: calls on the engine, and a Wire that writes the reply.
"""

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from draftree.core import SamplingParams
from draftree.errors import GrammarError, TokenizerError
from draftree.serve.body import describe_body, read_body
from draftree.serve.conversation import EFFORT_BUDGETS, TINY_TOP_P
from draftree.serve.length import check_length, count_characters
from draftree.serve.openai_fields import (
    ChatRequest,
    CompletionRequest,
    JsonSchemaFormat,
    NamedToolChoice,
    SamplingFields,
    TextFormat,
    compress_options,
)
from draftree.serve.openai_messages import (
    check_beginning,
    continues,
    read_messages,
    read_tools,
    show_prompt,
)
from draftree.serve.openai_reply import ChatWire, CompletionWire, ReplyOptions
from draftree.serve.queue import Call
from draftree.serve.reply import Wire, answer
from draftree.serve.rounds import show_rounds
from draftree.serve.service import Service
from draftree.serve.statistics import wants_statistics
from draftree.serve.telemetry import show_telemetry
from draftree.serve.wire import ApiError
from draftree.text.grammar import FormatKind, ResponseFormat

if TYPE_CHECKING:
    from draftree.chat import Engine, Generation

MODELS: Final = (ChatRequest, CompletionRequest)
_SEED_MASK: Final = 2**63 - 1


def make_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=describe_body(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        body = await read_body(request, service, ChatRequest)
        check_chat(body)
        kwargs = body.chat_template_kwargs
        if kwargs is not None and kwargs.enable_thinking and not service.check_ready().can_think:
            request.state.ignored.append("chat_template_kwargs.enable_thinking")
        request.state.user = body.user or body.safety_identifier
        prompt = None
        if body.verbose and not body.stream:
            prompt = await service.run_beside(lambda engine: show_prompt(engine, body))
        options = _reply_options(
            service, request, body, has_logprobs=bool(body.logprobs), prompt=prompt
        )
        calls = chat_calls(body, service.options.temperature, request.state.identity.seed)
        return await _answer(request, service, body, calls, ChatWire(options), "messages")

    @router.post("/v1/completions", openapi_extra=describe_body(CompletionRequest))
    async def completions(request: Request) -> Response:
        body = await read_body(request, service, CompletionRequest)
        check_completion(body)
        request.state.user = body.user or body.safety_identifier
        prompts = split_prompts(body.prompt)
        service.check_count(len(prompts) * (body.n or 1))
        has_logprobs = body.logprobs is not None
        echoes: tuple[str, ...] = ()
        if body.echo:
            echoes = await asyncio.to_thread(_decode_prompts, service.check_ready(), prompts)
        options = _reply_options(
            service, request, body, has_logprobs, num_prompts=len(prompts), echoes=echoes
        )
        seed = request.state.identity.seed
        calls = completion_calls(body, prompts, service.options.temperature, seed)
        return await _answer(request, service, body, calls, CompletionWire(options), "prompt")

    return router


async def _answer(
    request: Request,
    service: Service,
    body: SamplingFields,
    calls: list[Call],
    own: ChatWire | CompletionWire,
    prompt_field: str,
) -> Response:
    wire: Wire = own
    if body.draftree is not None and body.draftree.rounds:
        calls, wire = show_rounds(calls, wire)
    calls, wire, progress = show_telemetry(
        calls, wire, own, has_timings=body.timings_per_token, has_progress=body.return_progress
    )
    return await answer(
        request,
        service,
        calls,
        wire,
        is_stream=bool(body.stream),
        prompt_field=prompt_field,
        progress=progress,
    )


def check_chat(body: ChatRequest) -> None:
    """What no single field can tell."""
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")
    _check_sampling(body, body.max_tokens, body.max_completion_tokens)
    check_beginning(body)
    formats = (body.response_format, body.grammar, body.json_schema)
    if sum(each is not None for each in formats) > 1:
        sentence = "response_format, grammar and json_schema cannot be given together."
        raise ApiError(400, sentence, param="grammar" if body.grammar else "json_schema")
    names = [tool.function.name for tool in body.tools or ()]
    if len(names) != len(set(names)):
        raise ApiError(400, "Two tools have the same name.", param="tools")
    if not names and body.tool_choice not in (None, "none", "auto"):
        raise ApiError(400, "tool_choice asks for a call, but there are no tools.", param="tools")
    choice = body.tool_choice
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        sentence = f"tool_choice names {choice.function.name!r}, which is not among the tools."
        raise ApiError(400, sentence, param="tool_choice")
    _check_stream(body)


def _check_sampling(body: SamplingFields, *limits: int | None) -> None:
    found = {limit for limit in (body.n_predict, *limits) if limit is not None}
    if len(found) > 1 or 0 in found:
        names = "max_tokens, max_completion_tokens and n_predict"
        sentence = f"{names} must be the same, and -1 or at least 1; give one of them."
        raise ApiError(400, sentence, param="max_tokens")
    penalties = {body.repeat_penalty, body.repetition_penalty} - {None}
    if len(penalties) > 1:
        sentence = "repeat_penalty and repetition_penalty differ; give one of them."
        raise ApiError(400, sentence, param="repeat_penalty")
    if body.repeat_last_n not in (None, -1, 0) and penalties - {1.0}:
        sentence = "repeat_last_n must be -1 or 0: penalties count all tokens seen."
        raise ApiError(400, sentence, param="repeat_last_n")


def check_completion(body: CompletionRequest) -> None:
    _check_sampling(body, body.max_tokens)
    if body.grammar is not None and body.json_schema is not None:
        sentence = "grammar and json_schema cannot be given together."
        raise ApiError(400, sentence, param="grammar")
    if not body.prompt or not all(split_prompts(body.prompt)):
        raise ApiError(400, "The prompt is empty.", param="prompt")
    if body.best_of not in (None, body.n or 1):
        sentence = "best_of must be the same as n: replies are not ranked here."
        raise ApiError(400, sentence, param="best_of", code="unsupported_field")
    if body.echo and body.logprobs is not None:
        sentence = "logprobs cannot go with echo: prompts are not scored."
        raise ApiError(400, sentence, param="logprobs", code="unsupported_field")
    _check_stream(body)


def _check_stream(body: SamplingFields) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream to be true.", param="stream_options")
    if body.draftree is not None and body.draftree.rounds and not body.stream:
        sentence = "draftree.rounds needs stream to be true."
        raise ApiError(400, sentence, param="draftree.rounds")


def chat_calls(body: ChatRequest, temperature: float, seed: int) -> list[Call]:
    messages, tools = read_messages(body), read_tools(body)
    choice = body.tool_choice
    return [
        partial(
            _chat,
            messages=messages,
            tools=tools,
            tool_choice=choice.model_dump(exclude_none=True)
            if isinstance(choice, NamedToolChoice)
            else choice or "auto",
            parallel_tool_calls=body.parallel_tool_calls is not False,
            response_format=_response_format(body),
            thinking=_thinking(body),
            thinking_budget=_thinking_budget(body),
            max_tokens=_limit(body.max_completion_tokens, body.max_tokens, body.n_predict),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            sampling=sampling,
            continue_final=continues(body),
            **compress_options(body.draftree),
            **_shared_options(body),
        )
        for sampling in samplings(body, temperature, seed, body.n or 1)
    ]


def completion_calls(
    body: CompletionRequest, prompts: Sequence[str | list[int]], temperature: float, seed: int
) -> list[Call]:
    """Replies to the first prompt come first."""
    found = _peer_format(body)
    wanted: dict[str, Any] = {"response_format": found} if found else {}
    return [
        partial(
            _complete,
            prompt=prompt,
            max_tokens=_limit(body.max_tokens, body.n_predict, 16),
            logprobs=body.logprobs,
            **wanted,
            sampling=sampling,
            **_shared_options(body),
        )
        for prompt in prompts
        for sampling in samplings(body, temperature, seed, body.n or 1)
    ]


def samplings(
    body: SamplingFields, temperature: float, seed: int, count: int
) -> list[SamplingParams]:
    """One a reply; they differ in the seed, which counts up from the one that was given."""
    seed = seed if body.seed is None else body.seed
    penalty = body.repetition_penalty or body.repeat_penalty or 1.0
    penalty = 1.0 if body.repeat_last_n == 0 else penalty
    return [
        SamplingParams(
            temperature=temperature if body.temperature is None else body.temperature,
            top_k=max(body.top_k or 0, 0),
            top_p=1.0 if body.top_p is None else max(body.top_p, TINY_TOP_P),
            min_p=body.min_p or 0.0,
            repetition_penalty=penalty,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            seed=(seed + index) & _SEED_MASK,
        )
        for index in range(count)
    ]


def split_prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """A list of numbers is one prompt, a list of anything else is several."""
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    return [prompt] if is_one else list(prompt)


def _shared_options(body: SamplingFields) -> dict[str, Any]:
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    return {"stop": stop, "logit_bias": bias or None}


def _chat(
    engine: "Engine", *, messages: list[dict[str, Any]], max_tokens: int | None, **options: Any
) -> "Generation":
    check_length(engine, count_characters(messages) + count_characters(options["tools"]))
    check_tokens(engine, "logit_bias", options["logit_bias"] or ())
    if options["thinking"] and not engine.can_think:
        options["thinking"] = None
    try:
        return engine.chat(messages, max_tokens=max_tokens or engine.plan.max_ctx, **options)
    except GrammarError as error:
        raise _explain_grammar(options["response_format"], error) from error


def _complete(
    engine: "Engine", *, prompt: str | list[int], max_tokens: int | None, **options: Any
) -> "Generation":
    check_length(engine, len(prompt) if isinstance(prompt, str) else 0)
    check_tokens(engine, "logit_bias", options["logit_bias"] or ())
    check_tokens(engine, "prompt", () if isinstance(prompt, str) else prompt)
    try:
        return engine.complete(prompt, max_tokens=max_tokens or engine.plan.max_ctx, **options)
    except GrammarError as error:
        raise _explain_grammar(options["response_format"], error) from error


def _explain_grammar(wanted: ResponseFormat | None, error: GrammarError) -> ApiError:
    field = "tools" if wanted is None else "response_format"
    field = "grammar" if wanted is not None and wanted.kind is FormatKind.GBNF else field
    return ApiError(400, f"{field}: {error}", param=field, code="invalid_schema")


def _limit(*limits: int | None) -> int | None:
    """The first that was given; None: the rest of the context."""
    limit = next((limit for limit in limits if limit is not None), -1)
    return limit if limit > 0 else None


def check_tokens(engine: "Engine", field: str, tokens: Iterable[int]) -> None:
    size = engine.tokenizer.vocab_size
    unknown = next((token for token in tokens if token >= size), None)
    if unknown is not None:
        sentence = f"{field}: there is no token {unknown}; the vocabulary has {size} tokens."
        raise ApiError(400, sentence, param=field)


def _thinking(body: ChatRequest) -> bool | None:
    """Effort limits how long a model thinks, and is no reason to refuse one that does not."""
    if _effort(body) == "none":
        return False
    return body.chat_template_kwargs.enable_thinking if body.chat_template_kwargs else None


def _thinking_budget(body: ChatRequest) -> int | None:
    if body.thinking_budget is not None:
        return body.thinking_budget
    return EFFORT_BUDGETS.get(_effort(body) or "")


def _effort(body: ChatRequest) -> str | None:
    return body.reasoning_effort or (body.reasoning.effort if body.reasoning else None)


def _response_format(body: ChatRequest) -> ResponseFormat | None:
    wanted = body.response_format
    if wanted is None or isinstance(wanted, TextFormat):
        return _peer_format(body)
    if isinstance(wanted, JsonSchemaFormat):
        return ResponseFormat(FormatKind.JSON_SCHEMA, wanted.json_schema.schema_ or {})
    return wanted.read()


def _peer_format(body: SamplingFields) -> ResponseFormat | None:
    """As llama.cpp's clients ask for it."""
    if body.json_schema is not None:
        return ResponseFormat(FormatKind.JSON_SCHEMA, body.json_schema)
    return ResponseFormat(FormatKind.GBNF, body.grammar) if body.grammar else None


def _decode_prompts(engine: "Engine", prompts: Sequence[str | list[int]]) -> tuple[str, ...]:
    try:
        return tuple(
            prompt if isinstance(prompt, str) else engine.tokenizer.decode(prompt)
            for prompt in prompts
        )
    except TokenizerError as error:
        raise ApiError(400, str(error), param="prompt") from error


def _reply_options(
    service: Service,
    request: Request,
    body: SamplingFields,
    has_logprobs: bool,
    *,
    num_prompts: int = 1,
    echoes: tuple[str, ...] = (),
    prompt: str | None = None,
) -> ReplyOptions:
    has_statistics = wants_statistics(request.headers, body.draftree)
    num_each = body.n or 1
    # What was cached is chance, and a repeated stream has the same events to its end.
    is_free = body.stream_options is None and not request.state.identity.is_repeatable
    return ReplyOptions(
        model=body.model or service.options.model_id,
        created=request.state.identity.created,
        fingerprint=service.fingerprint,
        num_prompts=num_prompts,
        num_each=num_each,
        has_logprobs=has_logprobs,
        has_usage=has_statistics or bool(body.stream_options and body.stream_options.include_usage),
        closes_with_usage=is_free and num_prompts * num_each == 1 and not has_statistics,
        has_statistics=has_statistics,
        echoes=echoes,
        prompt=prompt,
        token=request.state.identity.token,
    )
