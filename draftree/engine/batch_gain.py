"""Whether requests should write side by side: what shared passes give, beside rounds of one.

In: when steps and passes begin, what they wrote, what passes took. Out: whether a number of rows is
worth it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

_WEIGHT, _MOST_WEIGHT = 0.05, 0.5  # of a pass or step in the running means; of several
_NUM_COLD = 2  # passes of a size for which much is made
_KNOWN_S = 60.0  # after which what is not in use is tried again


@dataclass(slots=True)
class _Known:
    """Of passes of a size."""

    pass_s: float
    noted_s: float  # when


class BatchGain:
    """In tokens a second, with all that comes with steps and passes, as far as the next ones."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._alone_tokens = self._alone_s = 0.0
        self._beside_s = 0.0  # what comes with a pass
        self._known: dict[int, _Known] = {}
        self._num_passes: dict[int, int] = {}
        self._running: object = None  # whose step or passes
        self._start_s = self._passes_s = 0.0
        self._count = 0

    def begin(self, who: object) -> None:
        """A step of one by itself, or passes of several; perhaps after the last of the same."""
        now = self._clock()
        if who == self._running and self._count and self._passes_s:
            beside_s = (now - self._start_s - self._passes_s) / self._count
            weight = min(_WEIGHT * self._count, _MOST_WEIGHT)
            self._beside_s += weight * (beside_s - self._beside_s)
        elif who == self._running:
            self._alone_tokens += _WEIGHT * (self._count - self._alone_tokens)
            self._alone_s += _WEIGHT * (now - self._start_s - self._alone_s)
        self._running, self._start_s, self._passes_s, self._count = who, now, 0.0, 0

    def note_step(self, num_tokens: int) -> None:
        """The step wrote so many."""
        self._count = num_tokens

    def note_pass(self, num_rows: int, seconds: float) -> None:
        """Another pass."""
        self._count += 1
        self._passes_s += seconds
        count = self._num_passes[num_rows] = self._num_passes.get(num_rows, 0) + 1
        if count <= _NUM_COLD:
            return self.forget()
        known = self._known.setdefault(num_rows, _Known(seconds, 0.0))
        known.pass_s += _WEIGHT * (seconds - known.pass_s)
        known.noted_s = self._clock()

    def forget(self) -> None:
        """Something else comes between."""
        self._running = None

    def is_worth(self, num_rows: int, least_gain: float) -> bool:
        """Sizes of which nothing is known, or nothing new, are tried, unless fewer rows took too
        long for so many already.
        """
        if self._alone_s == 0.0:
            return True
        now = self._clock()
        fresh = {n: k for n, k in self._known.items() if now - k.noted_s < _KNOWN_S}
        fewer = max((n for n in fresh if n <= num_rows), default=0)
        if not fewer:
            return True
        rate = num_rows / (fresh[fewer].pass_s + self._beside_s)
        return rate > least_gain * self._alone_tokens / self._alone_s
