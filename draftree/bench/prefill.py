"""Our prefill alone: tokens per second by length of the prompt, and shares of the operations of a
chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from draftree.bench.operation import Shares, measure_shares
from draftree.bench.sample import Report, Samples, rates
from draftree.bench.subject import Subject, plain_config

LENS: Final = (64, 256, 512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class PrefillMeasures:
    by_len: dict[str, Samples]
    shares: dict[str, Shares]  # of one chunk, by its number of tokens


def measure_prefill(
    path: Path, threads: int, rounds: int, report: Report, lens: Sequence[int] = LENS
) -> PrefillMeasures:
    subject = Subject(path, plain_config(threads, max(lens) + 16))
    try:
        (text,) = subject.windows(1, max(lens))
        subject.prefill(text[: min(lens)])
        times: dict[int, list[float]] = {length: [] for length in lens}
        for number in range(rounds):
            for length in lens:
                report(f"prefill {length}: round {number + 1} of {rounds}")
                times[length].append(subject.prefill(text[:length]))
        report("operations")
        chunk = min(subject.engine.plan.chunk, max(lens))
        shares = {str(chunk): measure_shares(subject, chunk, min(rounds, 3), head_rows=1)}
    finally:
        subject.close()
    return PrefillMeasures({str(n): rates(n, values) for n, values in times.items()}, shares)
