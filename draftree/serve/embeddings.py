"""Embeddings, as OpenAI's clients ask for them: one vector a text. See engine.embedding for what
they are.

A request is one job in the queue, however many texts it has; between two of them others may have
their turn.
"""

import base64
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from draftree.core import FinishReason, TokenSource, Usage
from draftree.serve.body import describe_body, read_body
from draftree.serve.length import check_length
from draftree.serve.openai import split_prompts
from draftree.serve.openai_fields import MODEL_WORDS, ModelName, TokenId
from draftree.serve.queue import Job
from draftree.serve.reply import Folded, answer_whole
from draftree.serve.service import Service
from draftree.serve.wire import ApiError, Nothing, WireModel, optional, refused
from draftree.text.reply import DeltaKind

if TYPE_CHECKING:
    from draftree.chat import Delta, Engine, Generation

MAX_TEXTS: Final = 2048
Texts = Annotated[list[str], Field(max_length=MAX_TEXTS)]


class EmbeddingRequest(WireModel):
    """POST /v1/embeddings"""

    input: (
        str | Texts | list[TokenId] | Annotated[list[list[TokenId]], Field(max_length=MAX_TEXTS)]
    ) = Field(description="Text or token ids, or a list of either.")
    model: ModelName = optional(MODEL_WORDS)
    encoding_format: Literal["float", "base64"] | None = optional("base64: of float32.")
    user: str | None = optional("Written to the log.", max_length=1000)
    dimensions: Nothing = refused("Vectors have the model's own length.")


MODELS: Final = (EmbeddingRequest,)


def make_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/embeddings", openapi_extra=describe_body(EmbeddingRequest))
    async def embeddings(request: Request) -> Response:
        body = await read_body(request, service, EmbeddingRequest)
        request.state.user = body.user
        if not body.input or not all(split_prompts(body.input)):
            raise ApiError(400, "The input is empty.", param="input")
        call = EmbeddingCall(split_prompts(body.input))
        is_base64 = body.encoding_format == "base64"
        name = body.model or service.options.model_id

        def write(replies: Sequence[Folded], jobs: Sequence[Job]) -> dict[str, Any]:
            data = [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": _pack(vector) if is_base64 else vector,
                }
                for index, vector in enumerate(call.vectors)
            ]
            num = jobs[0].usage.prompt_tokens
            usage = {"prompt_tokens": num, "total_tokens": num}
            return {"object": "list", "data": data, "model": name, "usage": usage}

        return await answer_whole(request, service, [call], write, prompt_field="input")

    return router


def _pack(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


class EmbeddingCall:
    """A call on the engine; vectors: of the latest one. is_cut: long texts lose their end."""

    def __init__(self, texts: Sequence[str | list[int]], *, is_cut: bool = False) -> None:
        self._texts, self._is_cut = texts, is_cut
        self.vectors: list[list[float]] = []

    def __call__(self, engine: "Engine") -> "Generation":
        self.vectors = []
        ids = [self._encode(engine, text) for text in self._texts]
        return cast("Generation", _Embedding(engine, ids, self.vectors))

    def _encode(self, engine: "Engine", text: str | list[int]) -> list[int]:
        if isinstance(text, str):
            check_length(engine, len(text))
            text = engine.tokenizer.encode(text)
        ids = text[: engine.tokens.max_embedding_len] if self._is_cut else text
        engine.tokens.check_embedding(ids)
        return ids


class _Embedding:
    """All of a generation that the engine thread uses."""

    def __init__(
        self, engine: "Engine", texts: Sequence[list[int]], vectors: list[list[float]]
    ) -> None:
        self.usage = Usage(prompt_tokens=sum(map(len, texts)))
        self.finish_reason: FinishReason | None = None
        self._engine, self._texts, self._vectors = engine, texts, vectors
        self._is_cancelled = False
        self._should_pause: Callable[[], bool] = lambda: False

    def __iter__(self) -> "Iterator[Delta]":
        from draftree.chat import Delta

        for ids in self._texts:
            if self._is_cancelled:
                return
            self._vectors.append(self._engine.embed(ids).tolist())
            if self._should_pause():
                yield Delta("", TokenSource.PLAIN, 0, DeltaKind.PAUSE)
        self.finish_reason = FinishReason.STOP

    def watch_rounds(self, on_round: Callable[[], None]) -> None:
        """There are none."""

    def pause_when(self, should_pause: Callable[[], bool]) -> None:
        self._should_pause = should_pause

    def cancel(self) -> None:
        self._is_cancelled = True

    def close(self) -> None:
        self.finish_reason = self.finish_reason or FinishReason.CANCELLED
