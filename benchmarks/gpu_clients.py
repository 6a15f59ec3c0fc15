"""Clients of an engine that is open already: several without HTTP, by the server's queue, turns and
engine thread, or a server in this process.

In: an engine, prompts as token ids. Out: when each client's first text came and when its reply
ended. The engine stays open.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final

from draftree.bench.http import Endpoint
from draftree.chat import Engine, Generation
from draftree.errors import BenchError
from draftree.serve.queue import FairQueue, Job
from draftree.serve.server import bind, new_server
from draftree.serve.service import ServeOptions, Service
from draftree.serve.thread import EngineThread, State

_MOST_JOBS: Final = 64
_POLL_S: Final = 0.005


class _LentEngine(Engine):
    """Is not closed with the thread that it is lent to."""

    def close(self) -> None:
        """Its owner does."""


@dataclass(frozen=True, slots=True)
class Served:
    first_s: float  # from being sent to the first text
    end_s: float  # on the clock
    num_tokens: int


class Clients:
    """An engine's clients, inside an event loop."""

    def __init__(self, queue: FairQueue) -> None:
        self._queue = queue

    def send(self, client: str, ids: Sequence[int], num_tokens: int) -> Job:
        def call(engine: Engine) -> Generation:
            return engine.complete(ids, max_tokens=num_tokens)

        job = Job(client, call, asyncio.get_running_loop())
        self._queue.admit(client, 1)
        if not self._queue.put(job):
            raise BenchError("The engine has ended.")
        return job

    async def read(self, job: Job) -> Served:
        first_s = 0.0
        while await job.read():
            first_s = first_s or time.perf_counter() - job.arrived_s
        return Served(first_s, time.perf_counter(), job.usage.completion_tokens)

    async def ask(self, client: str, ids: Sequence[int], num_tokens: int) -> Served:
        return await self.read(self.send(client, ids, num_tokens))

    async def wait_until(self, jobs: Sequence[Job], num_tokens: int) -> None:
        """All have written so many tokens."""
        while any(job.progress.completion_tokens < num_tokens for job in jobs):
            _check(jobs)
            await asyncio.sleep(_POLL_S)

    async def wait_read(self, job: Job, num_tokens: int) -> None:
        """So much of its prompt was read."""
        while job.progress.read_tokens < num_tokens:
            _check([job])
            await asyncio.sleep(_POLL_S)

    async def cancel(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            job.cancel()
        while not all(job.is_done for job in jobs):
            await asyncio.sleep(_POLL_S)


def _check(jobs: Sequence[Job]) -> None:
    for job in jobs:
        if job.error is not None:
            raise job.error
        if job.is_done:
            raise BenchError("A reply ended before it should; ask for a longer one.")


def _lend(engine: Engine) -> Engine:
    return _LentEngine(engine.tokens, engine.tokenizer, engine.name)


@contextmanager
def run_lent(engine: Engine) -> Iterator[Endpoint]:
    """A server in a thread, ready, and stopped afterwards."""
    is_ready, lent = threading.Event(), [_lend(engine)]
    # Libraries keep the service; what it opens must not keep the engine, and its memory.
    service = Service(lent.pop, ServeOptions(engine.name), lambda state: is_ready.set())
    listener = bind("127.0.0.1", 0)
    server = new_server(service)
    thread = threading.Thread(target=server.run, args=([listener],))
    service.thread.start()
    thread.start()
    try:
        is_ready.wait()
        if service.thread.failure is not None:
            raise service.thread.failure
        yield Endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}", engine.name)
    finally:
        server.should_exit = True
        thread.join()
        service.queue.close()
        service.thread.join()


@asynccontextmanager
async def open_clients(engine: Engine) -> AsyncIterator[Clients]:
    lent = _lend(engine)
    loop, is_ready = asyncio.get_running_loop(), asyncio.Event()

    def note(state: State) -> None:
        loop.call_soon_threadsafe(is_ready.set)

    queue = FairQueue(_MOST_JOBS, _MOST_JOBS)
    thread = EngineThread(lambda: lent, queue, note, reads_ahead=False)
    thread.start()
    await is_ready.wait()
    try:
        yield Clients(queue)
    finally:
        queue.close()
        await asyncio.to_thread(thread.join)
