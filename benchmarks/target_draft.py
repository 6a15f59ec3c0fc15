"""Targets of packaged drafts and of prompt compression: the same on every machine."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from benchmarks.compress_session import right_over_plain
from benchmarks.section_compress import worst_of_auto
from benchmarks.verdict import CODER, CODER_LARGE, HYBRID, SMOLLM2, Target
from draftree.bench.record import Json

DRAFT_KIND: Final = "acceptance"


def _lengths(measures: Json, temperature: float, **shape: int) -> dict[str, float]:
    """By data set; of trees of 22 nodes, or of another shape."""
    wanted = {"temperature": temperature, **(shape or {"budget": 22})}
    return {
        run["data"]: float(run["acceptance_length"])
        for run in measures["runs"]
        if wanted.items() <= run["setting"].items()
    }


def _mean(temperature: float) -> Callable[[Json], float | None]:
    def read(measures: Json) -> float | None:
        lengths = _lengths(measures, temperature)
        return round(sum(lengths.values()) / len(lengths), 2) if len(lengths) == 4 else None

    return read


def _over_chain(temperature: float) -> Callable[[Json], float | None]:
    """The tree's mean over that of a chain of 15."""

    def read(measures: Json) -> float | None:
        trees = _lengths(measures, temperature)
        chains = _lengths(measures, temperature, budget=15, block=16)
        is_whole = len(trees) == len(chains) == 4
        return round(sum(trees.values()) / sum(chains.values()), 3) if is_whole else None

    return read


def _humaneval(measures: Json) -> float | None:
    return _lengths(measures, 0.0).get("humaneval")


def _unequal(measures: Json) -> float:
    return float(sum(run["num_prompts"] - run["num_equal"] for run in measures["runs"]))


def _length(
    what: str, sha256: str, read: Callable[[Json], float | None], limit: float, aim: float
) -> Target:
    what = f"acceptance length, budget 22, {what}"
    return Target(what, DRAFT_KIND, sha256, read, True, limit, aim, "")


def _no_changes(sha256: str) -> Target:
    return Target("texts that drafting changed", DRAFT_KIND, sha256, _unequal, False, 0, 0, "")


DRAFT_TARGETS: Final = (
    _length("mean of four sets", SMOLLM2, _mean(0.0), 4.5, 5.2),
    _length("the same at T = 0.8", SMOLLM2, _mean(0.8), 3.3, 3.8),
    _no_changes(SMOLLM2),
    _length("mean of four sets", CODER, _mean(0.0), 4.0, 5.0),
    _length("humaneval", CODER, _humaneval, 5.0, 6.0),
    _no_changes(CODER),
    _length("over a chain of 15", HYBRID, _over_chain(0.0), 1.0, 1.1),
    _length("over a chain of 15, T = 0.8", HYBRID, _over_chain(0.8), 1.0, 1.1),
    _no_changes(HYBRID),
)

COMPRESS_KIND: Final = "compress"
SESSION_KIND: Final = "compress-session"
COMPRESSED: Final = {  # by the folder of their results
    "qwen2.5-coder-0.5b": CODER,
    "qwen2.5-coder-1.5b": CODER_LARGE,
}


def _both_over_faster(measures: Json) -> float:
    return float(measures["both_over_faster"])


def _compress_targets(sha256: str) -> tuple[Target, ...]:
    """Of a model that was not measured nothing is asked."""
    targets = (
        Target(
            "`auto` over the whole text, worst kind and scorer",
            *(COMPRESS_KIND, sha256, worst_of_auto, True, 0.95, 1.0),
        ),
        Target(
            "session: cache and compression over the faster of the two alone",
            *(SESSION_KIND, sha256, _both_over_faster, False, 1.0, 0.95),
        ),
        Target(
            "session: right tool calls, both over the whole conversation",
            *(SESSION_KIND, sha256, right_over_plain, True, 1.0, 1.0),
        ),
    )
    return tuple(replace(target, is_optional=True) for target in targets)


COMPRESS_TARGETS: Final = (*_compress_targets(CODER), *_compress_targets(CODER_LARGE))


def _mean_speed_up(measures: Json) -> float | None:
    rates = [float(item["speed_up"]) for item in measures["sets"].values()]
    return round(sum(rates) / len(rates), 3) if len(rates) == 4 else None


def _lowest_speed_up(measures: Json) -> float | None:
    rates = [float(item["speed_up"]) for item in measures["sets"].values()]
    return min(rates) if len(rates) == 4 else None


def _speed_up(sha256: str, limit: float, aim: float) -> Target:
    what = "speculative over plain, greedy, mean of four sets"
    return Target(what, "suite", sha256, _mean_speed_up, True, limit, aim)


def _sampled(limit: float, aim: float) -> Target:
    what = "speculative over plain, T = 0.8, mean of four sets"
    return Target(what, "suite-sampled", SMOLLM2, _mean_speed_up, True, limit, aim)


CPU_SUITE_TARGETS: Final = (
    _speed_up(SMOLLM2, 1.5, 1.8),
    _sampled(1.15, 1.3),
    Target(
        "speculative over plain, T = 0.8, slowest set",
        *("suite-sampled", SMOLLM2, _lowest_speed_up, True, 1.0, 1.0),
    ),
    _speed_up(CODER, 1.6, 2.0),
)
GPU_SUITE_TARGETS: Final = (
    _speed_up(SMOLLM2, 3.0, 3.6),
    _sampled(2.3, 2.8),
    _speed_up(CODER, 2.5, 3.2),
)
