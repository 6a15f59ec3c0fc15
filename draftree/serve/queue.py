"""Requests on their way to the engine: one job a reply, in a bounded queue that is fair to clients.

The event loop makes and reads jobs, the engine thread runs them; this is where the two meet. Knows
nothing of HTTP beyond the errors it raises, and nothing of what a job asks.
"""

import asyncio
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeAlias

from draftree.core import FinishReason, Usage
from draftree.serve.wire import ApiError, busy

if TYPE_CHECKING:
    from draftree.chat import Delta, Engine, Generation

Call: TypeAlias = "Callable[[Engine], Generation]"
Show: TypeAlias = Callable[[], bool]

_FRAME_S: Final = 0.04  # rounds that are too short to be told apart are shown together
RELAYED_FRAME_S: Final = 0.08  # where each piece passes through several processes
_MAX_UNREAD: Final = 2**15  # pieces and log-probabilities that a reader may be behind
_MAX_RETRY_S: Final = 60


def resume(call: Call, tokens: Sequence[int]) -> Call:
    """The same call, whose reply begins with tokens that another run has given."""

    def begin(engine: "Engine") -> "Generation":
        generation = call(engine)
        generation.stream.resume(tokens)
        return generation

    return begin


class Job:
    """One reply: read by the event loop while the engine thread writes it."""

    def __init__(
        self,
        client: str,
        call: Call,
        loop: asyncio.AbstractEventLoop,
        on_end: "Callable[[Job], None]" = lambda job: None,
        *,
        is_stream: bool = True,
        group: object = None,
    ) -> None:
        """group: shared by the jobs of one request, which run one after the other."""
        self.client = client
        self.group = self if group is None else group
        self.is_stream = is_stream
        self.usage = Usage()
        self.finish_reason: FinishReason | None = None
        self.arrived_s = time.perf_counter()
        self.started_s: float | None = None
        self.first_s: float | None = None
        self.is_cancelled = False
        self.frame_s = _FRAME_S
        self.engine_s = 0.0
        self.tokens: Sequence[int] = ()  # of the reply so far, for another run; see `resume`
        self._call = call
        self._prepared: tuple[Engine, Generation] | None = None
        self._reply: Iterator[Delta] | None = None
        self._loop = loop
        self._on_end = on_end
        self.error: ApiError | None = None
        self.is_done = False
        self._round: list[Delta] = []
        self._deltas: deque[Delta] = deque()  # of whole rounds
        self._has_pushed = False
        self._num_unread = 0
        self._next_read_s = 0.0
        self._is_awaited = False
        self._wake: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def prepare(self, engine: "Engine") -> "Generation":
        """The generation on this engine; nothing of it is computed yet."""
        if self._prepared is None or self._prepared[0] is not engine:
            self._prepared = (engine, self._call(engine))
        return self._prepared[1]

    @property
    def progress(self) -> Usage:
        """How far it is, while it runs."""
        prepared = self._prepared
        return self.usage if prepared is None else prepared[1].usage

    @property
    def has_begun(self) -> bool:
        return self._reply is not None

    def write(self, generation: "Generation") -> "Iterator[Delta]":
        """Deltas from where it paused last."""
        if self._reply is None:
            generation.watch_rounds(self.flush)
            if self.is_stream:
                self.tokens = generation.stream.tokens
            self._reply = iter(generation)
        return self._reply

    def restart(self) -> bool:
        """Begin again on another engine; False when the reader has part of the reply."""
        if self.is_stream and self._has_pushed:
            return False
        self._deltas.clear()
        self._round.clear()
        self.forget()
        return True

    async def read(self, show: Show | None = None) -> "list[Delta]":
        """The deltas since the last call, empty at the end. Raises the error that ended the job.
        While more comes all the time, a timer has `show` take it at every frame: to wake a task,
        or to be woken by the engine's thread, costs the engine more. False: the reader has to.
        """
        if self.is_stream:
            await self._rest(show)
        self._is_awaited = self.is_stream
        while not (self.is_done or (self.is_stream and self._deltas)):
            await self._wait()
        self._is_awaited = False
        if not self._deltas and self.error is not None:
            raise self.error
        return self.take()

    def take(self) -> "list[Delta]":
        """What is to be sent now."""
        if self.first_s is None and self._deltas:
            self.first_s = time.perf_counter()
        self._num_unread = 0
        self._next_read_s = self._loop.time() + self.frame_s
        return [self._deltas.popleft() for _ in range(len(self._deltas))]

    async def _rest(self, show: Show | None) -> None:
        """Until nothing new has come for a frame, or the job has ended."""
        if self.is_done or self._loop.time() >= self._next_read_s:
            return
        self._set_timer(show)
        try:
            await self._wait()
        finally:
            assert self._timer is not None
            self._timer.cancel()

    def _set_timer(self, show: Show | None) -> None:
        self._timer = self._loop.call_at(self._next_read_s, self._end_frame, show)

    def _end_frame(self, show: Show | None) -> None:
        try:
            if show and self._deltas and not self.is_done and show():
                self._set_timer(show)
            else:
                self._wake_reader()
        except Exception as error:
            self._wake_reader(error)

    async def _wait(self) -> None:
        self._wake = self._loop.create_future()
        await self._wake

    def _wake_reader(self, error: Exception | None = None) -> None:
        if self._wake is None or self._wake.done():
            return  # it looks for itself before it waits
        if error is None:
            self._wake.set_result(None)
        else:
            self._wake.set_exception(error)

    def push(self, delta: "Delta") -> bool:
        """Keep a delta until the next `flush`; False when no more is wanted."""
        self._round.append(delta)
        self._has_pushed = True
        if self.is_stream:
            self._num_unread += 1
            for score in delta.logprobs:
                self._num_unread += 1 + len(score.top)
            if self._num_unread > _MAX_UNREAD:
                sentence = "The reply was not read as fast as it was written."
                self.cancel(ApiError(408, sentence, code="reader_too_slow"))
        return not self.is_cancelled

    def flush(self) -> None:
        """Hand a round over, and wake the reader if it waits for that."""
        self._deltas.extend(self._round)
        self._round.clear()
        if self._is_awaited and self._deltas:
            self._is_awaited = False
            self._call_loop(self._wake_reader)

    def finish(self, usage: Usage, finish_reason: FinishReason | None) -> None:
        self.usage, self.finish_reason = usage, finish_reason
        self._end()

    def fail(self, error: ApiError) -> None:
        self.error = self.error or error
        self._end()

    def cancel(self, error: ApiError | None = None) -> None:
        """Have the engine stop after this round; a reader, if there is one, gets the error."""
        self.error = self.error or error
        self.is_cancelled = True
        prepared = self._prepared
        if prepared is not None:
            prepared[1].cancel()

    def forget(self) -> None:
        """Let go of the engine; the generation is made anew when it is needed."""
        self._prepared = self._reply = None

    def _end(self) -> None:
        self.forget()
        self._deltas.extend(self._round)
        self.is_done = True
        self._call_loop(self._announce_end)

    def _announce_end(self) -> None:
        self._wake_reader()
        self._loop.call_soon(self._on_end, self)  # after the reader, who would have to wait for it

    def _call_loop(self, function: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody reads any more
            self._loop.call_soon_threadsafe(function, *arguments)


class FairQueue:
    """Clients take turns, each in its own order. A client's place is held until its job ends."""

    def __init__(self, max_jobs: int, max_per_client: int) -> None:
        self.max_per_client = min(max_per_client, max_jobs)
        self._max_jobs = max_jobs
        self._changed = threading.Condition()
        self._admitted: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()
        self._is_closed = False
        self._mean_s: float | None = None  # that a job has the engine; None: there was none yet

    @property
    def num_waiting(self) -> int:
        with self._changed:
            return sum(map(len, self._waiting.values()))

    @property
    def num_admitted(self) -> int:
        return self._admitted.total()

    def admit(self, client: str, num_jobs: int) -> None:
        """Hold places for a client's jobs, or refuse them."""
        with self._changed:
            own, total = self._admitted[client], self._admitted.total()
            if own + num_jobs > self.max_per_client:
                sentence = f"You have {own} requests here already, of {self.max_per_client}."
                raise busy(429, sentence, self._retry_s(own))
            if total + num_jobs > self._max_jobs:
                sentence = f"The queue is full with {total} requests."
                raise busy(503, sentence, self._retry_s(total))
            self._admitted[client] += num_jobs

    def release(self, client: str, num_jobs: int = 1) -> None:
        with self._changed:
            self._admitted[client] -= num_jobs
            if self._admitted[client] <= 0:
                del self._admitted[client]

    def put(self, job: Job) -> bool:
        """False when the queue has been closed."""
        with self._changed:
            if self._is_closed:
                return False
            self._waiting.setdefault(job.client, deque()).append(job)
            self._changed.notify()
            return True

    def drop(self, job: Job) -> bool:
        """Take a waiting job out; False when it no longer waits."""
        with self._changed:
            jobs = self._waiting.get(job.client, ())
            if job not in jobs:
                return False
            self._waiting[job.client].remove(job)
            self._forget_if_empty(job.client)
            return True

    def take(self) -> Job | None:
        """Wait for the next job; None when the queue has been closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
        return self.take_ready(lambda job: True)

    def take_ready(self, is_ready: Callable[[Job], bool]) -> Job | None:
        """The next job that may begin, if there is one."""
        with self._changed:
            job = self._find_ready(is_ready)
            if job is not None:
                self._waiting[job.client].remove(job)
                self._waiting.move_to_end(job.client)
                self._forget_if_empty(job.client)
            return job

    def has_ready(self, is_ready: Callable[[Job], bool]) -> bool:
        if not self._waiting:
            return False
        with self._changed:
            return self._find_ready(is_ready) is not None

    def _find_ready(self, is_ready: Callable[[Job], bool]) -> Job | None:
        waiting = (job for jobs in self._waiting.values() for job in jobs)
        return next(filter(is_ready, waiting), None)

    def place_of(self, job: Job) -> int:
        """Its place among those that wait, 1 is next; 0 when it does not wait."""
        with self._changed:
            clients = list(self._waiting)
            if job not in self._waiting.get(job.client, ()):
                return 0
            index = self._waiting[job.client].index(job)
            own = clients.index(job.client)
            # In each round every client has one; in the job's round, those before its own.
            ahead = (
                min(len(jobs), index + (number < own))
                for number, jobs in enumerate(self._waiting.values())
            )
            return sum(ahead) + 1

    def expect_wait(self, place: int) -> float | None:
        """Seconds until whoever has this place gets to the engine; None: nothing is known yet.

        However many take turns, one of them ends whenever the engine has worked as long as a job
        takes, and the first of them is on its way already.
        """
        if self._mean_s is None:
            return None
        return self._mean_s * (place - 0.5) if place else 0.0

    def is_idle(self, seconds: float) -> bool:
        """Whether nothing comes for so long; waits no longer than until something does."""
        with self._changed:
            return not self._changed.wait_for(lambda: self._waiting or self._is_closed, seconds)

    def close(self) -> list[Job]:
        """Take no more jobs; return those that waited."""
        with self._changed:
            self._is_closed = True
            jobs = [job for waiting in self._waiting.values() for job in waiting]
            self._waiting.clear()
            self._changed.notify_all()
            return jobs

    def forget_engine(self) -> None:
        """Let nothing that waits keep an engine alive that is about to be closed."""
        with self._changed:
            for jobs in self._waiting.values():
                for job in jobs:
                    job.forget()

    def note_duration(self, duration_s: float) -> None:
        """Of a job on the engine, to tell others when to come back."""
        mean_s = duration_s if self._mean_s is None else self._mean_s
        self._mean_s = mean_s + 0.2 * (duration_s - mean_s)

    def _forget_if_empty(self, client: str) -> None:
        if not self._waiting[client]:
            del self._waiting[client]

    def _retry_s(self, num_ahead: int) -> int:
        return max(1, min(_MAX_RETRY_S, round((self._mean_s or 1.0) * max(num_ahead, 1) / 2)))
