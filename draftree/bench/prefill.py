"""Our prefill alone: tokens per second by length of the prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from draftree.bench.median import Report, Samples, medians, rates
from draftree.bench.subject import PLAIN, Subject
from draftree.config import EngineConfig

LENS: Final = (64, 256, 512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class PrefillMeasures:
    by_len: dict[str, Samples]

    def headline(self) -> dict[str, Any]:
        return {"tokens_per_second": medians(self.by_len)}


def measure_prefill(
    path: Path, threads: int, rounds: int, report: Report, lens: Sequence[int] = LENS
) -> PrefillMeasures:
    subject = Subject(path, EngineConfig(**PLAIN, threads=threads, max_ctx=max(lens) + 16))
    try:
        text = subject.window(max(lens))
        subject.prefill(text[: min(lens)])
        times: dict[int, list[float]] = {length: [] for length in lens}
        for number in range(rounds):
            for length in lens:
                report(f"prefill {length}: round {number + 1} of {rounds}")
                times[length].append(subject.prefill(text[:length]))
    finally:
        subject.close()
    return PrefillMeasures({str(n): rates(n, values) for n, values in times.items()})
