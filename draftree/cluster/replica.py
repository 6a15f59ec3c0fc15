"""One replica: the whole server of `draftree serve`, but for its socket.

In: requests that the ingress relays. Out: what the application sends, piece by piece, on a
connection of the request's own. Knows nothing of Ray, nor of other replicas.
"""

import asyncio
import fcntl
import gc
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.types import Message, Scope

from draftree.cluster.connection import ReplyAddress, ReplyConnection, connect
from draftree.cluster.message import Relayed, Report
from draftree.errors import ServeError
from draftree.serve.app import build_app
from draftree.serve.service import ServeOptions, Service
from draftree.serve.thread import State
from draftree.serve.wire import IDENTITY, OUTLET

if TYPE_CHECKING:
    from draftree.chat import Engine


class Replica:
    """Ready when it has been made, or the reason why not is raised."""

    def __init__(
        self, name: str, open_engine: "Callable[[], Engine]", options: ServeOptions
    ) -> None:
        self.name = name
        self._changed = threading.Event()
        self._service = Service(open_engine, options, lambda state: self._changed.set())
        self._app = build_app(self._service)
        self._running: set[asyncio.Task[None]] = set()  # nobody else holds them
        self._service.thread.start()
        self._changed.wait()
        self.check_health()
        gc.collect()
        gc.freeze()  # or every collection would look at all of the engine

    def check_health(self) -> None:
        if self._service.state is State.FAILED:
            raise self._service.thread.failure or ServeError("The engine failed.")

    async def report(self) -> Report:
        service = self._service
        waiting, running = service.queue.num_waiting, service.num_running
        metrics = service.metrics.render(waiting, running, len(service.thread.turns.preempted))
        health = {"name": self.name, "pid": os.getpid(), "queue": waiting, "running": running}
        return Report(self.name, metrics, health)

    async def relay(self, request: Relayed, address: ReplyAddress) -> None:
        """Answer on a connection to this address; until that is over the request counts as one that
        runs. Raises what the application raises.
        """
        async with connect(address, self.name) as connection:
            exchange = Exchange(request, connection)
            answering = asyncio.create_task(
                self._app(exchange.scope, exchange.receive, exchange.send)
            )
            self._running.add(answering)
            answering.add_done_callback(self._running.discard)
            await asyncio.shield(answering)


class Exchange:
    """A request as the application sees it: ASGI's scope, receive and send, and an Outlet."""

    def __init__(self, request: Relayed, connection: ReplyConnection) -> None:
        self._request, self._connection = request, connection
        self._is_read = False

    @property
    def scope(self) -> Scope:
        request = self._request
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": request.method,
            "path": request.path,
            "raw_path": request.raw_path,
            "query_string": request.query,
            "root_path": "",
            "headers": list(request.headers),
            "client": request.client,
            "server": None,
            "extensions": {OUTLET: self, IDENTITY: request.identity},
        }

    async def receive(self) -> Message:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        await self._connection.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._connection.write_head((message["status"], message["headers"]))
            return
        self.write_piece(message.get("body", b""))
        if not message.get("more_body", False):
            self._connection.write(b"")  # the end
        await self._connection.drain()

    @property
    def is_free(self) -> bool:
        return self._connection.is_free

    def write_piece(self, data: bytes) -> None:
        if data:  # an empty frame would be the end
            self._connection.write(data)


@contextmanager
def after_the_first(what: str) -> Iterator[None]:
    """Of all processes of this machine, the first one downloads files and compiles kernels; the
    others wait for that, then go on together.
    """
    name = hashlib.sha256(f"{Path.home()} {what}".encode()).hexdigest()[:16]
    with (Path(tempfile.gettempdir()) / f"draftree-{name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield
