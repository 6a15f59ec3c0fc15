"""From jobs to an HTTP response, as a stream of events or in one piece, in the words of any API.

In: calls on the engine and a Wire. Out: a response. A client that leaves cancels its jobs, whether
they wait or run. Non-streaming is the stream folded up.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from draftree.core import FinishReason, Usage
from draftree.serve.queue import RELAYED_FRAME_S, Call, Job, resume
from draftree.serve.service import Service
from draftree.serve.wire import OUTLET, ApiError, Outlet, encode, to_json
from draftree.text.message import ReplyMessage
from draftree.text.reply import ReplyPiece

if TYPE_CHECKING:
    from draftree.chat import Delta, TokenLogprob

EVENTS: Final = "text/event-stream"
LINES: Final = "application/x-ndjson"
TOKENS: Final = ": tokens "  # a comment: which reply, how many came before, and ids
_GLANCE_S: Final = 1.0  # before a stream begins without a token, and between looks at how far it is
_PATIENCE_S: Final = 10.0  # before a sign of life, where there is nothing new to say
_STREAM_HEADERS: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Folded(ReplyMessage):
    """A reply put together, and what else is known of it."""

    def __init__(self) -> None:
        super().__init__()
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None

    def extend(self, deltas: "Sequence[Delta]") -> None:
        for delta in deltas:
            self.add(ReplyPiece(delta.kind, delta.text, delta.tool_call))
            self.logprobs += delta.logprobs


class Wire(Protocol):
    """How an API writes a reply. index: which of a request's replies it is."""

    def opening(self) -> str:
        """What a stream begins with."""
        ...

    def chunk(self, index: int, deltas: "Sequence[Delta]") -> str: ...

    def closing(self, index: int, job: Job) -> str:
        """The end of one reply."""
        ...

    def ending(self, jobs: Sequence[Job]) -> str:
        """The end of the stream."""
        ...

    def failure(self, error: ApiError) -> str:
        """The end of a stream that broke off."""
        ...

    def whole(self, replies: Sequence[Folded], jobs: Sequence[Job]) -> dict[str, Any]: ...


async def answer(
    request: Request,
    service: Service,
    calls: Sequence[Call],
    wire: Wire,
    *,
    is_stream: bool,
    prompt_field: str,
    kind: str = EVENTS,
    progress: Callable[[Usage], str] | None = None,
) -> Response:
    """kind: what a stream is made of; progress: events that say how far a prompt is read."""
    if not is_stream:
        return await answer_whole(request, service, calls, wire.whole, prompt_field=prompt_field)
    is_relayed = request.state.identity.is_repeatable
    begun = request.state.identity.begun
    calls = [resume(*pair) for pair in zip(calls, begun, strict=False)] + list(calls[len(begun) :])
    jobs = await _submit(request, service, calls, is_stream=True, prompt_field=prompt_field)
    for job in jobs if is_relayed else ():
        job.frame_s = RELAYED_FRAME_S
    watcher = asyncio.create_task(_watch(request, service, jobs))
    try:
        first = await _read_first(jobs[0])
        stream = EventStream(service, jobs, wire, first, watcher, kind)
        stream.is_repeatable = is_relayed
        stream.progress = None if is_relayed else progress  # how often is chance
        return stream
    except BaseException:
        watcher.cancel()
        service.cancel(jobs)
        raise


async def answer_whole(
    request: Request,
    service: Service,
    calls: Sequence[Call],
    write: Callable[[Sequence[Folded], Sequence[Job]], dict[str, Any]],
    *,
    prompt_field: str,
) -> Response:
    """In one piece."""
    jobs = await _submit(request, service, calls, is_stream=False, prompt_field=prompt_field)
    watcher = asyncio.create_task(_watch(request, service, jobs))
    try:
        replies = [await _fold(job) for job in jobs]
        content = encode(to_json(write(replies, jobs)))
        return Response(content, media_type="application/json")
    except BaseException:
        service.cancel(jobs)
        raise
    finally:
        watcher.cancel()


async def _submit(
    request: Request, service: Service, calls: Sequence[Call], **options: Any
) -> list[Job]:
    state = request.state
    return await service.submit(state.client, calls, request_id=state.request_id, **options)


class EventStream(Response):
    """Sends events as they come. first: what was read while the status could still be chosen."""

    def __init__(
        self,
        service: Service,
        jobs: Sequence[Job],
        wire: Wire,
        first: "list[Delta] | None",
        watcher: asyncio.Task[None],
        kind: str = EVENTS,
    ) -> None:
        self.status_code = 200
        self.media_type = kind
        self.background = None
        self.init_headers(_STREAM_HEADERS)
        self._service, self._jobs, self._wire = service, jobs, wire
        self._first, self._watcher = first, watcher
        self.is_repeatable = False  # another run has the same events
        self.progress: Callable[[Usage], str] | None = None
        self._outlet: Outlet | None = None
        self._unsent = ""
        self._num_sent = 0
        self._num_told = [0] * len(jobs)  # tokens of each reply
        self._reading = jobs[0]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._outlet = scope.get("extensions", {}).get(OUTLET)
        alive = asyncio.create_task(self._show_life(send))
        try:
            try:
                await self._send_replies(send)
            except ApiError as error:
                if self.is_repeatable and error.status == 503:
                    return  # whoever asked sees that the end is missing, and asks another server
                self._unsent += self._wire.failure(error)
            alive.cancel()
            await self._send(send, self._unsent, is_last=True)
        finally:
            alive.cancel()
            self._watcher.cancel()
            self._service.cancel(self._jobs)

    async def _send_replies(self, send: Send) -> None:
        """All but the last piece: what need not be waited for is sent together."""
        self._unsent = self._wire.opening()
        for index, job in enumerate(self._jobs):
            self._reading = job
            while deltas := await self._read(send, index, job):
                self._unsent += self._chunk(index, deltas)
            self._unsent += self._wire.closing(index, job)
        self._unsent += self._wire.ending(self._jobs)

    async def _read(self, send: Send, index: int, job: Job) -> "list[Delta]":
        deltas, self._first = self._first, None
        if deltas is not None:
            return deltas
        if not job.is_done:
            text, self._unsent = self._unsent, ""
            await self._send(send, text)
        return await job.read(partial(self._show, index, job))

    def _show(self, index: int, job: Job) -> bool:
        """Send what came while the reader rests; False when that has to wait for the client."""
        if self._outlet is None or not self._outlet.is_free:
            return False
        self._num_sent += 1
        self._outlet.write_piece(encode(self._chunk(index, job.take())))
        return True

    def _chunk(self, index: int, deltas: "list[Delta]") -> str:
        if not self.is_repeatable:
            return self._wire.chunk(index, deltas)
        events = "".join(self._wire.chunk(index, [delta]) for delta in deltas)
        return events + self._tell_tokens(index) if self.media_type == EVENTS else events

    def _tell_tokens(self, index: int) -> str:
        """A comment for whoever may have to ask another server to go on."""
        start, tokens = self._num_told[index], self._jobs[index].tokens
        new = tokens[start : len(tokens)]
        self._num_told[index] += len(new)
        return f"{TOKENS}{index} {start} {' '.join(map(str, new))}\n\n" if new else ""

    async def _send(self, send: Send, text: str, *, is_last: bool = False) -> None:
        self._num_sent += 1
        if text or is_last:
            body = encode(text)
            await send({"type": "http.response.body", "body": body, "more_body": not is_last})

    async def _show_life(self, send: Send) -> None:
        """A comment while nothing else is sent: how far the reply is, if there is news of that, and
        now and then in any case, so that nobody hangs up. Clients pass over comments.
        """
        if self.media_type != EVENTS:
            return  # lines of JSON have no comments
        loop = asyncio.get_running_loop()
        words, next_s = "", loop.time() + _PATIENCE_S
        while True:
            num_sent = self._num_sent
            await asyncio.sleep(_GLANCE_S)
            if num_sent != self._num_sent:
                next_s = loop.time() + _PATIENCE_S
                continue
            if self.progress is not None and (news := self.progress(self._jobs[0].progress)):
                await self._send(send, news)
            last, words = words, self._describe_progress()
            if words != last or loop.time() >= next_s:
                next_s = loop.time() + _PATIENCE_S
                await self._send(send, f": {words or 'waiting'}\n\n")

    def _describe_progress(self) -> str:
        """Its place in the queue, or how much of the prompt was read; "" while it is written."""
        place, usage = self._service.queue.place_of(self._reading), self._reading.progress
        if place:
            wait_s = self._service.queue.expect_wait(place)
            return f"queue {place}" if wait_s is None else f"queue {place}, {describe_wait(wait_s)}"
        is_reading = 0 < usage.read_tokens < usage.prompt_tokens - 1
        return f"prefill {usage.read_tokens}/{usage.prompt_tokens}" if is_reading else ""


def describe_wait(seconds: float) -> str:
    """In words that do not change all the time."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    return f"about {round(seconds / 60)} min"


async def _read_first(job: Job) -> "list[Delta] | None":
    """What comes first, empty at the end; None when nothing comes for a while."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_GLANCE_S):
            return await job.read()
    return None


async def _fold(job: Job) -> Folded:
    folded = Folded()
    while deltas := await job.read():
        folded.extend(deltas)
    folded.finish_reason = job.finish_reason
    return folded


async def _watch(request: Request, service: Service, jobs: Sequence[Job]) -> None:
    """Cancel the jobs of a client that leaves."""
    while (await request.receive())["type"] != "http.disconnect":
        continue
    request.state.has_left = True
    service.cancel(jobs)
