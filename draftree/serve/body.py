"""Bodies of requests: read within limits of size and time, checked against a model.

Knows HTTP, but no API.
"""

import asyncio
from typing import Any, Final

from starlette.requests import ClientDisconnect, Request

from draftree.serve.log import log_event
from draftree.serve.service import Service
from draftree.serve.wire import ApiError, Body, WireModel, find_ignored, parse_body

_READ_S: Final = 60.0
_LARGE: Final = 2**18  # bytes that are parsed beside the event loop
_MIB: Final = 2**20


async def read_body(
    request: Request, service: Service, model: type[Body], *, takes_any_kind: bool = False
) -> Body:
    """The body, with the name of the model that answers. takes_any_kind: it need not be called JSON
    where no page of a browser can have sent it.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = kind == "application/json" or kind.endswith("+json")
    if not is_json and not (takes_any_kind and "origin" not in request.headers):
        sentence = "The body must be JSON, sent with the header `Content-Type: application/json`."
        raise ApiError(415, sentence, code="unsupported_media_type")
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        sentence = f"The body is encoded as {coding!r}; send it without Content-Encoding."
        raise ApiError(415, sentence, code="unsupported_content_encoding")
    raw = await _read(request, service)
    body = (
        await asyncio.to_thread(parse_body, model, raw)
        if len(raw) > _LARGE
        else parse_body(model, raw)
    )
    if service.options.log_prompts:
        log_event("prompt", id=request.state.request_id, body=raw.decode("utf-8", "replace"))
    ignored = request.state.ignored
    ignored += find_ignored(body)
    asked = getattr(body, "model", None)
    name = service.choose_model(asked)
    if name == asked:
        return body
    if asked:
        ignored.append("model")
    return body.model_copy(update={"model": name})


async def _read(request: Request, service: Service) -> bytes:
    """All of the body. What is refused is read as well, though not kept, since few clients look
    at a reply before they have sent everything.
    """
    limit = service.options.max_body_bytes
    too_long = ApiError(
        413, f"The body is longer than {limit / _MIB:.6g} MiB.", code="request_too_large"
    )
    length = request.headers.get("content-length", "")
    problem = too_long if length.isdecimal() and int(length) > limit else None
    if problem is not None and request.headers.get("expect", "").lower() == "100-continue":
        raise problem
    pieces: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(_READ_S):
            async for piece in request.stream():
                num_bytes += len(piece)
                problem = problem or _hold(request, service, len(piece))
                problem = problem or (too_long if num_bytes > limit else None)
                if problem is None:
                    pieces.append(piece)
                else:
                    pieces.clear()
                    _release(request, service)
                if num_bytes > 4 * limit:
                    break
    except TimeoutError:
        sentence = f"The body did not arrive within {_READ_S:.0f} seconds."
        raise ApiError(408, sentence, code="request_timeout") from None
    except ClientDisconnect:
        raise ApiError(499, "The client left.", code="client_closed_request") from None
    if problem is not None:
        raise problem
    return b"".join(pieces)


def _hold(request: Request, service: Service, num_bytes: int) -> ApiError | None:
    """Why these bytes cannot be kept, if they cannot; otherwise they are until the request ends."""
    try:
        service.bodies.hold(request.state.client, num_bytes)
    except ApiError as error:
        return error
    request.state.body_bytes += num_bytes
    return None


def _release(request: Request, service: Service) -> None:
    service.bodies.release(request.state.client, request.state.body_bytes)
    request.state.body_bytes = 0


def describe_body(model: type[WireModel]) -> dict[str, Any]:
    """For a route's OpenAPI entry."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
