"""The one thread that owns the engine: opens it, runs jobs one after the other, opens it again when
it fails.

In: jobs of the queue. Out: their deltas, and a state that /health shows. Knows no HTTP.
"""

import gc
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from draftree.core import FinishReason
from draftree.errors import CapacityError, DraftreeError, ServeError
from draftree.serve.log import log_event
from draftree.serve.queue import FairQueue, Job
from draftree.serve.wire import ApiError, engine_failure

if TYPE_CHECKING:
    from draftree.chat import Engine

_log: Final = logging.getLogger("draftree")
_REST_S: Final = 0.02  # in which a reply's end is sent, and often the next request comes
_MAX_FAILURES: Final = 3  # in a row; after that it is not the requests' fault


class State(StrEnum):
    LOADING = "loading"
    READY = "ready"
    RECOVERING = "recovering"  # the engine failed and is being opened again
    STOPPING = "stopping"
    FAILED = "failed"


class EngineThread:
    """on_change: called in this thread after each change of state."""

    def __init__(
        self,
        open_engine: "Callable[[], Engine]",
        queue: FairQueue,
        on_change: Callable[[State], None],
    ) -> None:
        self.state = State.LOADING
        self.engine: Engine | None = None
        self.failure: BaseException | None = None
        self.running: Job | None = None
        self.num_failures = 0
        self._open_engine = open_engine
        self._queue = queue
        self._on_change = on_change
        self._failures_in_a_row = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the end, which comes after the queue has been closed."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._open()
            while (job := self._queue.take()) is not None:
                self._serve(job)
        except BaseException as error:
            self.failure = error
            for job in self._queue.close():
                job.fail(engine_failure("The engine failed and could not be opened again."))
                self._queue.release(job.client)
            self._change(State.FAILED)
        finally:
            self._close()

    def _open(self) -> None:
        self.engine = self._open_engine()
        self._change(State.READY)

    def _close(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            with suppress(Exception):
                engine.close()

    def _change(self, state: State) -> None:
        if self.state != State.STOPPING:
            self.state = state
        self._on_change(state)

    def _serve(self, job: Job) -> None:
        self.running, job.started_s = job, time.perf_counter()
        failure: str | None = None
        try:
            failure = self._write(job)
        except BaseException as end:
            job.fail(engine_failure(f"The engine ended: {type(end).__name__}: {end}."))
            raise
        finally:
            self.running = None
            self._queue.release(job.client)
            self._queue.note_duration(time.perf_counter() - job.started_s)
        if failure is not None:
            self._recover(job, failure)
            return
        self._failures_in_a_row = 0
        if self._queue.is_idle(_REST_S):
            self._keep()

    def _keep(self) -> None:
        """Use the moment; an engine that cannot keep the conversation will read it again."""
        assert self.engine is not None
        try:
            self.engine.offload()
        except Exception as error:
            log_event("nothing kept", error=f"{type(error).__name__}: {error}")

    def _write(self, job: Job) -> str | None:
        """Run a job to its end, or to what broke the engine, which is then returned. In words: the
        exception would keep alive all that it passed through, and so the engine.
        """
        assert self.engine is not None
        if job.is_cancelled:
            job.finish(job.usage, FinishReason.CANCELLED)
            return None
        try:
            generation = job.prepare(self.engine)
        except ApiError as error:
            job.fail(error)
            return None
        except (DraftreeError, ValueError) as error:
            job.fail(explain(error, self.engine))
            return None
        except Exception as error:
            job.fail(engine_failure(f"The request could not be prepared ({error!r})."))
            return None
        try:
            generation.watch_rounds(job.flush)
            for delta in generation:
                if not job.push(delta):
                    break
            generation.close()
        except DraftreeError as error:  # this request cannot go on, others can
            job.usage = generation.usage
            job.fail(explain(error, self.engine))
            return None
        except Exception as error:
            _log.exception("engine failed")
            job.usage = generation.usage
            return f"{type(error).__name__}: {error}"
        job.finish(generation.usage, generation.finish_reason)
        return None

    def _recover(self, job: Job, failure: str) -> None:
        """Nobody knows what a broken engine holds: open another one, once its memory is free."""
        self.num_failures += 1
        self._failures_in_a_row += 1
        is_over = self._failures_in_a_row >= _MAX_FAILURES
        if not is_over:
            self._change(State.RECOVERING)  # before the client hears of it, and asks again
        job.fail(engine_failure(f"The engine failed: {failure}."))
        if is_over:
            times = f"{self._failures_in_a_row} times in a row"
            raise ServeError(f"The engine failed {times}, at last with {failure}.")
        self._queue.forget_engine()
        self._close()
        gc.collect()
        self._open()


def explain(error: Exception, engine: "Engine") -> ApiError:
    """A request that the engine does not take, in the words of the API."""
    if isinstance(error, CapacityError):
        sentence = f"This model's maximum context length is {engine.plan.max_ctx} tokens. {error}"
        return ApiError(400, sentence, code="context_length_exceeded")
    text = str(error).strip()
    sentence = text[:1].upper() + text[1:]
    return ApiError(400, sentence if sentence.endswith(".") else f"{sentence}.")
