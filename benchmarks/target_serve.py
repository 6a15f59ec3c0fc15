"""Targets of many clients: of one server on two cores, and of replicas. See http and cluster."""

from collections.abc import Callable
from statistics import fmean
from typing import Final

from benchmarks.verdict import CODER, SMOLLM2, Target
from draftree.bench.record import Json


def _client_targets(sha256: str, first_s: float) -> tuple[Target, ...]:
    """Clients of one server on two cores. first_s: what llama.cpp's server had with eight
    elsewhere, to judge by where it was not measured on the same machine.
    """

    def mean_first_s(measures: Json) -> float | None:
        level = measures["levels"].get("8")
        return level and round(fmean(level["ttft_ms"]["samples"]) / 1000, 3)

    def alone_s(measures: Json) -> float | None:
        return None if measures.get("peer") else mean_first_s(measures)

    def behind_s(measures: Json) -> float | None:
        behind = measures.get("behind")
        return behind and round(behind["ttft_ms"]["median"] / 1000, 3)

    def over_llama(read: Callable[[Json], float | None]) -> Callable[[Json], float | None]:
        def ratio(measures: Json) -> float | None:
            ours, other = read(measures), read(measures.get("peer") or {"levels": {}})
            return round(ours / other, 3) if ours and other else None

        return ratio

    def rate(measures: Json) -> float | None:
        level = measures["levels"].get("8")
        return level and float(level["throughput"])

    def shared_over_alone(measures: Json) -> float | None:
        unbatched = (measures.get("unbatched") or {"levels": {}})["levels"].get("4")
        shared = measures["levels"].get("4")
        return unbatched and round(shared["throughput"] / unbatched["throughput"], 3)

    def target(
        what: str, read: Callable[[Json], float | None], limit: float, *, is_optional: bool = False
    ) -> Target:
        args = what, "http", sha256, read, False, limit, limit / 2, "s"
        return Target(*args, is_optional=is_optional)

    with_8 = "with 8 clients, over llama.cpp's server"
    return (
        target("first token with 8 clients, mean", alone_s, first_s, is_optional=True),
        target("first token of a short request behind a long reply", behind_s, 0.5),
        Target(
            f"first token, mean, {with_8}", "http", sha256, over_llama(mean_first_s), False, 1, 0.5
        ),
        Target(f"tokens per second {with_8}", "http", sha256, over_llama(rate), True, 1, 2),
        Target(
            "tokens per second with 4 clients, shared passes over none",
            *("http", sha256, shared_over_alone, True, 1, 1.8, "×"),
            is_optional=True,
        ),
    )


def _turns_over_one(measures: Json) -> float | None:
    ratio = measures.get("turns_over_one")
    return ratio and float(ratio["value"])


def _cluster_targets() -> tuple[Target, ...]:
    """Replicas of one thread each, on a machine of two cores."""

    def target(
        what: str, read: Callable[[Json], float], more: bool, limit: float, aim: float, unit: str
    ) -> Target:
        return Target(what, "cluster", SMOLLM2, read, more, limit, aim, unit)

    return (
        target(
            "two replicas over one, 8 clients",
            *(lambda m: float(m["two_over_one"]["value"]), True, 1.8, 1.95, "×"),
        ),
        Target(
            "two replicas over one, 8 clients, no shared passes",
            *("cluster", SMOLLM2, _turns_over_one, True, 1.8, 1.95, "×"),
            is_optional=True,
        ),
        target(
            "later turns that went where their beginning was read",
            *(lambda m: 100 * float(m["routing"]["hit_rate"]), True, 90, 99, "%"),
        ),
        target(
            "replies lost or mixed up while replicas were killed",
            *(lambda m: float(m["chaos"]["num_faults"]), False, 0, 0, ""),
        ),
        target(
            "`draftree cluster` to the first token",
            *(lambda m: float(m["first_token_s"]["median"]), False, 30, 15, "s"),
        ),
    )


SERVE_TARGETS: Final = (
    *_client_targets(SMOLLM2, 0.8),
    *_client_targets(CODER, 1.5),
    *_cluster_targets(),
)
