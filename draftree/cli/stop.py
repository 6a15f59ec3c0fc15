"""`draftree stop`: end servers that run in the background."""

import sys
from typing import Annotated

import typer

from draftree.errors import ServeError


def stop(
    port: Annotated[
        int | None, typer.Option(help="The server's port, where several run.", show_default=False)
    ] = None,
    use_all: Annotated[bool, typer.Option("--all", help="Stop every server.")] = False,
) -> None:
    """Stop a server that was started with --daemon."""
    from draftree.cli.daemon import find_servers, stop_server

    running = find_servers()
    chosen = [server for server in running if port is None or server.port == port]
    if not chosen:
        where = "" if port is None else f" on port {port}"
        raise ServeError(f"No server runs in the background{where}.")
    if len(chosen) > 1 and not use_all:
        ports = ", ".join(str(server.port) for server in chosen)
        raise ServeError(f"Servers run on the ports {ports}; name one with --port, or use --all.")
    for server in chosen:
        stop_server(server)
        print(f"stopped {server.url} ({server.model})", file=sys.stderr)
