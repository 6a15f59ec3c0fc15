"""Tables and numbers of a page."""

from collections.abc import Iterable, Sequence

from draftree.bench.record import Json


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def spread(samples: Json) -> str:
    """The median, and the extremes where there is more than one sample."""
    middle, low, high = (short(samples[key]) for key in ("median", "low", "high"))
    return f"{middle} [{low} to {high}]" if len(samples["samples"]) > 1 else middle


def short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
