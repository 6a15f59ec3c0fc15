"""The options that `serve` and `cluster` share, and what both say when they are ready.

In: what the user typed. Out: checked values, and sentences. Knows no server.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from draftree import __version__, env

_ANY: Final = ("0.0.0.0", "::")


def server_option(help_text: str, *names: str, **details: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel="Server", **details)


def _several(help_text: str) -> Any:
    return server_option(f"{help_text}; may be given several times.", show_default=False)


Several = list[str] | None


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    host: Annotated[str, server_option("Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    api_key: Annotated[Several, _several("Key that clients must send, or DRAFTREE_API_KEY")] = None
    allowed_host: Annotated[Several, _several("Name that clients may call the server by, or *")] = (
        None
    )
    alias: Annotated[Several, _several("Another name for the model")] = None
    cors: Annotated[Several, _several("Origin whose pages may connect, or *")] = None
    trust_proxy: Annotated[
        Several, _several("Address of a proxy whose X-Forwarded-For names the client, or *")
    ] = None
    temperature: Annotated[
        float, server_option("Of requests that name none.", min=0.0, max=2.0)
    ] = 1.0
    parallel: Annotated[
        int,
        server_option(
            "Most requests in progress at a time; 0 is 8, or what memory allows.", min=0, max=256
        ),
    ] = 0
    batching: Annotated[
        Literal["auto", "always", "off"],
        server_option(
            "Compute a token of several requests in one pass: where that gives more tokens a "
            "second, always, or never."
        ),
    ] = "auto"
    queue: Annotated[int, server_option("Most requests at a time, waiting or running.", min=1)] = (
        256
    )
    queue_per_client: Annotated[int, server_option("Of those, most of one client.", min=1)] = 64
    tls_cert: Annotated[
        str | None, server_option("Certificate in PEM form, for https.", show_default=False)
    ] = None
    tls_key: Annotated[
        str | None, server_option("Its key, unless the same file has it.", show_default=False)
    ] = None

    def engine_fields(self) -> dict[str, Any]:
        """Those of EngineConfig that were given."""
        parallel = {"parallel": self.parallel} if self.parallel else {}
        return parallel | ({"batching": self.batching} if self.batching != "auto" else {})

    def serve_fields(self, model: str) -> dict[str, Any]:
        """Fields of ServeOptions, for a model of that name or path."""
        keys = tuple(self.api_key or env.api_keys())
        if not all(key.strip() for key in keys):
            raise typer.BadParameter(
                "the API key is empty; leave --api-key out if there is to be none."
            )
        self._check_tls()
        return {
            "model_id": Path(model).stem if model.endswith(".gguf") else model,
            "version": __version__,
            "aliases": tuple(self.alias or ()),
            "api_keys": keys,
            "allowed_hosts": (self.host, *(self.allowed_host or ())),
            "cors_origins": tuple(self.cors or ()),
            "trusted_proxies": tuple(self.trust_proxy or ()),
            "temperature": self.temperature,
            "max_queue": self.queue,
            "max_per_client": self.queue_per_client,
            "tls_cert": self.tls_cert,
            "tls_key": self.tls_key,
        }

    def _check_tls(self) -> None:
        from draftree.serve.server import check_tls

        if self.tls_key is not None and self.tls_cert is None:
            raise typer.BadParameter("--tls-key needs --tls-cert.")
        if self.tls_cert is not None:
            check_tls(self.tls_cert, self.tls_key)


def server_url(host: str, port: int, *, is_secure: bool) -> str:
    """Where somebody on this machine finds a server that listens there."""
    host = "127.0.0.1" if host in _ANY else f"[{host}]" if ":" in host else host
    return f"{'https' if is_secure else 'http'}://{host}:{port}"


def describe_server(url: str, model: str, has_keys: bool) -> str:
    """How to ask it."""
    key = "the API key" if has_keys else "anything"
    header = " -H 'Authorization: Bearer KEY'" if has_keys else ""
    message = '{"role": "user", "content": "Hello"}'
    return (
        f"{model} is ready at {url}\n"
        f"  OpenAI clients: base URL {url}/v1, key {key}, model {model}\n"
        f"  Anthropic's and Ollama's: {url}\n"
        f"  try: curl {url}/v1/chat/completions{header} -H 'Content-Type: application/json' \\\n"
        f"""    -d '{{"model": "{model}", "messages": [{message}]}}'"""
    )
