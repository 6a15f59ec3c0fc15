"""Replies of OpenAI's Responses API: events of a stream, whole responses, items, usage.

In: deltas and finished jobs. Out: JSON text as OpenAI's clients expect it. Knows no requests.
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from draftree.core import FinishReason
from draftree.serve.observed import ObservedCall
from draftree.serve.openai_reply import chat_logprobs
from draftree.serve.queue import Job
from draftree.serve.reply import Folded, ToolCall
from draftree.serve.statistics import statistics
from draftree.serve.wire import ApiError, event, to_json
from draftree.text.reply import DeltaKind

if TYPE_CHECKING:
    from draftree.chat import Delta, TokenLogprob

_PARTS: Final = {DeltaKind.TEXT: "output_text", DeltaKind.REASONING: "reasoning_text"}


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What of a request its reply depends on. settings: members that every reply repeats;
    namespaces: of tools that have one, by the name that the model knows them by.
    """

    model: str
    created: int
    settings: Mapping[str, Any]
    namespaces: Mapping[str, tuple[str, str]]
    has_logprobs: bool = False
    has_statistics: bool = False


@dataclass(slots=True)
class Item:
    """One item of the output in the making."""

    kind: DeltaKind
    index: int  # in the output
    call: ToolCall | None = None
    text: str = ""  # or arguments
    logprobs: "list[TokenLogprob]" = field(default_factory=list)
    id: str = ""

    def __post_init__(self) -> None:
        prefix = {DeltaKind.TEXT: "msg", DeltaKind.REASONING: "rs"}.get(self.kind, "fc")
        self.id = f"{prefix}_{uuid.uuid4().hex}"


class ResponseWire:
    """Writes one response, item by item."""

    def __init__(self, options: ResponseOptions, call: ObservedCall) -> None:
        self._options, self._call = options, call
        self._id = f"resp_{uuid.uuid4().hex}"
        self._num_events = 0
        self._output: list[dict[str, Any]] = []
        self._item: Item | None = None

    def opening(self) -> str:
        return "".join(
            self._event(f"response.{word}", response=self._response("in_progress", []))
            for word in ("created", "in_progress")
        )

    def chunk(self, index: int, deltas: "Sequence[Delta]") -> str:
        return "".join(
            piece
            for _, group in groupby(deltas, _item_key)
            for piece in self._write(list(group))
        )

    def closing(self, index: int, job: Job) -> str:
        is_cut = job.finish_reason is FinishReason.LENGTH
        return "".join(self._close("incomplete" if is_cut else "completed"))

    def ending(self, jobs: Sequence[Job]) -> str:
        status = _status(jobs[0].finish_reason)
        response = self._response(status, self._output, jobs)
        return self._event(f"response.{status}", response=response)

    def failure(self, error: ApiError) -> str:
        problem = {"code": error.code or "server_error", "message": error.message}
        response = {**self._response("failed", self._output), "error": problem}
        return self._event("response.failed", response=response)

    def whole(self, replies: Sequence[Folded], jobs: Sequence[Job]) -> dict[str, Any]:
        (reply,) = replies
        status = _status(reply.finish_reason)
        items: list[Item] = []
        if reply.reasoning:
            items.append(Item(DeltaKind.REASONING, 0, text=reply.reasoning))
        if reply.text:
            items.append(Item(DeltaKind.TEXT, 0, text=reply.text, logprobs=reply.logprobs))
        for call in reply.tool_calls:
            items.append(Item(DeltaKind.TOOL_CALL, 0, call, call.arguments))
        output = [self._render(item, "completed") for item in items]
        if output:
            output[-1]["status"] = status
        return self._response(status, output, jobs)

    def _write(self, deltas: "list[Delta]") -> Iterator[str]:
        first = deltas[0]
        if self._item is None or _item_key(first) != (self._item.kind, _call_index(self._item)):
            yield from self._begin(first)
        item = self._item
        assert item is not None
        scores = [score for delta in deltas for score in delta.logprobs]
        if item.kind is DeltaKind.TOOL_CALL:
            text = "".join(delta.tool_call.arguments for delta in deltas if delta.tool_call)
        else:
            text = "".join(delta.text for delta in deltas)
        item.text += text
        item.logprobs += scores
        if text:
            yield self._item_event("delta", item, scores, delta=text)
    
    def _begin(self, delta: "Delta") -> Iterator[str]:
        yield from self._close("completed")
        call = delta.tool_call
        item = Item(delta.kind, len(self._output))
        self._item = item
