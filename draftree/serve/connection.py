"""One client's connection, with limits that uvicorn's own has not: of time to send a request and to
read a reply, and of connections at a time, where idle ones make room for new ones. What is not HTTP
is refused in JSON, as all else is.

In: bytes. Out: requests for the application. Knows no API.
"""

import asyncio
import sys
from collections.abc import Iterable
from typing import Any, Final, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from draftree.serve.openai_reply import render_error
from draftree.serve.wire import CROWDED, OUTLET, ApiError, busy, encode, to_json

REQUEST_S: Final = 30.0  # for a request's head, and for what is left of a body that nobody reads
READ_S: Final = 60.0  # without a reader taking 48 of the 64 KiB that wait for it, or the last bytes
MAX_CONNECTIONS: Final = 800
MAX_PER_CLIENT: Final = 400  # of those, of one address
MAX_CROWDED: Final = 50  # beyond those, to be asked how the server is
_PIECE_BYTES: Final = 2**15  # at most, before others get their turn
_LINGER_S: Final = 2.0  # in which a client that is refused may read why
_RETRY_S: Final = 5


class Connection(H11Protocol):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._is_refused = False
        self._is_crowded = False
        self.idle_since_s = 0.0
        self._request_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if hasattr(transport, "max_size"):  # asyncio's; uvloop's reads less anyway
            transport.max_size = _PIECE_BYTES
        self.idle_since_s = self.loop.time()
        self._is_crowded = not self._find_room()
        crowd = [each for each in self._others() if each._is_crowded]
        if self._is_crowded and len(crowd) >= MAX_CROWDED and not _close_one(crowd):
            self._refuse(busy(503, "There are too many connections.", _RETRY_S))
            transport.close()
        else:
            self._expect_request()

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _others(self) -> "list[Connection]":
        everyone = cast("set[Connection]", self.connections)
        return [each for each in everyone if each is not self and not each.transport.is_closing()]

    def _find_room(self) -> bool:
        """Whether there is room for this connection, if need be in place of an idle one: of its own
        client where that has too many, else of any.
        """
        others = [each for each in self._others() if not each._is_crowded]
        own = [each for each in others if each._address == self._address]
        if len(own) >= MAX_PER_CLIENT:
            return _close_one(own)
        return len(others) < MAX_CONNECTIONS or _close_one(others)

    @property
    def _address(self) -> str | None:
        return self.client[0] if self.client else None

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        is_new = self.timeout_keep_alive_task is not None  # it was idle
        super().data_received(data)
        if not self._is_refused:
            self._expect_request(is_new)

    def handle_events(self) -> None:
        previous = self.scope
        super().handle_events()
        if self.scope is not previous:
            self._is_crowded = self._is_crowded and not self._find_room()
            extensions = {OUTLET: self, CROWDED: self._is_crowded}
            self.scope["extensions"] = extensions  # type: ignore[typeddict-item]
            _tidy_head(self.scope)

    @property
    def is_free(self) -> bool:
        is_chunked = self.conn.their_http_version == b"1.1"
        return is_chunked and not (self.flow.write_paused or self.transport.is_closing())

    def write_piece(self, data: bytes) -> None:
        if data:  # an empty chunk would be the last one
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.idle_since_s = self.loop.time()
        if self.transport.get_write_buffer_size():
            self._expect_reader()
        if not self.transport.is_closing():
            self._expect_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timers(self._read_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._stop_timers(self._request_timer, self._read_timer)

    def send_400_response(self, msg: str) -> None:
        """Called while what is wrong with the request is being handled as an exception."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self._refuse(ApiError(status, f"This is not HTTP as it should be: {error or msg}."))

    def _expect_request(self, is_new: bool = False) -> None:
        """Limit the time for what only the client can do: it does not begin again with each byte,
        but only with each request.
        """
        is_answered = self.cycle is not None and self.cycle.response_complete
        is_client_next = is_answered or self.conn.their_state is h11.IDLE
        if is_new or not is_client_next:
            self._stop_timers(self._request_timer)
            self._request_timer = None
        if is_client_next and self._request_timer is None:
            self._request_timer = self.loop.call_later(REQUEST_S, self._end_request)

    def _end_request(self) -> None:
        self._request_timer = None
        if self.timeout_keep_alive_task is not None:
            return  # it is idle, which has a limit of its own
        has_begun = bool(self.conn.trailing_data[0])
        if self.conn.their_state is h11.IDLE and has_begun:
            sentence = f"The request did not arrive within {REQUEST_S:.0f} seconds."
            self._refuse(ApiError(408, sentence, code="request_timeout"))
        else:
            self.transport.abort()

    def _expect_reader(self) -> None:
        self._stop_timers(self._read_timer)
        self._read_timer = self.loop.call_later(READ_S, self._cut_off)

    def _cut_off(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Answer, and read on for a moment without looking: closing at once would destroy the
        answer on its way.
        """
        self._is_refused = True
        self._stop_timers(self._request_timer)
        self._unset_keepalive_if_required()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            content = encode(to_json(render_error(error)))
            headers = {
                "content-type": "application/json",
                "content-length": str(len(content)),
                "connection": "close",
                **error.headers,
            }
            start = h11.Response(status_code=error.status, headers=list(headers.items()))
            for event in (start, h11.Data(data=content), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._request_timer = self.loop.call_later(_LINGER_S, self.transport.abort)

    @staticmethod
    def _stop_timers(*timers: asyncio.TimerHandle | None) -> None:
        for timer in timers:
            if timer is not None:
                timer.cancel()


def _close_one(crowd: Iterable[Connection]) -> bool:
    """End the connection that has been idle for longest; False when none is idle."""
    idle = [each for each in crowd if each.is_idle]
    if idle:
        min(idle, key=lambda each: each.idle_since_s).transport.close()
    return bool(idle)


def _tidy_head(scope: Any) -> None:
    """A target that names the host as well, as for a proxy, stands for the Host header. After a
    body whose length was given in two ways, nobody knows where the next request begins.
    """
    scheme, _, rest = scope["path"].partition("://")
    if scheme.lower() in ("http", "https"):
        host, slash, path = rest.partition("/")
        scope["path"] = slash + path or "/"
        scope["raw_path"] = b"/" + scope["raw_path"].partition(b"://")[2].partition(b"/")[2]
        others = [(name, value) for name, value in scope["headers"] if name != b"host"]
        scope["headers"] = [(b"host", encode(host)), *others]
    names = {name for name, _ in scope["headers"]}
    if {b"content-length", b"transfer-encoding"} <= names:
        scope["headers"] = [*scope["headers"], (b"connection", b"close")]
