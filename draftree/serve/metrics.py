"""Counts and times of a server, and the text that Prometheus reads.

Only the event loop's thread writes; nothing here knows HTTP.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from draftree.core import Usage

_TTFT_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_DURATION_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum:.6f}"
        yield f"{name}_count {total}"


class Metrics:
    """What the server did since it started."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._totals: Counter[str] = Counter()
        self._ttft = Histogram(_TTFT_S)
        self._wait = Histogram(_TTFT_S)
        self._duration = Histogram(_DURATION_S)

    def count_request(self, route: str, status: int, duration_s: float) -> None:
        self._requests[route, status] += 1
        self._duration.observe(duration_s)

    def count_start(self, wait_s: float) -> None:
        self._wait.observe(wait_s)

    def count_first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)

    def count_reply(self, usage: Usage, *, is_cancelled: bool) -> None:
        self._totals["cancelled"] += is_cancelled
        self._totals["prompt_tokens"] += usage.prompt_tokens
        self._totals["cached_tokens"] += usage.cached_tokens
        self._totals["completion_tokens"] += usage.completion_tokens
        self._totals["rounds"] += usage.rounds.num_rounds
        self._totals["batched_rounds"] += usage.rounds.num_batched
        self._totals["drafted"] += usage.rounds.num_drafted
        self._totals["accepted"] += usage.rounds.num_accepted

    def count_engine_failure(self) -> None:
        self._totals["engine_failures"] += 1

    def render(
        self, num_waiting: int, num_running: int, num_preempted: int, wait_s: float | None = None
    ) -> str:
        """wait_s: that the last one in the queue has to expect; None: not known."""
        lines = [*self._lines(num_waiting, num_running, num_preempted)]
        if wait_s is not None:
            name = "draftree_queue_wait_seconds"
            lines += _head(name, "gauge", "Expected wait of the last request in the queue.")
            lines.append(f"{name} {wait_s:.3f}")
        return "".join(f"{line}\n" for line in lines)

    def _lines(self, num_waiting: int, num_running: int, num_preempted: int) -> Iterator[str]:
        name = "draftree_requests_total"
        yield from _head(name, "counter", "HTTP requests by route and status.")
        for (route, status), count in sorted(self._requests.items()):
            yield f'{name}{{route="{route}",status="{status}"}} {count}'
        for key, help_text in (
            ("prompt_tokens", "Tokens of prompts."),
            ("cached_tokens", "Tokens of prompts that were taken from a cache."),
            ("completion_tokens", "Tokens generated."),
            ("rounds", "Rounds: target passes that committed tokens."),
            ("batched_rounds", "Rounds of a token in a pass that others shared."),
            ("drafted", "Nodes besides roots that were verified."),
            ("accepted", "Nodes on accepted paths."),
            ("cancelled", "Replies that ended because the client left."),
            ("engine_failures", "Times that the engine failed and was opened again."),
        ):
            yield from _head(f"draftree_{key}_total", "counter", help_text)
            yield f"draftree_{key}_total {self._totals[key]}"
        rounds = self._totals["rounds"]
        al = self._totals["completion_tokens"] / rounds if rounds else 0.0
        for name, value, help_text in (
            ("draftree_acceptance_length", f"{al:.4f}", "Tokens committed a round, over all."),
            ("draftree_queue_length", num_waiting, "Requests that wait for the engine."),
            ("draftree_running", num_running, "Requests that take turns on the engine."),
            ("draftree_preempted", num_preempted, "Of those, requests between two turns."),
        ):
            yield from _head(name, "gauge", help_text)
            yield f"{name} {value}"
        for name, histogram, help_text in (
            ("draftree_ttft_seconds", self._ttft, "From arrival to the first token sent."),
            ("draftree_queue_seconds", self._wait, "From arrival to the engine."),
            ("draftree_request_seconds", self._duration, "From arrival to the end of the reply."),
        ):
            yield from _head(name, "histogram", help_text)
            yield from histogram.lines(name)


def _head(name: str, kind: str, help_text: str) -> Iterator[str]:
    yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} {kind}"
