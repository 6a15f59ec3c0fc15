"""Replies of OpenAI's Responses API: events of a stream, whole responses, items, usage.

In: deltas and finished jobs. Out: JSON text as OpenAI's clients expect it. Knows no requests.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from draftree.core import FinishReason
from draftree.serve.identity import new_token
from draftree.serve.observed import ObservedCall, Part, split_parts
from draftree.serve.openai_reply import chat_logprobs
from draftree.serve.queue import Job
from draftree.serve.reply import Folded
from draftree.serve.statistics import statistics
from draftree.serve.wire import ApiError, event, to_json
from draftree.text.reply import DeltaKind

if TYPE_CHECKING:
    from draftree.chat import Delta, TokenLogprob

_PREFIXES: Final = {DeltaKind.TEXT: "msg", DeltaKind.REASONING: "rs", DeltaKind.TOOL_CALL: "fc"}
_EVENTS: Final = {
    DeltaKind.TEXT: "response.output_text",
    DeltaKind.REASONING: "response.reasoning_text",
    DeltaKind.TOOL_CALL: "response.function_call_arguments",
}


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What of a request its reply depends on. settings: members that every reply repeats;
    namespaces: of functions that have one, with their name there, by the name the model knows.
    """

    model: str
    created: int
    settings: Mapping[str, Any]
    namespaces: Mapping[str, tuple[str, str]]
    has_logprobs: bool = False
    has_statistics: bool = False
    token: str = field(default_factory=new_token)  # of its id, and of its items'


@dataclass(slots=True)
class Item:
    """One item of the output in the making. text: what was said or thought, or arguments."""

    kind: DeltaKind
    id: str
    text: str = ""
    logprobs: "list[TokenLogprob]" = field(default_factory=list)
    call_id: str = ""
    name: str = ""


