"""The page at `/`: its files, and what it has to know of the engine.

In: a Service. Out: routes. The files need no key, since browsers send none for them; all that the
page then asks for does.
"""

import hashlib
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from draftree.serve.service import Service
from draftree.serve.wire import WireModel

MODELS: Final[tuple[type[WireModel], ...]] = ()
INDEX: Final = "index.html"
_FOLDER: Final = Path(__file__).with_name("page")
_KINDS: Final = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
FILES: Final = tuple(
    sorted(
        file.relative_to(_FOLDER).as_posix() for file in _FOLDER.rglob("*") if file.suffix in _KINDS
    )
)
PATHS: Final = ("/", *(f"/page/{name}" for name in FILES if name != INDEX))
HEADERS: Final = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def make_routes(service: Service) -> APIRouter:
    router = APIRouter()
    for name in FILES:
        path = "/" if name == INDEX else f"/page/{name}"
        router.add_api_route(path, _File(name), include_in_schema=False)

    @router.get("/v1/draftree/engine")
    async def show_engine() -> dict[str, Any]:
        engine = service.check_ready()
        return {
            "model": service.options.model_id,
            "version": service.options.version,
            "temperature": service.options.temperature,
            "can_think": engine.can_think,
            "has_draft": engine.tokens.drafter is not None,
            "budget": engine.tokens.config.budget,
            "max_budget": engine.plan.max_nodes - 1,
            "max_ctx": engine.plan.max_ctx,
        }

    return router


class _File:
    """Answers with one file of the page, read when the server starts, unless the browser has it."""

    def __init__(self, name: str) -> None:
        self._content = (_FOLDER / name).read_bytes()
        self._kind = _KINDS[Path(name).suffix]
        digest = hashlib.sha256(self._content).hexdigest()
        self._headers = {**HEADERS, "etag": f'"{digest[:32]}"'}

    async def __call__(self, request: Request) -> Response:
        if request.headers.get("if-none-match") == self._headers["etag"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, media_type=self._kind, headers=self._headers)
