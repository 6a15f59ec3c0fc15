"""Bodies of requests: read within limits of size and time, checked against a model.

Knows HTTP, but no API.
"""

import asyncio
from typing import Any, Final

from starlette.requests import ClientDisconnect, Request

from draftree.serve.log import log_event
from draftree.serve.service import Service
from draftree.serve.wire import ApiError, Body, WireModel, parse_body

_READ_S: Final = 60.0
_LARGE: Final = 2**18  # bytes that are parsed beside the event loop
_MIB: Final = 2**20


async def read_body(request: Request, service: Service, model: type[Body]) -> Body:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        sentence = "The body must be JSON, sent with the header `Content-Type: application/json`."
        raise ApiError(415, sentence, code="unsupported_media_type")
    raw = await _read(request, service.options.max_body_bytes)
    body = (
        await asyncio.to_thread(parse_body, model, raw)
        if len(raw) > _LARGE
        else parse_body(model, raw)
    )
    if service.options.log_prompts:
        log_event("prompt", id=request.state.request_id, body=raw.decode("utf-8", "replace"))
    return body


async def _read(request: Request, limit: int) -> bytes:
    """All of the body. What is too long is read as well, though not kept, since few clients look
    at a reply before they have sent everything.
    """
    too_long = ApiError(
        413,
        f"The body is longer than {limit / _MIB:.6g} MiB.",
        code="request_too_large",
    )
    length = request.headers.get("content-length", "")
    is_too_long = length.isdecimal() and int(length) > limit
    if is_too_long and request.headers.get("expect", "").lower() == "100-continue":
        raise too_long
    pieces: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(_READ_S):
            async for piece in request.stream():
                num_bytes += len(piece)
                is_too_long = is_too_long or num_bytes > limit
                if is_too_long:
                    pieces.clear()
                else:
                    pieces.append(piece)
                if num_bytes > 4 * limit:
                    break
    except TimeoutError:
        sentence = f"The body did not arrive within {_READ_S:.0f} seconds."
        raise ApiError(408, sentence, code="request_timeout") from None
    except ClientDisconnect:
        raise ApiError(499, "The client left.", code="client_closed_request") from None
    if is_too_long:
        raise too_long
    return b"".join(pieces)


def describe_body(model: type[WireModel]) -> dict[str, Any]:
    """For a route's OpenAPI entry."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
