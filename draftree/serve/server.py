"""A server's life: listen, load the model, serve, and end in an orderly way.

In: how to open the engine, options, a bound socket. It listens while the model is loaded, and says
503 until then: a supervisor sees a server that starts, and the same holds when an engine that
failed is opened again.
"""

import gc
import logging
import signal
import socket
import ssl
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Final

import uvicorn
from starlette.types import ASGIApp

from draftree.errors import ServeError
from draftree.serve.app import build_app
from draftree.serve.connection import Connection
from draftree.serve.log import log_event, set_up_logs
from draftree.serve.service import ServeOptions, Service
from draftree.serve.thread import State

if TYPE_CHECKING:
    from draftree.chat import Engine

_KEEP_ALIVE_S: Final = 60
_MOMENT_S: Final = 0.005
_LAST_WORDS_S: Final = 3  # to send the final events after the grace


class Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.signal: int | None = None
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End in an orderly way; a second Ctrl-C ends at once."""
        self.force_exit = self.signal is not None and sig == signal.SIGINT
        if self.force_exit:  # requests are broken off, which uvicorn would show tracebacks of
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)
        self.signal, self.should_exit = sig, True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.begin_stop()
        await super().shutdown(sockets)


def bind(host: str, port: int) -> socket.socket:
    """A socket that clients cannot reach yet, but that nobody else can take."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # Where a name has both, most clients expect the older kind of address.
        found.sort(key=lambda entry: entry[0] != socket.AF_INET)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ServeError(
            f"{host}:{port} cannot be listened on: {reason}; choose another --port or --host."
        ) from error
    return listener


def check_tls(cert: str, key: str | None) -> None:
    """Raises unless the files can be used: better now than after the model was loaded."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ServeError(
            f"--tls-cert and --tls-key cannot be used: {reason}; they must be PEM files of one "
            "certificate and its key."
        ) from error


def new_config(app: ASGIApp, options: ServeOptions) -> uvicorn.Config:
    """How connections of any server of ours are handled."""
    return uvicorn.Config(
        app,
        http=Connection,
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        # From anyone else, a header could claim to be anyone, in the queue and in the log.
        proxy_headers=bool(options.trusted_proxies),
        forwarded_allow_ips=list(options.trusted_proxies),
        lifespan="off",
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=round(options.grace_s) + _LAST_WORDS_S,
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
    )


def new_server(service: Service) -> Server:
    return Server(new_config(build_app(service), service.options), service)


def serve(
    open_engine: "Callable[[], Engine]",
    options: ServeOptions,
    listener: socket.socket,
    on_ready: Callable[[], None],
) -> None:
    """Serve until a signal comes. Raises what kept the engine from being opened; KeyboardInterrupt
    after Ctrl-C.
    """
    set_up_logs()

    def on_change(state: State) -> None:
        log_event("state", state=state)
        _tidy_up(state)
        if state is State.READY and not service.thread.num_failures:
            while not (server.started or server.should_exit):  # a small model may be faster
                time.sleep(_MOMENT_S)
            on_ready()
        elif state is State.FAILED:
            server.should_exit = True

    service = Service(open_engine, options, on_change)
    server = new_server(service)
    service.thread.start()
    server.run(sockets=[listener])
    service.queue.close()
    service.thread.join(_LAST_WORDS_S)
    gc.unfreeze()
    if service.thread.failure is not None:
        raise service.thread.failure
    if server.signal == signal.SIGINT:
        raise KeyboardInterrupt


def _tidy_up(state: State) -> None:
    """What a ready engine consists of stays, and need not be looked at again by every collection of
    garbage, which would take longer than a round.
    """
    if state is State.READY:
        gc.collect()
        gc.freeze()
    else:
        gc.unfreeze()
