"""Our decoding alone: tokens per second by depth, and the cost of a pass by number of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from draftree.bench.median import Ratio, Report, Samples, divide, medians, summarize
from draftree.bench.subject import PLAIN, Subject
from draftree.config import EngineConfig

DEPTHS: Final = (32, 512, 1024, 2048)
WIDTHS: Final = (1, 2, 4, 8, 16, 24, 32, 64)
_DEPTH_OF_PASSES: Final = 128
_STEPS_A_ROUND: Final = 8
_WARM_PASSES, _TIMED_PASSES = 4, 3


@dataclass(frozen=True, slots=True)
class DecodeMeasures:
    by_depth: dict[str, Samples]  # tok/s of single tokens after that many
    # Of a speculative pass by number of tokens, logits for all of them.
    forward_ms: dict[str, Samples]
    eight_over_one: Ratio

    def headline(self) -> dict[str, Any]:
        return {
            "tokens_per_second": medians(self.by_depth),
            "forward_ms": medians(self.forward_ms),
            "eight_over_one": self.eight_over_one.value,
        }


def measure_decode(
    path: Path, threads: int, rounds: int, report: Report, depths: Sequence[int] = DEPTHS
) -> DecodeMeasures:
    max_ctx = max(*depths, _DEPTH_OF_PASSES) + max(WIDTHS) + _STEPS_A_ROUND * (rounds + 1)
    budget = max(WIDTHS) - 1  # room for the logits of as many rows
    options = PLAIN | {"budget": budget, "ngram": "off", "threads": threads, "max_ctx": max_ctx}
    subject = Subject(path, EngineConfig(**options))
    try:
        text = subject.window(max(*depths, _DEPTH_OF_PASSES))
        forward = _measure_forward(subject, text[:_DEPTH_OF_PASSES], rounds, report)
        by_depth = {}
        for depth in depths:
            report(f"decode at depth {depth}")
            steps = subject.decode_steps(text[:depth], _STEPS_A_ROUND * rounds)
            by_depth[str(depth)] = summarize([1000.0 / ms for ms in steps], "tok/s")
    finally:
        subject.close()
    return DecodeMeasures(by_depth, forward, divide(forward["8"], forward["1"]))


def _measure_forward(
    subject: Subject, text: Sequence[int], rounds: int, report: Report
) -> dict[str, Samples]:
    """All widths in turns, so that a slow moment of the machine hits all of them."""
    subject.prefill(text)
    times: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for width in WIDTHS:
        subject.forward(width)
    for number in range(2 * rounds):
        report(f"passes of {WIDTHS[0]} to {WIDTHS[-1]} tokens: round {number + 1} of {2 * rounds}")
        for width in WIDTHS:
            # The first ones are slower after another width, a single token after 64 by a third.
            passes = [subject.forward(width) for _ in range(_WARM_PASSES + _TIMED_PASSES)]
            times[width] += passes[_WARM_PASSES:]
    return {str(width): summarize(values, "ms") for width, values in times.items()}
