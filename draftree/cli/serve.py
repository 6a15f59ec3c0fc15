"""`draftree serve`: an HTTP server that speaks the protocols of OpenAI's clients.

Where to connect goes to stderr, and so do the logs, one JSON object a line.
"""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from draftree import __version__, env
from draftree.cli.option import Model, Settings, with_settings

if TYPE_CHECKING:
    import socket

    from draftree.chat import Engine
    from draftree.serve.service import ServeOptions

_LOCAL: Final = ("127.0.0.1", "::1", "localhost")
_ANY: Final = ("0.0.0.0", "::")


def _server(help_text: str, *names: str, **details: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel="Server", **details)


def several_option(help_text: str) -> Any:
    return _server(f"{help_text}; may be given several times.", show_default=False)


@functools.partial(with_settings, is_engine_only=True)
def serve(
    settings: Settings,
    model: Model = None,
    host: Annotated[str, _server("Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, _server("0 takes a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        list[str] | None, several_option("Key that clients must send, or DRAFTREE_API_KEY")
    ] = None,
    allowed_host: Annotated[
        list[str] | None, several_option("Name that clients may call the server by, or *")
    ] = None,
    alias: Annotated[list[str] | None, several_option("Another name for the model")] = None,
    temperature: Annotated[float, _server("For requests that give none.", min=0.0, max=2.0)] = 1.0,
    cors: Annotated[
        list[str] | None, several_option("Origin whose pages may connect, or *")
    ] = None,
    parallel: Annotated[
        int, _server("Requests that take turns; 0 is 4, or what memory allows.", min=0, max=256)
    ] = 0,
    queue: Annotated[int, _server("Most requests at a time, waiting or running.", min=1)] = 256,
    queue_per_client: Annotated[int, _server("Of those, most of one client.", min=1)] = 64,
    max_body: Annotated[int, _server("Longest request, in MiB.", min=1)] = 32,
    grace: Annotated[
        float, _server("Seconds that a reply may go on when the server is stopped.", min=0.0)
    ] = 10.0,
    read_ahead: Annotated[bool, _server("When idle, read replies as they will come back.")] = True,
    log_prompts: Annotated[
        bool, _server("Write requests to the log, with their text.", "--log-prompts")
    ] = False,
    trust_proxy: Annotated[
        list[str] | None,
        several_option("Address of a proxy whose X-Forwarded-For names the client, or *"),
    ] = None,
    daemon: Annotated[
        bool, _server("Go on in the background; `draftree stop` ends it.", "--daemon")
    ] = False,
) -> None:
    """Serve a model over HTTP."""
    name = settings.choose_model(model)
    settings.read_config()
    api_keys = check_keys(tuple(api_key or ()) or env.api_keys())
    from draftree.serve.server import bind
    from draftree.serve.service import ServeOptions

    options = ServeOptions(
        model_id=Path(name).stem if name.endswith(".gguf") else name,
        version=__version__,
        aliases=tuple(alias or ()),
        api_keys=api_keys,
        allowed_hosts=(host, *(allowed_host or ())),
        cors_origins=tuple(cors or ()),
        temperature=temperature,
        max_queue=queue,
        max_per_client=queue_per_client,
        max_body_bytes=max_body * 2**20,
        grace_s=grace,
        log_prompts=log_prompts,
        read_ahead=read_ahead,
        trusted_proxies=tuple(trust_proxy or ()),
    )
    listener = bind(host, port)
    open_engine = functools.partial(settings.open_engine, name, parallel=parallel)
    if daemon:
        _serve_in_background(open_engine, options, listener)
    else:
        print(f"loading {name}", file=sys.stderr)
        _serve(open_engine, options, listener)


def check_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    if not all(key.strip() for key in keys):
        raise typer.BadParameter(
            "the API key is empty; leave --api-key out if there is to be none."
        )
    return keys


def _serve(
    open_engine: "Callable[[], Engine]", options: "ServeOptions", listener: "socket.socket"
) -> None:
    from draftree.serve.server import serve

    url = _url(listener)
    host = listener.getsockname()[0]
    if host not in _LOCAL and not options.api_keys:
        print(f"anyone who can reach {host} may use this server: no --api-key", file=sys.stderr)
    serve(
        open_engine,
        options,
        listener,
        on_ready=lambda: print(_describe(url, options), file=sys.stderr, flush=True),
    )


def _serve_in_background(
    open_engine: "Callable[[], Engine]", options: "ServeOptions", listener: "socket.socket"
) -> None:
    from draftree.cli.daemon import Background, detach, pid_file, server_folder

    port = listener.getsockname()[1]
    log_path = server_folder() / f"{port}.log"
    report = detach(log_path)
    if report is None:
        print(_describe(_url(listener), options), file=sys.stderr)
        print(f"log: {log_path}; `draftree stop --port {port}` ends it", file=sys.stderr)
        return
    from draftree.serve.server import serve

    server = Background(os.getpid(), port, _url(listener), options.model_id, str(log_path))
    try:
        with pid_file(server):
            serve(open_engine, options, listener, on_ready=lambda: report("ready"))
    except Exception as error:
        report(str(error))
        raise


def _url(listener: "socket.socket") -> str:
    host, port = listener.getsockname()[:2]
    host = "127.0.0.1" if host in _ANY else host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _describe(url: str, options: "ServeOptions") -> str:
    return describe_server(url, options.model_id, bool(options.api_keys))


def describe_server(url: str, model: str, has_keys: bool) -> str:
    """How to ask it."""
    key = "the API key" if has_keys else "anything"
    header = " -H 'Authorization: Bearer KEY'" if has_keys else ""
    message = '{"role": "user", "content": "Hello"}'
    return (
        f"{model} is ready at {url}\n"
        f"  OpenAI clients: base URL {url}/v1, key {key}, model {model}\n"
        f"  try: curl {url}/v1/chat/completions{header} -H 'Content-Type: application/json' \\\n"
        f"""    -d '{{"model": "{model}", "messages": [{message}]}}'"""
    )
