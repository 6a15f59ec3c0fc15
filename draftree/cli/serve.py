"""`draftree serve`: an HTTP server that speaks the protocols of common clients.

Where to connect goes to stderr, and so do the logs, one JSON object a line.
"""

import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Final

from draftree.cli.option import Model, Settings, with_settings
from draftree.cli.server_option import (
    ServerSettings,
    describe_server,
    server_option,
    server_url,
)

if TYPE_CHECKING:
    import socket

    from draftree.chat import Engine
    from draftree.serve.service import ServeOptions

_LOCAL: Final = ("127.0.0.1", "::1", "localhost")


AnyModel = Annotated[
    bool, server_option("Answer requests for any other model, too; otherwise they are a 404.")
]
Grace = Annotated[
    float, server_option("Seconds that a reply may go on when the server is stopped.", min=0.0)
]
LogPrompts = Annotated[
    bool, server_option("Write requests to the log, with their text.", "--log-prompts")
]
Daemon = Annotated[
    bool, server_option("Go on in the background; `draftree stop` ends it.", "--daemon")
]


@functools.partial(with_settings, is_engine_only=True)
def serve(
    settings: Settings,
    server: ServerSettings,
    model: Model = None,
    port: Annotated[
        int, server_option("Port to listen on; 0 takes a free one.", min=0, max=65535)
    ] = 8000,
    any_model: AnyModel = True,
    max_body: Annotated[int, server_option("Longest request, in MiB.", min=1)] = 32,
    grace: Grace = 10.0,
    read_ahead: Annotated[
        bool,
        server_option("When idle, prefill the last reply as the next request will contain it."),
    ] = True,
    log_prompts: LogPrompts = False,
    daemon: Daemon = False,
) -> None:
    """Serve a model over HTTP."""
    name = settings.choose_model(model)
    settings.read_config()
    shared = server.serve_fields(name)
    from draftree.serve.server import bind
    from draftree.serve.service import ServeOptions

    options = ServeOptions(
        **shared,
        max_body_bytes=max_body * 2**20,
        grace_s=grace,
        log_prompts=log_prompts,
        read_ahead=read_ahead,
        any_model=any_model,
    )
    listener = bind(server.host, port)
    open_engine = functools.partial(
        settings.open_engine, name, warm_up=True, **server.engine_fields()
    )
    if daemon:
        _serve_in_background(open_engine, options, listener)
    else:
        print(f"loading {name}", file=sys.stderr)
        _serve(open_engine, options, listener)


def _serve(
    open_engine: "Callable[[], Engine]", options: "ServeOptions", listener: "socket.socket"
) -> None:
    from draftree.serve.server import serve

    url = _url(listener, options)
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
        print(_describe(_url(listener, options), options), file=sys.stderr)
        print(f"log: {log_path}; `draftree stop --port {port}` ends it", file=sys.stderr)
        return
    from draftree.serve.server import serve

    server = Background(os.getpid(), port, _url(listener, options), options.model_id, str(log_path))
    try:
        with pid_file(server):
            serve(open_engine, options, listener, on_ready=lambda: report("ready"))
    except Exception as error:
        report(str(error))
        raise


def _url(listener: "socket.socket", options: "ServeOptions") -> str:
    host, port = listener.getsockname()[:2]
    return server_url(host, port, is_secure=options.tls_cert is not None)


def _describe(url: str, options: "ServeOptions") -> str:
    return describe_server(url, options.model_id, bool(options.api_keys))
