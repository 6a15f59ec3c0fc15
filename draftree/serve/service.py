"""One server's parts together: options, queue, engine thread, metrics; and its way down.

In: calls on the engine. Out: jobs to read. Runs in the event loop; knows no wire format.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from draftree.core import FinishReason
from draftree.errors import DraftreeError
from draftree.serve.access import Hosts, Keys
from draftree.serve.log import log_event
from draftree.serve.memory import BodyMemory
from draftree.serve.metrics import Metrics
from draftree.serve.queue import Call, FairQueue, Job
from draftree.serve.statistics import statistics
from draftree.serve.thread import EngineThread, State, explain
from draftree.serve.wire import ApiError, busy

if TYPE_CHECKING:
    from draftree.chat import Engine

_Answer = TypeVar("_Answer")
_LOADING_RETRY_S: Final = 2
_STOPPING_RETRY_S: Final = 10
_TAG: Final = ":latest"  # what Ollama's clients may add to any name
_MIB: Final = 2**20
_BODIES, _BODIES_PER_CLIENT = 8, 2  # of the longest kind, which memory is held for at a time


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What was asked of a server, beside its engine."""

    model_id: str
    version: str = "0"
    aliases: tuple[str, ...] = ()
    any_model: bool = False  # whether requests may name any other
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    temperature: float = 1.0  # of requests that give none
    max_queue: int = 256
    max_per_client: int = 64
    max_body_bytes: int = 32 * _MIB
    grace_s: float = 10.0
    log_prompts: bool = False
    read_ahead: bool = True
    trusted_proxies: tuple[str, ...] = ()  # addresses whose X-Forwarded-For names the client
    tls_cert: str | None = None  # files; both or none
    tls_key: str | None = None


def _open_ready(open_engine: "Callable[[], Engine]") -> "Engine":
    """What the first request would wait for is done before it is let in."""
    engine = open_engine()
    engine.prepare_chat()
    return engine


