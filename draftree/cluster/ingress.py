"""The way in: one ASGI application in front of all replicas.

In: HTTP. Out: what a replica answers; when that one dies, what another one answers to the same
request, from where the client has it. Knows no API and nothing of Ray.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, Final

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from draftree.cluster.message import Head, Pool, Refused, Relayed, ReplicaLost, Report, Unavailable
from draftree.cluster.routing import Places, find_keys
from draftree.cluster.totals import Totals
from draftree.cluster.transcript import ReplyChanged, Transcript
from draftree.serve.app import error_content
from draftree.serve.identity import Identity
from draftree.serve.wire import OUTLET, ApiError, Outlet, busy, encode, event, to_json

_PATIENCE_S: Final = 120.0  # one may have to start
_READ_S: Final = 60.0
_MAX_REPEATS: Final = 5  # a request may be what kills replicas
_PAUSE_S: Final = 0.2
_RETRY_S: Final = 5
_SUMMED: Final = ("/metrics", "/health")
_REFUSALS: Final = (429, 503)  # the replica is full
_STREAM: Final = b"text/event-stream"
_KNOWN: Final = "Requests whose beginning a replica had read."
_HITS: Final = "Requests that went to the replica that had read their beginning."
_REPEATS: Final = "Requests that were given to another replica."
_NOT_OURS: Final = (b"x-request-id",)  # Serve's proxy adds its own


class Ingress:
    """patience_s: for a replica to take a request; read_s: for a body to arrive."""

    def __init__(
        self,
        pool: Pool,
        max_body_bytes: int,
        patience_s: float = _PATIENCE_S,
        read_s: float = _READ_S,
    ) -> None:
        self._pool = pool
        self._max_body_bytes = max_body_bytes
        self._patience_s, self._read_s = patience_s, read_s
        self._places = Places()
        self._totals = Totals()
        self._num_repeats = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(scope, send)
        try:
            body = await self._read(scope, receive)
            await _until_left(self._answer(_relayed(scope, body), reply), receive)
        except ClientDisconnect:
            return
        except Unavailable:
            await reply.fail(busy(503, "No replica is ready.", _RETRY_S))
        except ReplyChanged:
            sentence = "The replica was lost, and another one wrote another text."
            await reply.fail(ApiError(500, sentence, kind="server_error", code="reply_changed"))
        except ReplicaLost:
            sentence = "The replica was lost, and so were those that were asked after it."
            await reply.fail(ApiError(500, sentence, kind="server_error", code="replica_lost"))
        except ApiError as error:
            await reply.fail(error)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """The body, as it may be needed again; what is too long is read, but not kept."""
        pieces, num_bytes, limit = [], 0, self._max_body_bytes
        try:
            async with asyncio.timeout(self._read_s):
                async for piece in Request(scope, receive).stream():
                    num_bytes += len(piece)
                    if num_bytes <= limit:
                        pieces.append(piece)
                    if num_bytes > 4 * limit:
                        break
        except TimeoutError:
            sentence = f"The body did not arrive within {self._read_s:.0f} seconds."
            raise ApiError(408, sentence, code="request_timeout") from None
        if num_bytes > limit:
            sentence = f"The body is longer than {limit / 2**20:.6g} MiB."
            raise ApiError(413, sentence, code="request_too_large")
        return b"".join(pieces)

    async def _answer(self, request: Relayed, reply: "Reply") -> None:
        keys: tuple[bytes, ...] = ()
        if request.method == "POST":
            keys = await asyncio.to_thread(find_keys, request.body)
        num_lost = num_refused = 0
        while True:
            found = self._places.find(keys)
            request = replace(request, prefers="" if found in request.avoids else found)
            tried: list[str] = []
            try:
                await self._ask(request, keys, reply, tried)
                return
            except Refused:
                num_refused += 1
                if num_refused * _PAUSE_S > self._patience_s:
                    raise ReplicaLost from None
            except ReplicaLost:
                num_lost, num_refused = num_lost + 1, 0
                if num_lost > _MAX_REPEATS:
                    raise
            self._num_repeats += 1
            if not set(tried) - set(request.avoids):
                await asyncio.sleep(_PAUSE_S)  # nobody new is there
            identity = replace(request.identity, begun=reply.tokens)
            avoids = tuple({*request.avoids, *tried})
            request = replace(request, identity=identity, avoids=avoids)

    async def _ask(
        self, request: Relayed, keys: Sequence[bytes], reply: "Reply", tried: list[str]
    ) -> None:
        """One replica, whose name is added to `tried`."""
        async with aclosing(self._pool.ask(request)) as answer:
            try:
                async with asyncio.timeout(self._patience_s):
                    tried.append(await anext(answer))
            except TimeoutError:
                raise Unavailable from None
            head: Head = await anext(answer)
            # The client hears of it when every replica has refused, and never within a reply.
            if head[0] in _REFUSALS and (reply.has_begun or tried[0] not in request.avoids):
                raise Refused
            self._places.record(keys, tried[0], request.prefers)
            if head[0] == 200 and any(_STREAM in value for _, value in head[1]):
                await reply.stream(head, answer)
                return
            if reply.has_begun:
                raise ReplyChanged
            body = b"".join([piece async for piece in answer])
        if head[0] == 200 and request.path in _SUMMED and request.method == "GET":
            body = await self._sum(request.path, body)
        await reply.send_whole(head, body)

    async def _sum(self, path: str, body: bytes) -> bytes:
        """What one replica said of itself, said of all."""
        reports = await self._pool.survey()
        if path == "/metrics":
            return (self._totals.render(reports) + self._own_metrics(reports)).encode()
        content = json.loads(body)
        for name in ("queue", "running"):
            content[name] = sum(report.health[name] for report in reports)
        return encode(to_json({**content, "replicas": [report.health for report in reports]}))

    def _own_metrics(self, reports: Sequence[Report]) -> str:
        places = self._places
        rate = places.num_hits / places.num_known if places.num_known else 0.0
        figures = {
            ("draftree_replicas", "gauge"): (len(reports), "Replicas that answer."),
            ("draftree_known_total", "counter"): (places.num_known, _KNOWN),
            ("draftree_hits_total", "counter"): (places.num_hits, _HITS),
            ("draftree_hit_rate", "gauge"): (rate, "Hits of those that were known."),
            ("draftree_repeats_total", "counter"): (self._num_repeats, _REPEATS),
        }
        return "".join(
            f"# HELP {name} {words}\n# TYPE {name} {kind}\n{name} {value:.12g}\n"
            for (name, kind), (value, words) in figures.items()
        )


class Reply:
    """What the client gets, over all runs of its request."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.has_begun = False
        self._path, self._send = scope["path"], send
        self._outlet: Outlet | None = scope.get("extensions", {}).get(OUTLET)
        self._transcript = Transcript()

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        """That the client's replies begin with, as far as they are known."""
        return self._transcript.tokens

    async def stream(self, head: Head, pieces: AsyncGenerator[Any, None]) -> None:
        self._transcript.restart()
        if not self.has_begun:
            await self._begin(head)
        async for piece in pieces:
            data = self._transcript.pass_on(piece)
            if data:
                await self._write(data, is_last=False)
        await self._write(b"", is_last=True)

    async def send_whole(self, head: Head, body: bytes) -> None:
        status, headers = head
        others = [pair for pair in headers if pair[0] != b"content-length"]
        await self._begin((status, [*others, (b"content-length", b"%d" % len(body))]))
        await self._write(body, is_last=True)

    async def fail(self, error: ApiError) -> None:
        content = to_json(error_content(self._path, error))
        if self.has_begun:
            await self._write(encode(event(content, "error")), is_last=True)
            return
        headers = {"content-type": "application/json", **error.headers}
        pairs = [(encode(name), encode(value)) for name, value in headers.items()]
        await self.send_whole((error.status, pairs), encode(content))

    async def _begin(self, head: Head) -> None:
        self.has_begun = True
        headers = [pair for pair in head[1] if pair[0] not in _NOT_OURS]
        await self._send({"type": "http.response.start", "status": head[0], "headers": headers})

    async def _write(self, data: bytes, *, is_last: bool) -> None:
        if self._outlet is not None and self._outlet.is_free and not is_last:
            self._outlet.write_piece(data)
            return
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})


async def _until_left(answering: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Answer, unless the client leaves before that is done."""
    answer, leaving = asyncio.create_task(answering), asyncio.create_task(_watch(receive))
    try:
        await asyncio.wait((answer, leaving), return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            await answer
    finally:
        leaving.cancel()
        if not answer.done():
            answer.cancel()
            with suppress(asyncio.CancelledError):
                await answer


async def _watch(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def _relayed(scope: Scope, body: bytes) -> Relayed:
    client = scope.get("client")
    return Relayed(
        method=scope["method"],
        path=scope["path"],
        raw_path=scope.get("raw_path") or encode(scope["path"]),
        query=scope["query_string"],
        headers=tuple((name, value) for name, value in scope["headers"]),
        body=body,
        client=(client[0], client[1]) if client else None,
        identity=Identity.new(is_repeatable=True),
    )
