"""Measurements in parts, each of which is written to the result file as soon as it is there.

In: named parts, a limit in seconds. Out: one result. A part that an earlier run of the same kernels
measured stays until it is measured again, so that a run may be cut short, or asked for one part.
"""

import json
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.result import is_of_one_kind
from draftree.bench.disturbance import foreign_share, look
from draftree.bench.median import Report
from draftree.bench.record import Json, ModelId, make_record, write_record
from draftree.errors import BenchError
from draftree.memory import usable_cores

Parts = dict[str, Json]


class Deadline:
    """When to stop: asked between steps."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._end_s = clock, clock() + limit_s

    @property
    def left_s(self) -> float:
        return self._end_s - self._clock()

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0.0


@dataclass(frozen=True, slots=True)
class PartMeasures:
    """parts: by name, what each measured. took_s: how long that took."""

    device: str
    parts: Parts
    took_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class PartResult:
    """Which file is written, and what is said of it."""

    folder: Path
    kind: str
    model: ModelId
    settings: Json
    device: str

    def read(self) -> PartMeasures:
        """What is there already from the same kernels; a damaged file is as good as none."""
        path = self.folder / f"{self.kind}-{self.model.name}.json"
        empty = PartMeasures(self.device, {}, {})
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            fresh = self._record(empty, None)
            same = is_of_one_kind(found, fresh) and found["settings"] == fresh["settings"]
            parts, took_s = found["measures"]["parts"], found["measures"]["took_s"]
        except (OSError, ValueError, KeyError, TypeError):
            return empty
        return PartMeasures(self.device, parts, took_s) if same else empty

    def write(self, measures: PartMeasures, disturbance: float | None) -> Path:
        return write_record(self.folder, self._record(measures, disturbance))

    def _record(self, measures: PartMeasures, disturbance: float | None) -> Json:
        return make_record(self.kind, self.model, self.settings, measures, disturbance)


def run_parts(
    result: PartResult,
    parts: Mapping[str, Callable[[], Json]],
    deadline: Deadline,
    report: Report,
) -> Json:
    """Measure one part after the other, and write the file after each. One that fails, or comes
    too late, is left out and said so. Returns the line that a command ends with.
    """
    before, done = look(), result.read()
    found, took_s = dict(done.parts), dict(done.took_s)
    left_out: dict[str, str] = {}
    for name, measure in parts.items():
        if deadline.is_over:
            left_out[name] = "there was no time left"
            continue
        report(f"{name}: {deadline.left_s:.0f} s left")
        start = time.monotonic()
        try:
            found[name] = measure()
        except Exception as error:  # the other parts can still be had
            left_out[name] = f"{type(error).__name__}: {error}"
            report(f"{name} failed: {traceback.format_exc()}")
            continue
        took_s[name] = round(time.monotonic() - start, 1)
        share = foreign_share(before, look(), usable_cores())
        path = result.write(PartMeasures(result.device, found, took_s), share)
        report(f"{name}: took {took_s[name]} s, written to {path}")
    if not found:
        raise BenchError(f"Nothing could be measured: {left_out}.")
    line = {"kind": result.kind, "model": result.model.name, "left_out": left_out}
    return line | {"figures": shorten(found)}


def shorten(data: Any) -> Any:
    """Medians for samples, values for ratios, and no lists."""
    if not isinstance(data, Mapping):
        return data
    for key, others in (("median", "samples"), ("value", "low")):
        if key in data and others in data:
            return data[key]
    return {name: shorten(value) for name, value in data.items() if not isinstance(value, list)}


def choose_parts(
    wanted: Iterable[str], known: Mapping[str, Callable[[], Json]]
) -> dict[str, Callable[[], Json]]:
    """Those that were named, or all."""
    names = list(wanted) or list(known)
    missing = [name for name in names if name not in known]
    if missing:
        raise BenchError(f"There is no part {missing[0]!r}; known are {', '.join(known)}.")
    return {name: known[name] for name in names}
