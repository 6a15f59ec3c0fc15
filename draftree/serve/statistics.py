"""What replies cost, for the `draftree` member of usage. In: finished jobs. Out: plain values."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from draftree.core import Usage
from draftree.serve.openai_fields import StatisticsOptions
from draftree.serve.queue import Job


def wants_statistics(headers: Mapping[str, str], asked: StatisticsOptions | None) -> bool:
    """By the body, or by a header for clients that cannot add fields."""
    is_asked = asked is not None and asked.stats
    return is_asked or headers.get("x-draftree-stats", "").lower() in ("1", "true", "yes")


def statistics(jobs: Sequence[Job]) -> dict[str, Any]:
    """Of all replies of one request together. Times are those of the first one, where it matters
    when something began, else sums.
    """
    usages = [job.usage for job in jobs]
    num_tokens = sum(usage.completion_tokens for usage in usages)
    num_rounds = sum(usage.rounds.num_rounds for usage in usages)
    decode_ms = sum(usage.decode_ms for usage in usages)
    first = jobs[0]
    return {
        "rounds": num_rounds,
        "batched_rounds": sum(usage.rounds.num_batched for usage in usages),
        "acceptance_length": _round(num_tokens / num_rounds if num_rounds else 0.0),
        "drafted": sum(usage.rounds.num_drafted for usage in usages),
        "accepted": sum(usage.rounds.num_accepted for usage in usages),
        "tokens_per_second": _round(1000 * num_tokens / decode_ms if decode_ms else 0.0),
        "ttft_ms": _since_arrival(first, first.first_s),
        "queue_ms": _since_arrival(first, first.started_s),
        "prefill_ms": _round(sum(usage.prefill_ms for usage in usages)),
        "decode_ms": _round(decode_ms),
        "switch_ms": _round(sum(usage.switch_ms for usage in usages)),
        "cached_tokens": sum(usage.cached_tokens for usage in usages),
        "window": first.usage.window or None,
        "sinks": first.usage.sinks or None,
        "compression": _compression(usages),
        "speculation_off": next((u.rounds.off_reason for u in usages if u.rounds.off_reason), None),
        "host_rounds": first.usage.rounds.host_reason,
    }


def _compression(usages: Sequence[Usage]) -> dict[str, Any] | None:
    """Of all replies; None where it was off for all."""
    found = [usage.compression for usage in usages if usage.compression is not None]
    if not found:
        return None
    return {
        "texts": sum(each.num_texts for each in found),
        "cached_texts": sum(each.num_cached for each in found),
        "spans": sum(each.num_spans for each in found),
        "tokens_before": sum(each.tokens_before for each in found),
        "tokens_kept": sum(each.tokens_kept for each in found),
        "tokens_dropped": sum(each.tokens_dropped for each in found),
        **{
            name: _round(sum(getattr(each, name) for each in found))
            for name in ("score_ms", "load_ms", "read_ms", "select_ms")
        },
    }


def count_ms(job: Job) -> float:
    """Since the request came."""
    return 1000 * (time.perf_counter() - job.arrived_s)


def _since_arrival(job: Job, moment_s: float | None) -> float | None:
    return None if moment_s is None else _round(1000 * (moment_s - job.arrived_s))


def _round(value: float) -> float:
    return round(value, 3)
