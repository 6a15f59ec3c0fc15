"""Replies of Ollama's API: lines of JSON as the text comes, and in one piece.

In: deltas and finished jobs. Out: JSON text as Ollama's clients expect it. Knows no requests.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from draftree.core import FinishReason
from draftree.serve.observed import split_parts
from draftree.serve.queue import Job
from draftree.serve.reply import Folded
from draftree.serve.statistics import count_ms
from draftree.serve.wire import ApiError, to_json
from draftree.text.reply import DeltaKind

if TYPE_CHECKING:
    from draftree.chat import Delta

_NS_PER_MS: Final = 10**6


@dataclass(frozen=True, slots=True)
class OllamaOptions:
    """What of a request its reply depends on. is_chat: a message, or the text alone."""

    model: str
    is_chat: bool


def render_error(error: ApiError) -> dict[str, Any]:
    return {"error": error.message}


def timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class OllamaWire:
    """Writes one reply. A call is sent when it is whole."""

    def __init__(self, options: OllamaOptions) -> None:
        self._options = options
        self._folded = Folded()
        self._num_sent = 0

    def opening(self) -> str:
        return ""

    def chunk(self, index: int, deltas: "Sequence[Delta]") -> str:
        self._folded.extend(deltas)
        return "".join(self._write(deltas))

    def closing(self, index: int, job: Job) -> str:
        calls = self._take_calls(len(self._folded.calls))
        return self._line(tool_calls=calls) if calls else ""

    def ending(self, jobs: Sequence[Job]) -> str:
        (job,) = jobs
        return _line({**self.head(), **self._content(), **ending(job)})

    def failure(self, error: ApiError) -> str:
        return _line(render_error(error))

    def whole(self, replies: Sequence[Folded], jobs: Sequence[Job]) -> dict[str, Any]:
        (reply,), (job,) = replies, jobs
        calls = [call for each in reply.calls for call in _render_call(each)]
        content = self._content(reply.text, reply.reasoning, calls)
        return {**self.head(), **content, **ending(job)}

    def head(self) -> dict[str, Any]:
        return {"model": self._options.model, "created_at": timestamp()}

    def _write(self, deltas: "Sequence[Delta]") -> Iterator[str]:
        for (kind, number), group in split_parts(deltas):
            if kind is DeltaKind.TOOL_CALL:
                calls = self._take_calls(number)  # those before it are whole
                if calls:
                    yield self._line(tool_calls=calls)
                continue
            text = "".join(delta.text for delta in group)
            yield self._line(thinking=text) if kind is DeltaKind.REASONING else self._line(text)

    def _take_calls(self, end: int) -> list[dict[str, Any]]:
        start, self._num_sent = self._num_sent, max(end, self._num_sent)
        found = self._folded.calls[start:end]
        return [call for each in found for call in _render_call(each)]

    def _line(self, *arguments: Any, **members: Any) -> str:
        return _line({**self.head(), **self._content(*arguments, **members), "done": False})

    def _content(
        self, text: str = "", thinking: str = "", tool_calls: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if not self._options.is_chat:
            return {"response": text, **more}
        more |= {"tool_calls": list(tool_calls)} if tool_calls else {}
        return {"message": {"role": "assistant", "content": text, **more}}


def ending(job: Job) -> dict[str, Any]:
    """What every reply ends with; times in nanoseconds."""
    usage = job.usage
    is_cut = job.finish_reason is FinishReason.LENGTH
    return {
        "done": True,
        "done_reason": "length" if is_cut else "stop",
        "total_duration": round(count_ms(job) * _NS_PER_MS),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": round(usage.prefill_ms * _NS_PER_MS),
        "eval_count": usage.completion_tokens,
        "eval_duration": round(usage.decode_ms * _NS_PER_MS),
    }


def _render_call(call: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """None for a call that was cut short: it has no arguments that could be told."""
    with suppress(ValueError, RecursionError):
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        yield {"id": call["id"], "function": {"name": name, "arguments": arguments}}


def _line(value: dict[str, Any]) -> str:
    return f"{to_json(value)}\n"
