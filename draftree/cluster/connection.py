"""The connection on which a replica answers: from it to the ingress, past Ray.

The ingress listens, and gives every request a number and a secret; who takes the request connects
with both. After them come frames, each with its length: name, head as JSON, pieces of the body, and
an empty one, without which the reply is not whole. Knows no API and nothing of Ray.
"""

import asyncio
import json
import secrets
import struct
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Final

from draftree.cluster.message import Head, ReplicaLost

_GREETING: Final = struct.Struct(">Q32s")
_LENGTH: Final = struct.Struct(">Q")
_BACKLOG: Final = 1024  # connections that may come at once
_GREETING_S: Final = 10.0
_CODE: Final = "latin-1"  # of headers

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class ReplyAddress:
    """Where the reply to one request goes, and what shows that it is that reply."""

    host: str
    port: int
    number: int
    secret: bytes = field(repr=False)


Call = Callable[[ReplyAddress], Coroutine[Any, Any, None]]


class ReplyServer:
    """The ingress's end. host: the only address that it listens on."""

    def __init__(self, host: str) -> None:
        self._host, self._port = host, 0
        self._numbers = count()
        self._expected: dict[int, tuple[bytes, asyncio.Future[Streams]]] = {}
        self._calls: set[asyncio.Task[None]] = set()  # nobody else holds them

    @asynccontextmanager
    async def listen(self) -> AsyncGenerator[None, None]:
        server = await asyncio.start_server(self._accept, self._host, 0, backlog=_BACKLOG)
        self._port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()

    async def read(self, call: Call) -> AsyncGenerator[Any, None]:
        """What comes after `call` was told the address: name, head, pieces of the body. Raises
        ReplicaLost, and what the call raises; closing it ends both.
        """
        secret = secrets.token_bytes(32)
        address = ReplyAddress(self._host, self._port, next(self._numbers), secret)
        arrival: asyncio.Future[Streams] = asyncio.get_running_loop().create_future()
        self._expected[address.number] = secret, arrival
        calling = asyncio.create_task(call(address))
        self._calls.add(calling)
        calling.add_done_callback(self._calls.discard)
        calling.add_done_callback(partial(_tell_failure, arrival))
        try:
            reader, _ = await arrival
            yield (await _read_frame(reader)).decode()
            yield _load_head(await _read_frame(reader))
            while data := await _read_frame(reader):
                yield data
        except (OSError, asyncio.IncompleteReadError):
            calling.cancel()
            raise ReplicaLost from None
        except BaseException:
            calling.cancel()
            raise
        finally:
            del self._expected[address.number]
            if not arrival.cancelled() and arrival.done() and arrival.exception() is None:
                arrival.result()[1].close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, secret = -1, b""
        with suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
            async with asyncio.timeout(_GREETING_S):
                number, secret = _GREETING.unpack(await reader.readexactly(_GREETING.size))
        expected, arrival = self._expected.get(number, (b"", None))
        is_right = secrets.compare_digest(secret, expected)
        if arrival is None or arrival.done() or not is_right:
            writer.close()
        else:
            arrival.set_result((reader, writer))


def _tell_failure(arrival: asyncio.Future[Streams], calling: asyncio.Task[None]) -> None:
    """A call that ended well has connected; its reply may still be on its way."""
    error = None if calling.cancelled() else calling.exception()
    if not isinstance(error, Exception) or arrival.cancelled():
        return
    if arrival.done():
        arrival.result()[0].set_exception(error)
    else:
        arrival.set_exception(error)


class ReplyConnection:
    """The replica's end, for one request. left: set when nobody reads any more."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.left = asyncio.Event()
        self._writer = writer

    @property
    def is_free(self) -> bool:
        """Whether what was written has left this process."""
        return not self._writer.transport.get_write_buffer_size()

    def write(self, data: bytes) -> None:
        if not self.left.is_set():
            self._writer.write(_LENGTH.pack(len(data)) + data)

    def write_head(self, head: Head) -> None:
        status, headers = head
        pairs = [(name.decode(_CODE), value.decode(_CODE)) for name, value in headers]
        self.write(json.dumps([status, pairs]).encode())

    async def drain(self) -> None:
        with suppress(OSError):
            await self._writer.drain()


@asynccontextmanager
async def connect(address: ReplyAddress, name: str) -> AsyncGenerator[ReplyConnection, None]:
    """Closed at the end, when all has been taken."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(_GREETING.pack(address.number, address.secret))
    connection = ReplyConnection(writer)
    connection.write(name.encode())
    watching = asyncio.create_task(_watch(reader, connection.left))
    try:
        yield connection
    finally:
        connection.left.set()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        watching.cancel()


async def _watch(reader: asyncio.StreamReader, left: asyncio.Event) -> None:
    with suppress(OSError):
        await reader.read(1)
    left.set()


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    (num_bytes,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(num_bytes)


def _load_head(frame: bytes) -> Head:
    status, pairs = json.loads(frame)
    return status, [(name.encode(_CODE), value.encode(_CODE)) for name, value in pairs]
