"""Whether requests should write side by side: what shared passes give, beside rounds of one.

In: when steps and passes begin, what they wrote, what passes took. Out: whether a number of rows is
worth it. What is old says nothing of the texts of now, so both sides are measured again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

_WEIGHT, _MOST_WEIGHT = 0.05, 0.5  # of a pass or step in the running means; of several
_NUM_COLD = 2  # steps, and passes of a size, for which much is made
_LEAST_STEPS = 8  # of requests by themselves, before passes are compared with them
_KNOWN_S = 60.0  # after which something is old
_MOST_GROWTH = 2.0  # of what comes with a pass: more was a pause of the machine


@dataclass(slots=True)
class _Shared:
    """Passes of a size."""

    pass_s: float
    noted_s: float  # when
    beside_s: float | None = None  # what comes with a pass, until the next one


@dataclass(slots=True)
class _Alone:
    """Steps of requests by themselves, the means of them."""

    num_steps: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    noted_s: float = 0.0


class BatchGain:
    """In tokens a second, with all that comes with steps and passes, as far as the next ones."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._alone, self._shared = _Alone(), dict[int, _Shared]()
        self._num_steps, self._num_passes = 0, dict[int, int]()
        self._running: object = None  # whose step or passes
        self._start_s = self._passes_s = 0.0
        self._count = self._num_rows = 0

    def begin(self, who: object) -> None:
        """A step of one by itself, or passes of several; perhaps after the last of the same."""
        now = self._clock()
        if who == self._running and self._count:
            took_s = now - self._start_s
            if self._num_rows:
                self._note_beside((took_s - self._passes_s) / self._count)
            else:
                self._note_alone(took_s, now)
        self._running, self._start_s, self._passes_s = who, now, 0.0
        self._count = self._num_rows = 0

    def note_step(self, num_tokens: int) -> None:
        """The step wrote so many."""
        self._count = num_tokens

    def note_pass(self, num_rows: int, seconds: float) -> None:
        """Another pass."""
        self._num_rows = num_rows
        self._count += 1
        self._passes_s += seconds
        count = self._num_passes[num_rows] = self._num_passes.get(num_rows, 0) + 1
        if count <= _NUM_COLD:
            return self.forget()
        now, shared = self._clock(), self._shared.get(num_rows)
        if shared is None or now - shared.noted_s >= _KNOWN_S:
            shared = self._shared[num_rows] = _Shared(seconds, now)
        shared.pass_s += _WEIGHT * (seconds - shared.pass_s)
        shared.noted_s = now

    def forget(self) -> None:
        """Something else comes between."""
        self._running = None

    def is_worth(self, num_rows: int, least_gain: float) -> bool:
        """Sizes of which nothing new is known are tried, unless fewer rows took too long for so
        many already.
        """
        now, alone = self._clock(), self._alone
        if alone.num_steps < _LEAST_STEPS or now - alone.noted_s >= _KNOWN_S:
            return False
        fresh = {n: s for n, s in self._shared.items() if now - s.noted_s < _KNOWN_S}
        fewer = max((n for n in fresh if n <= num_rows), default=0)
        if not fewer:
            return True
        rate = num_rows / (fresh[fewer].pass_s + (fresh[fewer].beside_s or 0.0))
        return rate > least_gain * alone.tokens / alone.seconds

    def _note_alone(self, took_s: float, now: float) -> None:
        self._num_steps += 1
        if self._num_steps <= _NUM_COLD:
            return
        alone = self._alone
        if now - alone.noted_s >= _KNOWN_S:
            alone.num_steps = 0
        alone.num_steps += 1
        weight = max(_WEIGHT, 1 / alone.num_steps)
        alone.tokens += weight * (self._count - alone.tokens)
        alone.seconds += weight * (took_s - alone.seconds)
        alone.noted_s = now

    def _note_beside(self, beside_s: float) -> None:
        shared = self._shared.get(self._num_rows)
        if shared is None:
            return
        if shared.beside_s is None:
            shared.beside_s = min(beside_s, shared.pass_s)
            return
        most = _MOST_GROWTH * (shared.pass_s + shared.beside_s)
        weight = min(_WEIGHT * self._count, _MOST_WEIGHT)
        shared.beside_s += weight * (min(beside_s, most) - shared.beside_s)