class Service:
    """on_change: told of every change of the engine's state, in the engine's thread."""

    def __init__(
        self,
        open_engine: "Callable[[], Engine]",
        options: ServeOptions,
        on_change: Callable[[State], None] = lambda state: None,
    ) -> None:
        self.options = options
        self.keys = Keys(options.api_keys)
        self.hosts = Hosts(options.allowed_hosts, has_keys=bool(options.api_keys))
        longest = options.max_body_bytes
        self.bodies = BodyMemory(_BODIES * longest, _BODIES_PER_CLIENT * longest)
        self.metrics = Metrics()
        self.created_s = int(time.time())
        digest = hashlib.sha256(f"{options.version} {options.model_id}".encode())
        self.digest = digest.hexdigest()
        self.fingerprint = f"b{self.digest[:10]}"  # tools for llama.cpp look for the b
        self.queue = FairQueue(options.max_queue, options.max_per_client)
        opener, reads_ahead = partial(_open_ready, open_engine), options.read_ahead
        self.thread = EngineThread(opener, self.queue, on_change, reads_ahead=reads_ahead)

    @property
    def state(self) -> State:
        return self.thread.state

    @property
    def num_running(self) -> int:
        """Live ones, of which one has the engine."""
        return len(self.thread.turns.jobs)

    def check_ready(self) -> "Engine":
        engine = self.thread.engine
        if self.state is State.READY and engine is not None:
            return engine
        if self.state in (State.STOPPING, State.FAILED):
            raise busy(503, "The server is shutting down.", _STOPPING_RETRY_S)
        raise busy(503, "The model is being loaded.", _LOADING_RETRY_S)

    async def run_beside(self, ask: "Callable[[Engine], _Answer]") -> _Answer:
        """Ask the engine what needs no turn, beside the event loop: long texts take their time."""
        engine = self.check_ready()
        try:
            return await asyncio.to_thread(ask, engine)
        except (DraftreeError, ValueError) as error:
            raise explain(error, engine) from error

    def choose_model(self, name: str | None) -> str:
        """The model that answers a request for this name: there is one. None: no name was given."""
        own = self.options.model_id
        if name is None:
            return next(iter(self.options.aliases), own)
        if self._has_model(name):
            return name
        if not self.options.any_model:
            self.check_model(name)
        return own

    def _has_model(self, name: str) -> bool:
        return name.removesuffix(_TAG) in (self.options.model_id, *self.options.aliases)

    def check_model(self, name: str) -> None:
        if not self._has_model(name):
            raise ApiError(
                404,
                f"There is no model {name!r} here; this server has {self.options.model_id!r}.",
                param="model",
                code="model_not_found",
            )

    @property
    def context_length(self) -> int | None:
        """None while the model is loaded."""
        engine = self.thread.engine
        return engine.plan.max_ctx if engine is not None else None

    def check_count(self, num_replies: int) -> None:
        limit = self.queue.max_per_client
        if num_replies > limit:
            sentence = f"The request asks for {num_replies} replies; at most {limit} are possible."
            raise ApiError(400, sentence, param="n")

    async def submit(
        self,
        client: str,
        calls: Sequence[Call],
        *,
        is_stream: bool,
        prompt_field: str,
        request_id: str,
    ) -> list[Job]:
        """Queue one job a call, or say why not. prompt_field: blamed for too long a prompt."""
        engine = self.check_ready()
        self.check_count(len(calls))
        self.queue.admit(client, len(calls))
        loop = asyncio.get_running_loop()
        record = partial(self._record, request_id=request_id)
        group = object()
        jobs = [Job(client, call, loop, record, is_stream=is_stream, group=group) for call in calls]
        num_queued = 0
        try:
            # Templates and tokenizers take their time, which the engine need not wait for.
            await asyncio.gather(*(asyncio.to_thread(job.prepare, engine) for job in jobs))
            for job in jobs:
                if not self.queue.put(job):
                    raise busy(503, "The server is shutting down.", _STOPPING_RETRY_S)
                num_queued += 1
        except RecursionError:
            raise ApiError(400, "The request is nested too deeply.") from None
        except (DraftreeError, ValueError) as error:
            reason = explain(error, engine)
            reason.param = prompt_field if reason.code == "context_length_exceeded" else None
            raise reason from error
        finally:
            if num_queued < len(jobs):
                self.queue.release(client, len(jobs) - num_queued)
        return jobs

    def cancel(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            job.cancel()
            if self.queue.drop(job):
                self.queue.release(job.client)
                job.finish(job.usage, FinishReason.CANCELLED)

    def begin_stop(self) -> None:
        """Refuse what waits, and give what runs its grace."""
        if self.state is State.STOPPING:
            return
        self.thread.state = State.STOPPING
        stopping = busy(503, "The server is shutting down.", _STOPPING_RETRY_S)
        for job in self.queue.close():
            job.fail(stopping)
            self.queue.release(job.client)
        asyncio.get_running_loop().call_later(self.options.grace_s, self._cut, stopping)

    def _cut(self, error: ApiError) -> None:
        for job in self.thread.turns.jobs:
            job.cancel(error)

    def _record(self, job: Job, request_id: str) -> None:
        """Count and log a job that has ended, whether or not anyone still reads it."""
        usage = job.usage
        is_cancelled = job.finish_reason is FinishReason.CANCELLED
        self.metrics.count_reply(usage, is_cancelled=is_cancelled)
        if job.error is not None and job.error.code == "engine_failure":
            self.metrics.count_engine_failure()
        if job.started_s is not None:
            self.metrics.count_start(job.started_s - job.arrived_s)
        if job.first_s is not None:
            self.metrics.count_first_token(job.first_s - job.arrived_s)
        log_event(
            "reply",
            id=request_id,
            finish_reason=job.finish_reason,
            error=job.error and job.error.message,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            **statistics([job]),
        )
