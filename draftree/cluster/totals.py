"""Metrics of all replicas as one text. In: what each says to Prometheus. Out: the sum.

Counts of replicas that are gone stay in the sum, as far as they had been asked for.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from draftree.cluster.message import Report

Families = dict[str, dict[str, float]]  # samples by name and labels, by the lines above them

_HELP: Final = "# HELP "
_AL: Final = "draftree_acceptance_length"
_TOKENS, _ROUNDS = "draftree_completion_tokens_total", "draftree_rounds_total"


class Totals:
    def __init__(self) -> None:
        self._latest: dict[str, Families] = {}
        self._gone: Families = {}

    def render(self, reports: Sequence[Report]) -> str:
        latest = {report.name: _read(report.metrics) for report in reports}
        for name in self._latest.keys() - latest.keys():
            families = self._latest[name].items()
            counts = {head: samples for head, samples in families if not _is_gauge(head)}
            self._gone = _add(self._gone, counts)
        self._latest = latest
        total = _add(*latest.values(), self._gone)
        values = {name: value for samples in total.values() for name, value in samples.items()}
        for samples in total.values():
            if _AL in samples:
                samples[_AL] = round(values[_TOKENS] / max(values[_ROUNDS], 1), 4)
        return "".join(
            f"{head}\n" + "".join(f"{name} {value:.12g}\n" for name, value in samples.items())
            for head, samples in total.items()
        )


def _is_gauge(head: str) -> bool:
    return head.endswith(" gauge")


def _read(text: str) -> Families:
    families: Families = {}
    for block in text.split(_HELP)[1:]:
        what, kind, *lines = block.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines)
        families[f"{_HELP}{what}\n{kind}"] = {name: float(value) for name, value in pairs}
    return families


def _add(*several: Families) -> Families:
    total: Families = {}
    for families in several:
        for head, samples in families.items():
            own = total.setdefault(head, defaultdict(float))
            for name, value in samples.items():
                own[name] += value
    return total
