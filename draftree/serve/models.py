"""What the server has to offer: its model, as the lists of OpenAI, Anthropic and Codex show it."""

from datetime import UTC, datetime
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request

from draftree.serve.service import Service

MODELS: Final = ()
_INSTRUCTIONS: Final = (
    "You are a coding agent in a terminal. Use your tools to read, run and change files, and "
    "answer briefly when the task is done."
)
_TOOL_BYTES: Final = 10_000  # of a tool's output, which Codex then shortens


def make_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models(request: Request) -> dict[str, Any]:
        """Anthropic's clients are known by a header, and Codex by what it asks."""
        names = (service.options.model_id, *service.options.aliases)
        entries = [_describe(request, service, name) for name in names]
        if _is_anthropic(request):
            ends = {"first_id": names[0], "last_id": names[-1]}
            return {"data": entries, "has_more": False, **ends}
        found: dict[str, Any] = {"object": "list", "data": entries}
        if "client_version" in request.query_params:
            found["models"] = [_describe_for_codex(service, name) for name in names]
        return found

    @router.get("/v1/models/{name:path}")
    async def show_model(request: Request, name: str) -> dict[str, Any]:
        service.check_model(name)
        return _describe(request, service, name)

    return router


def _is_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def _describe(request: Request, service: Service, name: str) -> dict[str, Any]:
    length = service.context_length
    if _is_anthropic(request):
        created = datetime.fromtimestamp(service.created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        names = {"type": "model", "id": name, "display_name": name, "created_at": created}
        return {**names, "max_input_tokens": length, "max_tokens": length}
    names = {"id": name, "object": "model", "owned_by": "draftree"}
    return {**names, "created": service.created_s, "context_length": length}


def _describe_for_codex(service: Service, name: str) -> dict[str, Any]:
    """Without it Codex knows nothing of the model, nor how long its context is."""
    return {
        "slug": name,
        "display_name": name,
        "description": None,
        "base_instructions": _INSTRUCTIONS,
        "supported_reasoning_levels": [],
        "shell_type": "default",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "support_verbosity": False,
        "apply_patch_tool_type": None,
        "truncation_policy": {"mode": "bytes", "limit": _TOOL_BYTES},
        "context_window": service.context_length,
        "max_context_window": service.context_length,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
    }
