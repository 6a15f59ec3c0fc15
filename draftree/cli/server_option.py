"""The options that `serve` and `cluster` share, and what both say when they are ready.

In: what the user typed. Out: checked values, and sentences. Knows no server.
"""

from pathlib import Path
from typing import Annotated, Any

import typer


def server_option(help_text: str, *names: str, **details: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel="Server", **details)


def _several(help_text: str) -> Any:
    return server_option(f"{help_text}; may be given several times.", show_default=False)


Host = Annotated[str, server_option("Address to listen on; 0.0.0.0 for all.")]
ApiKeys = Annotated[list[str] | None, _several("Key that clients must send, or DRAFTREE_API_KEY")]
AllowedHosts = Annotated[
    list[str] | None, _several("Name that clients may call the server by, or *")
]
Aliases = Annotated[list[str] | None, _several("Another name for the model")]
AnyModel = Annotated[
    bool, server_option("Answer requests for any other model, too; otherwise they are a 404.")
]
Origins = Annotated[list[str] | None, _several("Origin whose pages may connect, or *")]
Proxies = Annotated[
    list[str] | None, _several("Address of a proxy whose X-Forwarded-For names the client, or *")
]
Temperature = Annotated[float, server_option("For requests that give none.", min=0.0, max=2.0)]
QueueLen = Annotated[int, server_option("Most requests at a time, waiting or running.", min=1)]
QueuePerClient = Annotated[int, server_option("Of those, most of one client.", min=1)]
Parallel = Annotated[
    int, server_option("Requests that take turns; 0 is 4, or what memory allows.", min=0, max=256)
]


def check_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    if not all(key.strip() for key in keys):
        raise typer.BadParameter(
            "the API key is empty; leave --api-key out if there is to be none."
        )
    return keys


def name_of(model: str) -> str:
    """What clients call a model by."""
    return Path(model).stem if model.endswith(".gguf") else model


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
