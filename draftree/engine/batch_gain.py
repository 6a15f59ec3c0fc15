"""Whether requests should write side by side: what shared passes gave, beside rounds of one.

In: when steps and passes begin, and what they wrote. Out: whether a number of rows is worth it.
"""

import time
from collections.abc import Callable

_WEIGHT, _MOST_WEIGHT = 0.05, 0.5  # of a pass or step in the running means; of several
_KNOWN_S = 60.0  # after which what is not in use is tried again


class BatchGain:
    """What passes of several sequences are worth, in tokens a second, beside rounds of one: with
    all that comes with them, as far as the next ones.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._alone_tokens = self._alone_s = 0.0
        self._pass_s: dict[int, float] = {}
        self._noted_s: dict[int, float] = {}
        self._warm: set[int] = set()
        self._running: tuple[object, float, int] = None, 0.0, 0  # whose step, since when, how much

    def begin(self, who: object, num_rows: int = 0) -> None:
        """A step of one by itself, or passes of so many rows, now or after the last of the same."""
        now, (last, start_s, count) = self._clock(), self._running
        if last == who and num_rows:
            self._note_passes(num_rows, count, now - start_s)
        elif last == who:
            self._note_alone(count, now - start_s)
        self._running = who, now, 0

    def end(self, count: int) -> None:
        """So many tokens or passes were written, and nothing else has begun."""
        who, start_s, _ = self._running
        self._running = who, start_s, count

    def forget(self) -> None:
        """Something else comes between."""
        self._running = None, 0.0, 0

    def _note_alone(self, num_tokens: int, seconds: float) -> None:
        self._alone_tokens += _WEIGHT * (num_tokens - self._alone_tokens)
        self._alone_s += _WEIGHT * (seconds - self._alone_s)

    def _note_passes(self, num_rows: int, num_passes: int, seconds: float) -> None:
        """The first ones of a size are not counted: much is made for them."""
        if num_passes and num_rows in self._warm:
            mean_s = seconds / num_passes
            known = self._pass_s.get(num_rows, mean_s)
            weight = min(_WEIGHT * num_passes, _MOST_WEIGHT)
            self._pass_s[num_rows] = known + weight * (mean_s - known)
            self._noted_s[num_rows] = self._clock()
        self._warm.add(num_rows)

    def is_worth(self, num_rows: int, least_gain: float) -> bool:
        """Sizes of which nothing is known, or nothing new, are tried."""
        known = self._pass_s.get(num_rows)
        if known is None or self._alone_s == 0.0:
            return True
        if num_rows / known > least_gain * self._alone_tokens / self._alone_s:
            return True
        return self._clock() - self._noted_s[num_rows] > _KNOWN_S
