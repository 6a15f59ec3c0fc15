"""How much of the machine's time others took while we measured.

In: two looks at the system's counters. Out: a share of all cores' time, between 0 and 1, or None
where the system has no such counters. Time that a hypervisor took counts as well.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_COUNTERS: Final = Path("/proc/stat")
_IDLE: Final = (3, 4)  # idle, waiting for the disk
_GUEST: Final = 8  # counted in user time already


@dataclass(frozen=True, slots=True)
class Look:
    """Seconds: on the clock, of busy cores, and of our own processes with their ended children."""

    clock: float
    busy: float
    own: float


def look() -> Look | None:
    if not _COUNTERS.exists():
        return None
    fields = _COUNTERS.read_text(encoding="utf-8").splitlines()[0].split()[1:]
    ticks = [int(field) for field in fields]
    busy = sum(value for i, value in enumerate(ticks[:_GUEST]) if i not in _IDLE)
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return Look(time.perf_counter(), busy / os.sysconf("SC_CLK_TCK"), own)


def foreign_share(before: Look | None, after: Look | None, num_cores: int) -> float | None:
    """The part of the cores' time between two looks that was neither ours nor idle."""
    if before is None or after is None or after.clock <= before.clock:
        return None
    foreign = (after.busy - before.busy) - (after.own - before.own)
    return round(max(foreign, 0.0) / ((after.clock - before.clock) * num_cores), 4)
