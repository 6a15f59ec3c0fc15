"""Which of the live jobs has the engine, and for how long. In: jobs. Out: the next one to run.

Everyone gets a slice of time in turn. Newcomers come first and soon, but only a few of them in a
row while others wait. A slice is longer where changing jobs took long, so that changes are a small
share of it. Knows neither engines nor what a job does.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from draftree.serve.queue import Job

SLICE_S: Final = 0.25
_MOST_FRESH: Final = 3  # newcomers in a row
_SWITCH_SHARE: Final = 0.05  # of a slice that may go into changing jobs
_AWAITED_S, _AWAITED_SHARE = 0.03, 0.25  # the same while somebody waits for a first token


class Turns:
    def __init__(
        self, slice_s: float = SLICE_S, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.running: Job | None = None
        self._slice_s, self._clock = slice_s, clock
        self._fresh: deque[Job] = deque()
        self._preempted: deque[Job] = deque()
        self._num_fresh = 0  # in a row, of those that went before others
        self._start_s = 0.0

    @property
    def preempted(self) -> list[Job]:
        """Those that have had a turn, and wait for the next."""
        return list(self._preempted)

    @property
    def jobs(self) -> list[Job]:
        """All that are live."""
        running = self.running
        return [*([running] if running is not None else ()), *self._fresh, *self._preempted]

    @property
    def has_others(self) -> bool:
        return bool(self._fresh or self._preempted)

    @property
    def has_fresh(self) -> bool:
        return bool(self._fresh)

    def add(self, job: Job) -> None:
        self._fresh.append(job)

    def begin(self) -> Job:
        """The next one's turn begins. Those that were cancelled take no time, and go first."""
        cancelled = next((job for job in self._preempted if job.is_cancelled), None)
        is_fresh = bool(self._fresh) and not (self._preempted and self._num_fresh >= _MOST_FRESH)
        if cancelled is not None:
            self._preempted.remove(cancelled)
            self.running = cancelled
        else:
            self.running = (self._fresh if is_fresh else self._preempted).popleft()
            self._num_fresh = self._num_fresh + 1 if is_fresh and self._preempted else 0
        self._start_s = self._clock()
        return self.running

    def is_over(self, switch_s: float, *, is_awaited: bool = False) -> bool:
        """Whether the running job has had its slice. switch_s: what it took to change to it.
        is_awaited: a newcomer is next.
        """
        least_s, share = self._slice_s, _SWITCH_SHARE
        if is_awaited:
            least_s, share = min(least_s, _AWAITED_S), _AWAITED_SHARE
        return self._clock() - self._start_s >= max(least_s, switch_s / share)

    def end(self, *, is_finished: bool) -> float:
        """The running job's turn is over; seconds that it took."""
        if self.running is not None and not is_finished:
            self._preempted.append(self.running)
        self.running = None
        return self._clock() - self._start_s

    def clear(self) -> list[Job]:
        """Those that were live and did not run."""
        jobs = [*self._fresh, *self._preempted]
        self._fresh.clear()
        self._preempted.clear()
        return jobs
