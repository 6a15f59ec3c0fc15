"""Ollama's API: chat, generate, embed, and what it tells of its model. Translation only.

In: HTTP requests. Out: the requests of OpenAI's API that ask for the same, and a Wire that writes
the reply as Ollama does.
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from draftree.serve.body import describe_body, read_body
from draftree.serve.embeddings import EmbeddingCall
from draftree.serve.ollama_fields import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaFunction,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaRequest,
    OllamaShowRequest,
    Options,
)
from draftree.serve.ollama_reply import OllamaOptions, OllamaWire, ending, timestamp
from draftree.serve.openai import chat_calls, check_chat, check_completion, completion_calls
from draftree.serve.openai_fields import ChatRequest, CompletionRequest
from draftree.serve.queue import Call, Job
from draftree.serve.reply import LINES, Folded, answer, answer_whole
from draftree.serve.service import Service
from draftree.serve.wire import ApiError, Body, check_value

if TYPE_CHECKING:
    from draftree.chat import Engine

MODELS: Final = (OllamaChatRequest, OllamaGenerateRequest, OllamaEmbedRequest, OllamaShowRequest)
SPOKEN: Final = "0.13.0"  # clients ask for at least some version before they use what it has
_LOADED: Final = {"done": True, "done_reason": "load"}
_FOR_EVER: Final = "2318-01-01T00:00:00Z"
_OPENAI_NAMES: Final = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "stop", "repeat_penalty"),
    *("repeat_last_n", "presence_penalty", "frequency_penalty"),
)


def make_routes(service: Service) -> APIRouter:
    router = APIRouter()

    async def read(request: Request, model: type[Body]) -> Body:
        return await read_body(request, service, model, takes_any_kind=True)

    @router.post("/api/chat", openapi_extra=describe_body(OllamaChatRequest))
    async def chat(request: Request) -> Response:
        body = await read(request, OllamaChatRequest)
        if not body.messages:
            return _say_loaded(service, body, is_chat=True)
        asked = read_chat(body, read_messages(body.messages))
        return await _answer(request, service, body, asked, is_chat=True)

    @router.post("/api/generate", openapi_extra=describe_body(OllamaGenerateRequest))
    async def generate(request: Request) -> Response:
        body = await read(request, OllamaGenerateRequest)
        if not body.prompt:
            return _say_loaded(service, body, is_chat=False)
        if body.raw:
            return await _answer(request, service, body, read_completion(body), is_chat=False)
        system = [{"role": "system", "content": body.system}] if body.system else []
        asked = read_chat(body, [*system, {"role": "user", "content": body.prompt}])
        return await _answer(request, service, body, asked, is_chat=False)

    @router.post("/api/embed", openapi_extra=describe_body(OllamaEmbedRequest))
    async def embed(request: Request) -> Response:
        body = await read(request, OllamaEmbedRequest)
        texts = [body.input] if isinstance(body.input, str) else body.input or []
        return await _embed(request, service, body, texts, is_new=True)

    @router.post("/api/embeddings", openapi_extra=describe_body(OllamaEmbedRequest))
    async def embeddings(request: Request) -> Response:
        body = await read(request, OllamaEmbedRequest)
        return await _embed(request, service, body, [body.prompt or ""], is_new=False)

    @router.get("/api/tags")
    async def list_models() -> dict[str, Any]:
        names = (service.options.model_id, *service.options.aliases)
        return {"models": [_entry(service, name) for name in names]}

    @router.get("/api/ps")
    async def list_loaded() -> dict[str, Any]:
        if service.context_length is None:
            return {"models": []}
        more = {"expires_at": _FOR_EVER, "size_vram": 0, "context_length": service.context_length}
        return {"models": [{**_entry(service, service.options.model_id), **more}]}

    @router.post("/api/show", openapi_extra=describe_body(OllamaShowRequest))
    async def show(request: Request) -> dict[str, Any]:
        await read(request, OllamaShowRequest)
        return _describe(service, service.check_ready())

    @router.get("/api/version")
    async def version() -> dict[str, str]:
        return {"version": SPOKEN, "draftree": service.options.version}

    return router


async def _answer(
    request: Request,
    service: Service,
    body: OllamaRequest,
    asked: ChatRequest | CompletionRequest,
    *,
    is_chat: bool,
) -> Response:
    engine, name = service.check_ready(), body.model or service.options.model_id
    if body.think and not engine.can_think:
        raise ApiError(400, f"{name!r} does not support thinking.", param="think")
    wire = OllamaWire(OllamaOptions(name, is_chat))
    return await answer(
        request,
        service,
        _calls(asked, service.options.temperature, request.state.identity.seed),
        wire,
        is_stream=body.stream is not False,
        prompt_field="messages" if is_chat else "prompt",
        kind=LINES,
    )


def _calls(asked: ChatRequest | CompletionRequest, temperature: float, seed: int) -> list[Call]:
    if isinstance(asked, ChatRequest):
        check_chat(asked)
        return chat_calls(asked, temperature, seed)
    check_completion(asked)
    return completion_calls(asked, [str(asked.prompt)], temperature, seed)


def read_chat(body: OllamaRequest, messages: list[dict[str, Any]]) -> ChatRequest:
    fields = {"messages": messages, **_sampling(body.options)}
    if isinstance(body, OllamaChatRequest) and body.tools:
        fields["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif body.format:
        fields["json_schema"] = body.format
    if body.think is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": bool(body.think)}
    if isinstance(body.think, str):
        fields["reasoning_effort"] = "high" if body.think == "max" else body.think
    return check_value(ChatRequest, fields)


def read_completion(body: OllamaGenerateRequest) -> CompletionRequest:
    if body.system:
        sentence = "system goes into the model's template, which raw leaves out."
        raise ApiError(400, sentence, param="system")
    fields = {"prompt": body.prompt, "max_tokens": -1, **_sampling(body.options)}
    if body.format:
        fields["json_schema"] = {"type": "object"} if body.format == "json" else body.format
    return check_value(CompletionRequest, fields)


def _sampling(options: Options | None) -> dict[str, Any]:
    if options is None:
        return {}
    given = options.model_dump(include=set(_OPENAI_NAMES), exclude_none=True)
    if options.num_predict is not None:
        given["max_tokens"] = min(max(options.num_predict, 0), 2**31) or -1
    return given


def read_messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """As OpenAI's clients send them: calls have ids, and results name them."""
    found: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []  # ids and names of calls without a result
    for message in messages:
        plain: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking and message.role == "assistant":
            plain["reasoning_content"] = message.thinking
        if message.tool_calls and message.role == "assistant":
            names = [call.function.name for call in message.tool_calls]
            ids = [call.id or f"call_{len(found)}_{i}" for i, call in enumerate(message.tool_calls)]
            waiting = list(zip(ids, names, strict=True))
            plain["tool_calls"] = [
                {"id": call_id, "function": {"name": name, "arguments": _write(call.function)}}
                for call_id, name, call in zip(ids, names, message.tool_calls, strict=True)
            ]
        if message.role == "tool":
            name = message.tool_name or message.name
            plain["tool_call_id"] = message.tool_call_id or _find_call(name, waiting)
            plain["name"] = name
        found.append(plain)
    return found


