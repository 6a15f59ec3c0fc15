"""What we ask of ourselves: a target for each figure, and an aim beyond it. In: results. Out: a
verdict for each. A retired target is a figure without a verdict.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from benchmarks.gpu_depth import SMALL_UNLIMITED, UNLIMITED
from benchmarks.target_gpu import GPU_TARGETS
from benchmarks.target_serve import SERVE_TARGETS
from benchmarks.verdict import (
    CODER,
    CODER_LARGE,
    NEOVERSE_N1,
    SERVER,
    SMALL_BF16,
    SMALL_Q4,
    SMOLLM2,
    SYNTH,
    Target,
    Verdict,
)
from draftree.bench.record import Json


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


def _changed_texts(measures: Json) -> float:
    return float(sum(s["num_prompts"] - s["num_equal"] for s in measures["sets"].values()))


def _slowest_set(measures: Json) -> float:
    return float(min(item["speed_up"] for item in measures["sets"].values()))


def _targets_of(
    sha256: str, decode: tuple[float, float], prefill: tuple[float, float]
) -> tuple[Target, ...]:
    def memory(measures: Json) -> float:
        return float(measures["ratio"]["median"])

    def is_smallest(cpu: str) -> bool:
        """What a process needs besides weights is much beside a file of 98 MB."""
        return sha256 == SMOLLM2

    return (
        Target("decode against llama.cpp", "peers", sha256, _decode_ratio, True, *decode),
        Target("prefill of 512 against llama.cpp", "peers", sha256, _prefill_ratio, True, *prefill),
        Target(
            "memory over files loaded, 2K context",
            *("memory", sha256, memory, False, 1.3, 1.1),
            is_retired=is_smallest,
        ),
        Target(
            "perplexity, distance from llama.cpp",
            *("parity", sha256, _perplexity_percent, False, 0.5, 0.1, "%"),
        ),
        Target("unexplained disagreements", "parity", sha256, _unexplained, False, 0.0, 0.0, ""),
        Target("texts that drafting changed", "suite", sha256, _changed_texts, False, 0, 0, ""),
        Target("speculative over plain, slowest set", "suite", sha256, _slowest_set, True, 0.97, 1),
    )


_PASSES: Final = {"8": (5.2, 4.6), "16": (5.5, 4.8), "24": (5.9, 5.1), "32": (6.8, 5.7)}


def _gpu_targets() -> tuple[Target, ...]:
    """Of a large GPU: what the flagship's shapes must reach there."""

    def median(name: str, key: str = "") -> Callable[[Json], float]:
        return lambda m: float((m[name][key] if key else m[name])["median"])

    def target(
        what: str, read: Callable[[Json], float], more: bool, limit: float, aim: float, unit: str
    ) -> Target:
        return Target(what, "gpu", SYNTH, read, more, limit, aim, unit)

    def unequal(measures: Json) -> float:
        return float(sum(e["num_texts"] - e["num_equal"] for e in measures["equality"].values()))

    return (
        target("plain decoding", median("plain", "512"), True, 205, 230, "tok/s"),
        target("one round, budget 22", median("round_ms", "512"), False, 7.2, 6.2, "ms"),
        *(
            target(f"pass of {rows} tokens", median("forward_ms", rows), False, *limits, "ms")
            for rows, limits in _PASSES.items()
        ),
        target("prefill of 2048", median("prefill", "2048"), True, 8000, 12000, "tok/s"),
        target("prefill of 13312", median("prefill", "13312"), True, 8000, 12000, "tok/s"),
        target("plain decoding at depth 65536", median("plain", "65536"), True, 130, 190, "tok/s"),
        target("peak memory, draft, 8K", median("peak_gib"), False, 22.35, 21, "GiB"),
        target("loading, file cached", median("load_s"), False, 25, 10, "s"),
        target("texts that drafting changed", unequal, False, 0, 0, ""),
        *(
            Target("plain decoding", "gpu", shape, median("plain", "512"), True, *limits, "tok/s")
            for shape, limits in {SMALL_BF16: (1400, 1650), SMALL_Q4: (1800, 2500)}.items()
        ),
        *(
            Target(
                f"prefill of {length}",
                *("gpu", SMALL_BF16, median("prefill", length), True, *limits, "tok/s"),
            )
            for length, limits in {"512": (45e3, 80e3), "2048": (120e3, 250e3)}.items()
        ),
    )


def _round_over(depth: str) -> Callable[[Json], float | None]:
    """The shallowest one, with the whole GPU."""

    def read(measures: Json) -> float | None:
        rounds = measures["runs"].get(UNLIMITED, {}).get("round_ms", {})
        if depth not in rounds:
            return None
        return round(rounds[depth]["median"] / rounds["512"]["median"], 3)

    return read


