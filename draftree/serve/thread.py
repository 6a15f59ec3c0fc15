"""The one thread that owns the engine: opens it, lets jobs take turns on it, opens it again when it
fails.

In: jobs of the queue. Out: their deltas, and a state that /health shows. Knows no HTTP.
"""

import gc
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Final

from draftree.core import FinishReason, Usage
from draftree.errors import CapacityError, DraftreeError, ServeError
from draftree.serve.log import log_event
from draftree.serve.queue import FairQueue, Job
from draftree.serve.turns import Turns
from draftree.serve.wire import TOO_LONG, ApiError, busy, engine_failure
from draftree.text.reply import DeltaKind

if TYPE_CHECKING:
    from draftree.chat import Engine

_log: Final = logging.getLogger("draftree")
_REST_S: Final = 0.02  # in which a reply's end is sent, and often the next request comes
_MAX_FAILURES: Final = 3  # in a row; after that it is not the requests' fault
_RETRY_S: Final = 2
_FEW: Final = 2  # live jobs that one client may have in any case


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
        *,
        reads_ahead: bool = True,
    ) -> None:
        self.state = State.LOADING
        self.engine: Engine | None = None
        self.failure: BaseException | None = None
        self.turns = Turns()
        self.num_failures = 0
        self._open_engine = open_engine
        self._queue = queue
        self._on_change = on_change
        self._reads_ahead = reads_ahead
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
            while self._admit():
                self._serve(self.turns.begin())
        except BaseException as error:
            self.failure = error
            for job in (*self.turns.clear(), *self._queue.close()):
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

    def _admit(self) -> bool:
        """Let waiting jobs become live, as many as may; False when there are none, and will be
        none. Waits only where nothing is to be done.
        """
        turns = self.turns
        if not turns.has_others:
            job = self._queue.take()
            if job is None:
                return False
            turns.add(job)
        while (job := self._queue.take_ready(self._may_begin)) is not None:
            turns.add(job)
        return True

    def _may_begin(self, job: Job) -> bool:
        """Whether one more may be live. Replies of one request follow each other, and where many
        may be live, one client leaves room for another.
        """
        assert self.engine is not None
        live, most = self.turns.jobs, self.engine.plan.parallel
        num_own = sum(each.client == job.client for each in live)
        is_alone = all(each.group is not job.group for each in live)
        return len(live) < most and num_own < max(most - 1, _FEW) and is_alone

    def _serve(self, job: Job) -> None:
        """One turn of a job."""
        job.started_s = job.started_s or time.perf_counter()
        failure: str | None = None
        try:
            failure = self._write(job)
        except BaseException as end:
            job.fail(engine_failure(f"The engine ended: {type(end).__name__}: {end}."))
            raise
        finally:
            is_finished = job.is_done or failure is not None
            job.engine_s += self.turns.end(is_finished=is_finished)
            if is_finished:
                self._queue.release(job.client)
                self._queue.note_duration(job.engine_s)
        if failure is not None:
            self._recover(job, failure)
            return
        if is_finished:
            self._failures_in_a_row = 0
            if not self.turns.has_others and self._queue.is_idle(_REST_S):
                self._keep()

    def _should_pause(self, usage: Usage, switched_ms: float) -> bool:
        """Whether the running job's slice is over, and others want theirs."""
        turns, switch_s = self.turns, (usage.switch_ms - switched_ms) / 1000
        if not turns.is_over(switch_s, is_awaited=True):
            return False
        is_awaited = turns.has_fresh or self._queue.has_ready(self._may_begin)
        return is_awaited or (turns.has_others and turns.is_over(switch_s))

    def _keep(self) -> None:
        """Use the moment, until something comes; an engine that cannot keep the conversation will
        read it again.
        """
        assert self.engine is not None
        try:
            if self._reads_ahead:
                num_read = self.engine.read_ahead(self._is_wanted)
                log_event("read ahead", tokens=num_read)
            self.engine.offload(self._is_wanted)
        except Exception as error:
            log_event("nothing kept", error=f"{type(error).__name__}: {error}")

    def _is_wanted(self) -> bool:
        return not self._queue.is_idle(0)

    def _write(self, job: Job) -> str | None:
        """Run a job to its end or its next pause, or to what broke the engine, which is then
        returned. In words: the exception would keep alive all that it passed through, and so the
        engine.
        """
        assert self.engine is not None
        if job.is_cancelled and not job.has_begun:
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
            usage = generation.usage
            generation.pause_when(partial(self._should_pause, usage, usage.switch_ms))
            for delta in job.write(generation) if not job.is_cancelled else ():
                if delta.kind is DeltaKind.PAUSE:
                    return None
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
        for other in self.turns.clear():
            if other.restart():
                self.turns.add(other)
            else:
                other.fail(busy(503, "The engine failed, and is opened again.", _RETRY_S))
                self._queue.release(other.client)
        self._close()
        gc.collect()
        self._open()


def explain(error: Exception, engine: "Engine") -> ApiError:
    """A request that the engine does not take, in the words of the API."""
    if isinstance(error, CapacityError):
        limit = engine.plan.max_ctx
        sentence = f"This model's maximum context length is {limit} tokens. {error}"
        # OpenAI's clients know it by its code, llama.cpp's by its type and the two numbers.
        too_long = ApiError(400, sentence, kind=TOO_LONG, code="context_length_exceeded")
        if error.num_tokens is not None:
            too_long.details = {"n_prompt_tokens": error.num_tokens, "n_ctx": limit}
        return too_long
    text = str(error).strip()
    sentence = text[:1].upper() + text[1:]
    return ApiError(400, sentence if sentence.endswith(".") else f"{sentence}.")
