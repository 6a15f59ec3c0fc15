"""Repeated measurements and what is made of them: medians, extremes and ratios."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from draftree.errors import BenchError

Report = Callable[[str], None]  # told what is being measured; "… 2 of 5" moves a bar


@dataclass(frozen=True, slots=True)
class Samples:
    """Raw values in the order they were taken. low and high are the extremes."""

    unit: str
    median: float
    low: float
    high: float
    samples: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Ratio:
    """value: one median over another. low and high: the extremes among pairs of the same round."""

    value: float
    low: float
    high: float


def summarize(values: Sequence[float], unit: str) -> Samples:
    if not values:
        raise BenchError("There is nothing to summarise; take at least one round.")
    rounded = tuple(round(value, 4) for value in values)
    return Samples(unit, round(median(values), 4), min(rounded), max(rounded), rounded)


def medians(samples: Mapping[str, Samples]) -> dict[str, float]:
    return {name: item.median for name, item in samples.items()}


def divide(ours: Samples, theirs: Samples) -> Ratio:
    """Ours over theirs, where both were measured in turns."""
    pairs = pairs_of(ours, theirs)
    value = ours.median / theirs.median
    return Ratio(round(value, 4), round(min(pairs), 4), round(max(pairs), 4))


def pairs_of(ours: Samples, theirs: Samples) -> list[float]:
    """Ours over theirs, round by round."""
    if ours.unit != theirs.unit:
        raise BenchError(f"{ours.unit} cannot be compared with {theirs.unit}.")
    if min(theirs.samples) <= 0.0:
        raise BenchError(f"A measurement of 0 {theirs.unit} cannot be compared with.")
    return [a / b for a, b in zip(ours.samples, theirs.samples, strict=True)]


def rates(num_tokens: int, times_ms: Sequence[float]) -> Samples:
    """Tokens per second from milliseconds."""
    return summarize([1000.0 * num_tokens / ms for ms in times_ms], "tok/s")