def _prefill_to(depth: str, run: str = UNLIMITED) -> Callable[[Json], float | None]:
    def read(measures: Json) -> float | None:
        seconds = measures["runs"].get(run, {}).get("prefill_s", {})
        return float(seconds[depth]) if depth in seconds else None

    return read


def _small_prefill_over(depth: str) -> Callable[[Json], float | None]:
    """Keys and values of 4 bits over those of 16, each with the whole GPU."""

    def read(measures: Json) -> float | None:
        small, whole = (_prefill_to(depth, run)(measures) for run in (SMALL_UNLIMITED, UNLIMITED))
        return round(small / whole, 3) if small and whole else None

    return read


def _depth_targets() -> tuple[Target, ...]:
    """Long texts with the flagship's shapes: speed by format, rounds, prefill, what fits."""

    def target(
        what: str,
        read: Callable[[Json], float | None],
        more: bool,
        limit: float,
        aim: float,
        unit: str,
    ) -> Target:
        return Target(what, "gpu-depth", SYNTH, read, more, limit, aim, unit)

    def rate(run: str, depth: str) -> Callable[[Json], float | None]:
        def read(measures: Json) -> float | None:
            for name in (run, f"{run} unlimited"):  # not every format may fit
                rates = measures["runs"].get(name, {}).get("plain", {})
                if depth in rates:
                    return float(rates[depth]["median"])
            return None

        return read

    def context(run: str) -> Callable[[Json], float | None]:
        return lambda m: float(m["runs"][run]["max_ctx"]) if run in m["runs"] else None

    def unequal(measures: Json) -> float:
        return sum(float(r["num_texts"] - r["num_equal"]) for r in measures["runs"].values())

    rates = {"f16": (140, 150), "q8_0": (145, 150), "q4": (148, 150), "tq3_0": (145, 150)}
    contexts = {"f16": 65536, "q8_0": 131072, "q4": 262144, "tq3_0": 262144}
    seconds = {"65536": (8, 7), "131072": (20, 17), "261632": (55, 45)}
    return (
        *(
            target(f"plain decoding at 65536, {kv}", rate(kv, "65536"), True, limit, aim, "tok/s")
            for kv, (limit, aim) in rates.items()
        ),
        *(
            target(f"plain decoding at 262144, {kv}", rate(kv, "261632"), True, 110, 130, "tok/s")
            for kv in ("q4", "tq3_0")
        ),
        target("round at 65536 over 512", _round_over("65536"), False, 1.25, 1.12, "x"),
        target("round at 131072 over 512", _round_over("131072"), False, 1.45, 1.25, "x"),
        *(
            target(f"prefill of {depth}", _prefill_to(depth), False, limit, aim, "s")
            for depth, (limit, aim) in seconds.items()
        ),
        target("prefill of 65536, q4 over f16", _small_prefill_over("65536"), False, 1.1, 1.0, "x"),
        *(
            target(f"longest context in 24 GiB, {kv}", context(kv), True, length, length, "")
            for kv, length in contexts.items()
        ),
        target("texts that drafting changed, by format", unequal, False, 0, 0, ""),
    )


KV_KIND: Final = "kv-quality"


def _kv_targets(sha256: str) -> tuple[Target, ...]:
    def over_f16(name: str) -> Callable[[Json], float]:
        def read(measures: Json) -> float:
            longest = max(measures["lengths"], key=int)
            return round(100 * float(measures["lengths"][longest]["formats"][name]["over_f16"]), 3)

        return read

    limits = {"q8_0": (0.1, 0.05), "q4": (1.0, 0.4), "tq3_0": (4.0, 2.0)}
    return tuple(
        Target(
            f"perplexity in {name} over f16, longest texts",
            *(KV_KIND, sha256, over_f16(name), False, limit, aim, "%"),
        )
        for name, (limit, aim) in limits.items()
    )


TARGETS: Final = (
    *_targets_of(SMOLLM2, (1.2, 1.6), (2.5, 5.0)),
    Target(
        "pass of 8 tokens over pass of 1",
        *("decode", SMOLLM2, lambda m: float(m["eight_over_one"]["value"]), False, 2.5, 2.0),
        is_retired=lambda cpu: NEOVERSE_N1 in cpu,
    ),
    Target(
        "warm start to first token",
        *("start", SMOLLM2, lambda m: float(m["first_token_s"]["median"]), False, 2.0, 1.0, "s"),
    ),
    Target(
        "server against the engine alone", "overhead", SMOLLM2, _overhead_ratio, True, 0.97, 0.99
    ),
    *_targets_of(CODER, (1.0, 1.3), (2.0, 4.0)),
    Target("server against the engine alone", "overhead", CODER, _overhead_ratio, True, 0.97, 0.99),
    *SERVE_TARGETS,
    *_gpu_targets(),
    *_depth_targets(),
    *GPU_TARGETS,
    *_kv_targets(SMOLLM2),
    *_kv_targets(CODER),
    *_kv_targets(CODER_LARGE),
)


