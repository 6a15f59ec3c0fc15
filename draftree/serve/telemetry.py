"""What llama.cpp's clients may ask of a stream: timings of a reply, and how far its prompt is read.

In: calls on the engine and the Wire of their replies. Out: the same, whose events carry `timings`
or come between events with `prompt_progress`. Only for requests that ask; knows no API.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from draftree.core import Usage
from draftree.serve.observed import ObservedCall
from draftree.serve.queue import Call, Job
from draftree.serve.reply import Folded, Wire
from draftree.serve.wire import to_json

if TYPE_CHECKING:
    from draftree.chat import Delta

_END: Final = "}\n\n"  # of an event: JSON has no line ends


class BlankWire(Wire, Protocol):
    """A wire that can write an event which says nothing."""

    def blank(self) -> str: ...


class TelemetryWire:
    """Writes what another wire does, and adds to its events."""

    def __init__(
        self,
        wire: Wire,
        blank: BlankWire,
        calls: Sequence[ObservedCall],
        has_timings: bool,
        has_progress: bool,
    ) -> None:
        self._wire, self._blank, self._calls = wire, blank, calls
        self.opening, self.failure = wire.opening, wire.failure
        self._has_timings, self._has_progress = has_timings, has_progress
        self._num_shown = -1  # tokens of the prompt that were reported as read

    def progress(self, usage: Usage, *, is_read: bool = False) -> str:
        """Events, if there is news of the first reply's prompt. is_read: nothing of it is left."""
        total, cached = usage.prompt_tokens, usage.cached_tokens
        if not self._has_progress or not (usage.read_tokens or is_read):
            return ""
        events = ""
        reads = [*(self._calls[0].reads if self._calls else ()), usage.read_tokens]
        reads = [num_read for num_read in reads if num_read < total - 1]  # the last is read late
        for num_read in (cached, *reads, *([total] if is_read else ())):
            if num_read > self._num_shown:
                self._num_shown = num_read
                spent_ms = round(usage.prefill_ms)
                found = {"total": total, "cache": cached, "processed": num_read}
                event = self._blank.blank()
                events += _add(event, "prompt_progress", {**found, "time_ms": spent_ms})
        return events

    def chunk(self, index: int, deltas: "Sequence[Delta]") -> str:
        usage = self._calls[index].usage
        text = self._time(self._wire.chunk(index, deltas), [usage])
        return self._end_progress(index, usage) + text

    def closing(self, index: int, job: Job) -> str:
        text = self._time(self._wire.closing(index, job), [job.usage])
        return self._end_progress(index, job.usage) + text

    def ending(self, jobs: Sequence[Job]) -> str:
        return self._time(self._wire.ending(jobs), [job.usage for job in jobs])

    def whole(self, replies: Sequence[Folded], jobs: Sequence[Job]) -> dict[str, Any]:
        found = self._wire.whole(replies, jobs)
        timings = {"timings": measure([job.usage for job in jobs])} if self._has_timings else {}
        return {**found, **timings}

    def _end_progress(self, index: int, usage: Usage) -> str:
        return self.progress(usage, is_read=True) if index == 0 else ""

    def _time(self, events: str, usages: Sequence[Usage]) -> str:
        return _add(events, "timings", measure(usages)) if self._has_timings else events


def _add(events: str, name: str, value: dict[str, Any]) -> str:
    """A member of every event that is an object."""
    return events.replace(_END, f',"{name}":{to_json(value)}{_END}')


def measure(usages: Sequence[Usage]) -> dict[str, Any]:
    """Of all replies of one request together, by llama.cpp's names."""
    num_cached = sum(usage.cached_tokens for usage in usages)
    num_read = sum(usage.prompt_tokens for usage in usages) - num_cached
    num_drafted = sum(usage.rounds.num_drafted for usage in usages)
    parts = {
        "prompt": (num_read, sum(usage.prefill_ms for usage in usages)),
        "predicted": (
            sum(usage.completion_tokens for usage in usages),
            sum(usage.decode_ms for usage in usages),
        ),
    }
    found: dict[str, Any] = {"cache_n": num_cached}
    for name, (count, spent_ms) in parts.items():
        found |= {
            f"{name}_n": count,
            f"{name}_ms": round(spent_ms, 3),
            f"{name}_per_token_ms": round(spent_ms / count if count else 0.0, 3),
            f"{name}_per_second": round(1000 * count / spent_ms if spent_ms else 0.0, 3),
        }
    if num_drafted:
        num_accepted = sum(usage.rounds.num_accepted for usage in usages)
        found |= {"draft_n": num_drafted, "draft_n_accepted": num_accepted}
    return found


def show_telemetry(
    calls: Sequence[Call],
    wire: Wire,
    blank: BlankWire,
    *,
    has_timings: bool | None,
    has_progress: bool | None,
) -> tuple[list[Call], Wire, Callable[[Usage], str] | None]:
    """blank: the wire of the API, where others stand around it. The last one is for a stream."""
    if not has_timings and not has_progress:
        return list(calls), wire, None
    observed = [call if isinstance(call, ObservedCall) else ObservedCall(call) for call in calls]
    told = TelemetryWire(wire, blank, observed, bool(has_timings), bool(has_progress))
    return list(observed), told, told.progress
