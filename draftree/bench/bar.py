"""What we ask of ourselves: a bar for each figure, and an aim beyond it. In: results. Out: who
passes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from draftree.bench.record import Json

SMOLLM2: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CODER: Final = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
SYNTH: Final = "836bb92eea80c8e62f8f87fa0753af5631bfefb0ff50c6341be3ad46a28fc0f5"
_NAMES: Final = {
    SMOLLM2: "SmolLM2-135M Q4_1",
    CODER: "Qwen2.5-Coder-0.5B Q4_K_M",
    SYNTH: "27B shapes, Q4_K_M",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """read: the figure in the measures of a result of this kind, for the file with this hash."""

    what: str
    kind: str
    sha256: str
    read: Callable[[Json], float]
    is_at_least: bool
    bar: float
    aim: float
    unit: str = "×"

    @property
    def model(self) -> str:
        return _NAMES[self.sha256]


@dataclass(frozen=True, slots=True)
class Verdict:
    """value None: there is no result for it."""

    bar: Bar
    value: float | None

    @property
    def words(self) -> str:
        if self.value is None:
            return "not measured"
        if self._reaches(self.bar.aim):
            return "aim reached"
        return "bar passed" if self._reaches(self.bar.bar) else "missed"

    def _reaches(self, limit: float) -> bool:
        assert self.value is not None
        return self.value >= limit if self.bar.is_at_least else self.value <= limit


def _decode_ratio(measures: Json) -> float:
    return float(measures["decode"]["ratio"]["value"])


def _prefill_ratio(measures: Json) -> float:
    return float(measures["prefill"]["512"]["ratio"]["value"])


def _perplexity_percent(measures: Json) -> float:
    return round(100 * abs(measures["ours_over_llama"]), 4)


def _unexplained(measures: Json) -> float:
    groups = (measures["greedy"], measures["first_choices"])
    return float(sum(len(g["disagreements"]) - g["num_explained"] for g in groups))


def _overhead_ratio(measures: Json) -> float:
    """Of tokens per second as `draftree run` counts them: from the first one on."""
    return float(measures["decode_ratio"]["value"])


def _bars_of(
    sha256: str, decode: tuple[float, float], prefill: tuple[float, float]
) -> tuple[Bar, ...]:
    def memory(measures: Json) -> float:
        return float(measures["ratio"]["median"])

    return (
        Bar("decode against llama.cpp", "peers", sha256, _decode_ratio, True, *decode),
        Bar("prefill of 512 against llama.cpp", "peers", sha256, _prefill_ratio, True, *prefill),
        Bar("memory over files loaded, 2K context", "memory", sha256, memory, False, 1.3, 1.1),
        Bar(
            "perplexity, distance from llama.cpp",
            *("parity", sha256, _perplexity_percent, False, 0.5, 0.1, "%"),
        ),
        Bar("unexplained disagreements", "parity", sha256, _unexplained, False, 0.0, 0.0, ""),
    )


def _card_bars() -> tuple[Bar, ...]:
    """Of a large card: what the flagship's shapes must reach there."""

    def median(name: str, key: str = "") -> Callable[[Json], float]:
        return lambda m: float((m[name][key] if key else m[name])["median"])

    def bar(
        what: str, read: Callable[[Json], float], more: bool, bar: float, aim: float, unit: str
    ) -> Bar:
        return Bar(what, "card", SYNTH, read, more, bar, aim, unit)

    def unequal(measures: Json) -> float:
        return float(sum(e["num_texts"] - e["num_equal"] for e in measures["equality"].values()))

    return (
        bar("plain decoding", median("plain", "512"), True, 150, 220, "tok/s"),
        bar("one round, budget 22", median("round_ms", "512"), False, 10, 7, "ms"),
        bar("pass of 24 tokens", median("forward_ms", "24"), False, 8.5, 5.5, "ms"),
        bar("prefill of 2048", median("prefill", "2048"), True, 8000, 12000, "tok/s"),
        bar("prefill of 13312", median("prefill", "13312"), True, 8000, 12000, "tok/s"),
        bar("plain decoding at depth 65536", median("plain", "65536"), True, 130, 190, "tok/s"),
        bar("peak memory, draft, 8K", median("peak_gib"), False, 22.35, 21, "GiB"),
        bar("loading, file cached", median("load_s"), False, 25, 10, "s"),
        bar("texts that drafting changed", unequal, False, 0, 0, ""),
    )


BARS: Final = (
    *_bars_of(SMOLLM2, (1.2, 1.6), (2.5, 5.0)),
    Bar(
        "pass of 8 tokens over pass of 1",
        *("decode", SMOLLM2, lambda m: float(m["eight_over_one"]["value"]), False, 2.5, 2.0),
    ),
    Bar(
        "warm start to first token",
        *("start", SMOLLM2, lambda m: float(m["first_token_s"]["median"]), False, 2.0, 1.0, "s"),
    ),
    Bar("server against the engine alone", "overhead", SMOLLM2, _overhead_ratio, True, 0.97, 0.99),
    *_bars_of(CODER, (1.0, 1.3), (2.0, 4.0)),
    Bar("server against the engine alone", "overhead", CODER, _overhead_ratio, True, 0.97, 0.99),
    *_card_bars(),
)


def judge_bars(records: Iterable[Json]) -> list[Verdict]:
    """records of one machine; check_same_machine is the caller's."""
    found = {(r["kind"], r["model"]["sha256"]): r["measures"] for r in records}
    verdicts = []
    for bar in BARS:
        measures = found.get((bar.kind, bar.sha256))
        verdicts.append(Verdict(bar, None if measures is None else bar.read(measures)))
    return verdicts