def _num_broken(measures: Json) -> float:
    return float(measures["num_failed"] + measures["num_hung"])


def _growth_mb(measures: Json) -> float:
    return round(measures["rss_mb"]["end"] - measures["rss_mb"]["warm"], 1)


def _late_growth_mb(measures: Json) -> float:
    """Of a server that keeps no conversations, in the second half of the requests."""
    samples = measures["no cache"]["samples"]
    return round(samples[-1]["rss_mb"] - samples[len(samples) // 2 - 1]["rss_mb"], 1)


def _beside_cache_mb(measures: Json) -> float:
    """What one that does has more at the end, without what the cache holds."""
    none, kept = (measures[bound]["samples"][-1] for bound in ("no cache", "default"))
    return round(kept["rss_mb"] - kept["kept_mb"] - none["rss_mb"], 1)


def _page_targets() -> tuple[Target, ...]:
    def target(
        what: str, read: Callable[[Json], float], limit: float, aim: float, unit: str
    ) -> Target:
        return Target(what, PAGE_KIND, SERVER, read, False, limit, aim, unit)

    def long(measures: Json) -> Json:
        found: Json = measures["long"]
        return found

    return (
        target("page: first paint", lambda m: float(m["first_paint_ms"]["median"]), 300, 150, "ms"),
        target("opening 1,000 messages", lambda m: float(long(m)["open_ms"]), 500, 200, "ms"),
        target(
            "19 of 20 frames while a reply comes to them",
            *(lambda m: float(long(m)["frame_ms"]["p95"]), 34, 17, "ms"),
        ),
        target("page: lines of JavaScript", lambda m: float(m["script_lines"]), 2500, 2500, ""),
    )


FUZZ_KIND: Final = "serve-fuzz"
GROWTH_KIND: Final = "serve-growth"
PAGE_KIND: Final = "serve-page"
SERVER_TARGETS: Final = (
    Target(
        "generated requests to all endpoints",
        *(FUZZ_KIND, SERVER, lambda m: float(m["num_cases"]), True, 10_000, 10_000, ""),
    ),
    Target("of these, 5xx or hung", FUZZ_KIND, SERVER, _num_broken, False, 0, 0, ""),
    Target("memory grown meanwhile", FUZZ_KIND, SERVER, _growth_mb, False, 64, 32, "MB"),
    Target(
        "memory grown by the second 10,000 requests, no cache",
        *(GROWTH_KIND, SERVER, _late_growth_mb, False, 8, 4, "MB"),
    ),
    Target(
        "more with a cache, besides what it holds",
        *(GROWTH_KIND, SERVER, _beside_cache_mb, False, 16, 8, "MB"),
    ),
    *_page_targets(),
)


def _changed_weights(measures: Json) -> float:
    return float(sum(measures["num_changed"].values()))


EXPORT_KIND: Final = "draft-export"
EXPORT_TARGETS: Final = (
    Target(
        "weights changed by an export and the way back, all systems",
        *(EXPORT_KIND, SMOLLM2, _changed_weights, False, 0, 0, ""),
    ),
)


def judge_targets(
    records: Iterable[Json],
    older: Iterable[Json] = (),
    targets: Iterable[Target] = TARGETS,
) -> list[Verdict]:
    """records of one machine. older: of earlier kernels, for figures that nothing newer has."""
    found = {(r["kind"], r["model"]["sha256"]): r for r in records}
    before = {(r["kind"], r["model"]["sha256"]): r for r in older}
    verdicts = []
    for target in targets:
        verdict = _judge(target, found, is_older=False)
        if verdict.value is None:
            verdict = _judge(target, before, is_older=True)
        verdicts.append(verdict)
    return verdicts


def _judge(target: Target, records: Mapping[tuple[str, str], Json], *, is_older: bool) -> Verdict:
    record = records.get((target.kind, target.sha256))
    if record is None:
        return Verdict(target, None)
    is_retired = target.is_retired(record["machine"]["cpu"])
    return Verdict(target, target.read(record["measures"]), is_retired, is_older)