class ResponseWire:
    """Writes one response, item by item."""

    def __init__(self, options: ResponseOptions, call: ObservedCall) -> None:
        self._options, self._call = options, call
        self._id = f"resp_{options.token}"
        self._num_events = self._num_items = 0
        self._output: list[dict[str, Any]] = []
        self._open: tuple[Part, Item] | None = None

    def opening(self) -> str:
        response = self._response("in_progress", [])
        words = ("created", "in_progress")
        return "".join(self._event(f"response.{word}", response=response) for word in words)

    def blank(self) -> str:
        """An event that says nothing new."""
        return self._event("response.in_progress", response=self._response("in_progress", []))

    def chunk(self, index: int, deltas: "Sequence[Delta]") -> str:
        return "".join(p for part in split_parts(deltas) for p in self._write(*part))

    def closing(self, index: int, job: Job) -> str:
        return "".join(self._close(_status(job.finish_reason)))

    def ending(self, jobs: Sequence[Job]) -> str:
        status = _status(jobs[0].finish_reason)
        response = self._response(status, self._output, jobs)
        return self._event(f"response.{status}", response=response)

    def failure(self, error: ApiError) -> str:
        response = self._response("failed", self._output)
        response["error"] = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=response)

    def whole(self, replies: Sequence[Folded], jobs: Sequence[Job]) -> dict[str, Any]:
        (reply,) = replies
        found = [(DeltaKind.REASONING, reply.reasoning), (DeltaKind.TEXT, reply.text)]
        items = [Item(kind, self._new_id(kind), text) for kind, text in found if text]
        for item in items:
            item.logprobs = reply.logprobs if item.kind is DeltaKind.TEXT else []
        for call in reply.calls:
            kind, function = DeltaKind.TOOL_CALL, call["function"]
            item = Item(kind, self._new_id(kind), function["arguments"])
            item.call_id, item.name = call["id"], function["name"]
            items.append(item)
        status = _status(reply.finish_reason)
        output = [self._render(item, "completed") for item in items]
        if output:
            output[-1]["status"] = status
        return self._response(status, output, jobs)

    def _new_id(self, kind: DeltaKind) -> str:
        self._num_items += 1
        return f"{_PREFIXES[kind]}_{self._options.token}{self._num_items}"

    def _write(self, key: Part, deltas: "list[Delta]") -> Iterator[str]:
        if self._open is None or self._open[0] != key:
            yield from self._close("completed")
            yield from self._begin(key, deltas[0])
        assert self._open is not None
        item = self._open[1]
        if item.kind is DeltaKind.TOOL_CALL:
            text = "".join(delta.tool_call.arguments for delta in deltas if delta.tool_call)
        else:
            text = "".join(delta.text for delta in deltas)
        scores = [score for delta in deltas for score in delta.logprobs]
        item.text += text
        item.logprobs += scores
        yield self._progress("delta", item, {"delta": text}, scores)

    def _begin(self, key: Part, delta: "Delta") -> Iterator[str]:
        call = delta.tool_call
        item = Item(delta.kind, self._new_id(delta.kind))
        if call is not None:
            item.call_id, item.name = call.id or "", call.name or ""
        self._open = (key, item)
        rendered = self._render(item, "in_progress")
        part = rendered.pop("content", [None])[0]
        if part is not None:
            rendered["content"] = []
        place: dict[str, Any] = {"output_index": len(self._output)}
        yield self._event("response.output_item.added", **place, item=rendered)
        if part is not None:
            place |= {"item_id": item.id, "content_index": 0}
            yield self._event("response.content_part.added", **place, part=part)

    def _close(self, status: str) -> Iterator[str]:
        if self._open is None:
            return
        _, item = self._open
        self._open = None
        rendered = self._render(item, status)
        member = "arguments" if item.kind is DeltaKind.TOOL_CALL else "text"
        yield self._progress("done", item, {member: item.text}, item.logprobs)
        place = {"output_index": len(self._output)}
        if "content" in rendered:
            (part,) = rendered["content"]
            at = {**place, "item_id": item.id, "content_index": 0}
            yield self._event("response.content_part.done", **at, part=part)
        yield self._event("response.output_item.done", **place, item=rendered)
        self._output.append(rendered)

    def _progress(
        self, word: str, item: Item, members: dict[str, str], scores: "Sequence[TokenLogprob]"
    ) -> str:
        place: dict[str, Any] = {"item_id": item.id, "output_index": len(self._output)}
        if item.kind is not DeltaKind.TOOL_CALL:
            place["content_index"] = 0
        if item.kind is DeltaKind.TEXT:
            place["logprobs"] = self._scores(scores)
        return self._event(f"{_EVENTS[item.kind]}.{word}", **place, **members)

    def _render(self, item: Item, status: str) -> dict[str, Any]:
        members: dict[str, Any] = {"id": item.id, "status": status}
        if item.kind is DeltaKind.TOOL_CALL:
            namespace, name = self._options.namespaces.get(item.name, (None, item.name))
            members |= {"type": "function_call", "call_id": item.call_id, "name": name}
            members |= {"namespace": namespace} if namespace else {}
            return {**members, "arguments": item.text}
        if item.kind is DeltaKind.REASONING:
            part: dict[str, Any] = {"type": "reasoning_text", "text": item.text}
            return {**members, "type": "reasoning", "summary": [], "content": [part]}
        part = {"type": "output_text", "text": item.text, "annotations": []}
        part["logprobs"] = self._scores(item.logprobs)
        return {**members, "type": "message", "role": "assistant", "content": [part]}

    def _scores(self, scores: "Sequence[TokenLogprob]") -> list[dict[str, Any]]:
        if not self._options.has_logprobs:
            return []
        found: list[dict[str, Any]] = chat_logprobs(scores)["content"]
        return found

    def _response(
        self, status: str, output: list[dict[str, Any]], jobs: Sequence[Job] = ()
    ) -> dict[str, Any]:
        is_cut = status == "incomplete"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._options.created,
            "model": self._options.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            **self._options.settings,
            "output": output,
            "usage": self._usage(jobs) if jobs else None,
        }

    def _usage(self, jobs: Sequence[Job]) -> dict[str, Any]:
        usage = jobs[0].usage
        cached = {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0}
        members: dict[str, Any] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": cached,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._call.num_reasoning},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        if self._options.has_statistics:
            members["draftree"] = statistics(jobs)
        return members

    def _event(self, kind: str, **members: Any) -> str:
        data = {"type": kind, "sequence_number": self._num_events, **members}
        self._num_events += 1
        return event(to_json(data), kind)


def _status(reason: FinishReason | None) -> str:
    return "incomplete" if reason is FinishReason.LENGTH else "completed"
