"""Texts as tokens, tokens as text, and conversations as the text of a prompt: nothing is written.

The shapes are those of llama.cpp's server.
"""

from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request

from draftree.serve.body import describe_body, read_body
from draftree.serve.length import check_length
from draftree.serve.openai import check_chat, check_tokens
from draftree.serve.openai_fields import MODEL_WORDS, ChatRequest, ModelName, TokenId
from draftree.serve.openai_messages import render_prompt as render_chat
from draftree.serve.responses import check as check_response
from draftree.serve.responses import render_prompt
from draftree.serve.responses_fields import ResponsesRequest
from draftree.serve.service import Service
from draftree.serve.wire import WireModel, optional

if TYPE_CHECKING:
    from draftree.chat import Engine


class TokenizeRequest(WireModel):
    """POST /tokenize"""

    content: str = Field(description="At most as long as the context could be.")
    model: ModelName = optional(MODEL_WORDS)
    add_special: bool | None = optional("Whether the token that begins a text comes first.")
    parse_special: bool | None = optional("False reads the names of special tokens as text.")
    with_pieces: bool | None = optional("Tokens as `id` and `piece`, a text or a list of bytes.")


class DetokenizeRequest(WireModel):
    """POST /detokenize"""

    tokens: list[TokenId] = Field(description="Token ids.")
    model: ModelName = optional(MODEL_WORDS)


MODELS: Final = (TokenizeRequest, DetokenizeRequest)


def make_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize", openapi_extra=describe_body(TokenizeRequest))
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await read_body(request, service, TokenizeRequest)
        return await service.run_beside(lambda engine: _tokenize(engine, body))

    @router.post("/detokenize", openapi_extra=describe_body(DetokenizeRequest))
    async def detokenize(request: Request) -> dict[str, Any]:
        body = await read_body(request, service, DetokenizeRequest)
        return await service.run_beside(lambda engine: _detokenize(engine, body))

    @router.post("/apply-template", openapi_extra=describe_body(ChatRequest))
    async def apply_template(request: Request) -> dict[str, Any]:
        body = await read_body(request, service, ChatRequest)
        check_chat(body)
        return await service.run_beside(lambda engine: {"prompt": render_chat(engine, body)})

    @router.post("/v1/chat/completions/input_tokens", openapi_extra=describe_body(ChatRequest))
    async def count_chat(request: Request) -> dict[str, Any]:
        body = await read_body(request, service, ChatRequest)
        check_chat(body)
        return await service.run_beside(lambda engine: _count(engine, render_chat(engine, body)))

    @router.post("/v1/responses/input_tokens", openapi_extra=describe_body(ResponsesRequest))
    async def count_response(request: Request) -> dict[str, Any]:
        body = await read_body(request, service, ResponsesRequest)
        check_response(body)
        return await service.run_beside(lambda engine: _count(engine, render_prompt(engine, body)))

    return router


def _tokenize(engine: "Engine", body: TokenizeRequest) -> dict[str, Any]:
    check_length(engine, len(body.content))
    tokenizer = engine.tokenizer
    ids = tokenizer.encode(
        body.content,
        add_special=bool(body.add_special),
        parse_special=body.parse_special is not False,
    )
    if not body.with_pieces:
        return {"tokens": ids}
    return {"tokens": [{"id": i, "piece": _piece(tokenizer.token_bytes(i))} for i in ids]}


def _piece(text: bytes) -> str | list[int]:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return list(text)


def _detokenize(engine: "Engine", body: DetokenizeRequest) -> dict[str, Any]:
    check_tokens(engine, "tokens", body.tokens)
    return {"content": engine.tokenizer.decode(body.tokens)}


def _count(engine: "Engine", prompt: str) -> dict[str, Any]:
    num_tokens = len(engine.tokenizer.encode_chat(prompt))
    return {"object": "response.input_tokens", "input_tokens": num_tokens}