def _write(function: OllamaFunction) -> str:
    return json.dumps(function.arguments, ensure_ascii=False)


def _find_call(name: str | None, waiting: list[tuple[str, str]]) -> str:
    """The next call, or the next of this function; it no longer waits."""
    call = next((call for call in waiting if name in (None, call[1])), None)
    if call is None:
        return "call_0"
    waiting.remove(call)
    return call[0]


def _say_loaded(service: Service, body: OllamaRequest, *, is_chat: bool) -> Response:
    """As for a client that only wants the model to be loaded."""
    service.check_ready()
    empty = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    name = body.model or service.options.model_id
    return JSONResponse({"model": name, "created_at": timestamp(), **empty, **_LOADED})


async def _embed(
    request: Request,
    service: Service,
    body: OllamaEmbedRequest,
    texts: Sequence[str],
    *,
    is_new: bool,
) -> Response:
    """is_new: several texts, with what they cost."""
    if not texts or not all(texts):
        raise ApiError(400, "The input is empty.", param="input" if is_new else "prompt")
    call = EmbeddingCall(texts, is_cut=body.truncate is not False)

    def write(replies: Sequence[Folded], jobs: Sequence[Job]) -> dict[str, Any]:
        if not is_new:
            return {"embedding": call.vectors[0]}
        counts = ending(jobs[0])
        kept = ("total_duration", "load_duration", "prompt_eval_count")
        name = body.model or service.options.model_id
        return {"model": name, "embeddings": call.vectors, **{key: counts[key] for key in kept}}

    return await answer_whole(request, service, [call], write, prompt_field="input")


def _entry(service: Service, name: str) -> dict[str, Any]:
    engine = service.thread.engine
    modified = datetime.fromtimestamp(service.created_s, UTC).isoformat().replace("+00:00", "Z")
    return {
        "name": name,
        "model": name,
        "modified_at": modified,
        "size": engine.tokens.model_config.weight_bytes if engine is not None else 0,
        "digest": service.digest,
        "details": _details(engine),
    }


def _details(engine: "Engine | None") -> dict[str, Any]:
    config = engine.tokens.model_config if engine is not None else None
    family = config.architecture if config is not None else ""
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": f"{config.num_parameters / 1e6:.1f}M" if config is not None else "",
        "quantization_level": "unknown",
    }


def _describe(service: Service, engine: "Engine") -> dict[str, Any]:
    config = engine.tokens.model_config
    abilities = ["completion", "tools", "embedding", *(["thinking"] if engine.can_think else [])]
    return {
        "modelfile": "",
        "parameters": "",
        "template": engine.tokenizer.chat_template or "",
        "details": _details(engine),
        "model_info": {
            "general.architecture": config.architecture,
            "general.basename": config.name,
            "general.parameter_count": config.num_parameters,
            f"{config.architecture}.context_length": engine.plan.max_ctx,
            f"{config.architecture}.embedding_length": config.hidden_size,
            f"{config.architecture}.block_count": config.num_layers,
        },
        "capabilities": abilities,
        "modified_at": _entry(service, service.options.model_id)["modified_at"],
    }
