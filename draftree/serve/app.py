"""The application: routes of every API, and what all requests pass through on their way.

In: a Service. Out: an ASGI application with /health, /metrics and the APIs. Who asks, how errors
look, what is counted and logged is decided here and nowhere else.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, Final

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftree.serve import (
    anthropic,
    anthropic_reply,
    embeddings,
    models,
    ollama,
    ollama_reply,
    openai,
    page,
    responses,
    tokens,
)
from draftree.serve.access import client_name
from draftree.serve.cors import Cors
from draftree.serve.identity import Identity
from draftree.serve.log import log_event
from draftree.serve.openai_reply import render_error
from draftree.serve.service import Service
from draftree.serve.thread import State
from draftree.serve.wire import CROWDED, IDENTITY, ApiError, busy, schema_of

APIS: Final = (models, openai, responses, anthropic, embeddings, ollama, tokens, page)
# Where errors are not written as OpenAI does: the beginning of a path, and how.
ERROR_STYLES: Final[tuple[tuple[str, Callable[[ApiError], dict[str, Any]]], ...]] = (
    ("/v1/messages", anthropic_reply.render_error),
    ("/api/", ollama_reply.render_error),
)
OPEN_PATHS: Final = ("/health", *page.PATHS)
_ERRORS: Final = {
    400: "A field is unknown, refused or out of range; the error names it.",
    401: "The API key is missing or wrong.",
    403: "The server was asked for by a name that is not its own.",
    404: "There is no such model.",
    408: "The body took too long to arrive.",
    413: "The body is too long.",
    415: "The body is not JSON, or encoded.",
    429: "The client has too many requests here already; Retry-After says when to come back.",
    503: "The server is full, or the model is being loaded; Retry-After says when to come back.",
}
_QUIET_ROUTES: Final = ("/health", "/metrics")  # asked every few seconds by machines
_CLIENT_LEFT: Final = 499
_CROWD_RETRY_S: Final = 5
_ID_HEADERS: Final = ("x-request-id", "request-id")  # where OpenAI's and Anthropic's clients look
_IGNORED_HEADER: Final = "x-draftree-ignored"  # names fields that were taken without effect
_VERSION: Final = "/v1"
_VERSIONED: Final = ("/models", "/chat/", "/completions", "/responses", "/messages", "/embeddings")
_log: Final = logging.getLogger("draftree")


def build_app(service: Service) -> FastAPI:
    app = FastAPI(
        title="draftree",
        version=service.options.version,
        docs_url=None,
        redoc_url=None,
        responses={status: {"description": words} for status, words in _ERRORS.items()},
        exception_handlers={ApiError: _on_api_error, HTTPException: _on_http_error},
    )
    _add_own_routes(app, service)
    for api in APIS:
        app.include_router(api.make_routes(service))
    app.add_middleware(Gate, service=service)
    if service.options.cors_origins:
        app.add_middleware(
            Cors,
            allow_origins=service.options.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[*_ID_HEADERS, _IGNORED_HEADER, "retry-after"],
        )
    _describe_bodies(app)
    return app


def find_path(path: str) -> str:
    """Paths of OpenAI's and Anthropic's APIs may lack their version, or have it twice: clients add
    it to the address that they are given, or they do not.
    """
    rest = path.removeprefix(_VERSION).removeprefix(_VERSION)
    return f"{_VERSION}{rest}" if rest.startswith(_VERSIONED) else path


def _add_own_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        is_ready = service.state is State.READY
        content = {
            "status": "ok" if is_ready else str(service.state),
            "model": service.options.model_id,
            "queue": service.queue.num_waiting,
            "running": service.num_running,
        }
        return JSONResponse(content, 200 if is_ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        num_preempted, num_waiting = len(service.thread.turns.preempted), service.queue.num_waiting
        wait_s = service.queue.expect_wait(num_waiting)
        text = service.metrics.render(num_waiting, service.num_running, num_preempted, wait_s)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


class Gate:
    """Every request: its id and client, its key, its place in the metrics and the log."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start_s = time.perf_counter()
        identity = scope.get("extensions", {}).get(IDENTITY) or Identity.new()
        request_id = f"req_{identity.token}"
        status = _CLIENT_LEFT

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.update(dict.fromkeys(_ID_HEADERS, request_id))
                if state["ignored"]:
                    headers[_IGNORED_HEADER] = ", ".join(state["ignored"])
            await send(message)

        state = scope.setdefault("state", {})
        state.update(identity=identity, request_id=request_id, body_bytes=0, ignored=[])
        scope["path"] = find_path(scope["path"])
        # The server leaves the bodies of replies to HEAD out by itself.
        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        try:
            self._admit(scope, state)
            await self._app(inner, receive, note)
        except ApiError as error:
            await _error_response(scope["path"], error)(scope, receive, note)
        except Exception:
            _log.exception("internal error", extra={"fields": {"id": request_id}})
            if status == _CLIENT_LEFT:
                bug = ApiError(500, "Internal error.", kind="server_error")
                await _error_response(scope["path"], bug)(scope, receive, note)
        finally:
            self._service.bodies.release(state["client"], state["body_bytes"])
            scope["route"] = inner.get("route")
            self._count(scope, status, time.perf_counter() - start_s)

    def _admit(self, scope: Scope, state: dict[str, Any]) -> None:
        address = scope["client"][0] if scope.get("client") else None
        headers = Headers(scope=scope)
        key_index = self._service.keys.find(headers)
        state["client"] = client_name(-1 if key_index is None else key_index, address)
        if scope.get("extensions", {}).get(CROWDED) and scope["path"] != "/health":
            raise busy(503, "There are too many connections.", _CROWD_RETRY_S)
        host = headers.get("host", "")
        if not self._service.hosts.knows(host):
            sentence = f"This server is not known as {host!r}; start it with --allowed-host NAME."
            raise ApiError(403, sentence, kind="permission_error", code="unknown_host")
        if key_index is None and scope["path"] not in OPEN_PATHS:
            sentence = "The API key is missing or wrong; send it as `Authorization: Bearer KEY`."
            raise ApiError(401, sentence, kind="authentication_error", code="invalid_api_key")

    def _count(self, scope: Scope, status: int, duration_s: float) -> None:
        state = scope["state"]
        status = _CLIENT_LEFT if state.get("has_left") else status
        route = getattr(scope.get("route"), "path", "other")
        self._service.metrics.count_request(route, status, duration_s)
        if route in _QUIET_ROUTES and status == 200:
            return
        log_event(
            "request",
            id=state["request_id"],
            client=state.get("client"),
            method=scope["method"],
            route=route,
            status=status,
            ms=round(1000 * duration_s, 1),
            **({"user": state["user"]} if state.get("user") else {}),
        )


def _error_response(path: str, error: ApiError) -> JSONResponse:
    # Frames that an error was raised in hold it, and with it the body, until garbage is collected.
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return JSONResponse(error_content(path, error), error.status, error.headers)


def error_content(path: str, error: ApiError) -> dict[str, Any]:
    """In the words of the API that the path belongs to."""
    write = next((style for start, style in ERROR_STYLES if path.startswith(start)), render_error)
    return write(error)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(request.url.path, error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods. Where requests are posted there is nothing to get: 404."""
    assert isinstance(error, HTTPException)
    sentence = f"{error.detail}: {request.method} {request.url.path}."
    status = 404 if (error.status_code, request.method) == (405, "GET") else error.status_code
    response = _error_response(request.url.path, ApiError(status, sentence))
    response.headers.update(error.headers or {})
    return response


def _describe_bodies(app: FastAPI) -> None:
    """Bodies are checked by our own hand, so FastAPI has to be told what they look like."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = make()
            models = (model for api in APIS for model in api.MODELS)
            schema.setdefault("components", {}).setdefault("schemas", {}).update(schema_of(models))
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
