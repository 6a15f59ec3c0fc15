"""Replies of the Anthropic API: events of a stream, whole messages, usage, errors.

In: deltas and finished jobs. Out: JSON text as Anthropic's clients expect it. Knows no requests.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from draftree.core import FinishReason
from draftree.serve.identity import new_token
from draftree.serve.observed import ObservedCall, Part, split_parts
from draftree.serve.queue import Job
from draftree.serve.reply import Folded
from draftree.serve.statistics import statistics
from draftree.serve.wire import ApiError, event, to_json
from draftree.text.reply import DeltaKind

if TYPE_CHECKING:
    from draftree.chat import Delta

UNSIGNED: Final = "unsigned"  # clients drop thinking whose signature is empty
_STOP_REASONS: Final = {FinishReason.LENGTH: "max_tokens", FinishReason.TOOL_CALLS: "tool_use"}
_ERROR_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


@dataclass(frozen=True, slots=True)
class MessageOptions:
    """What of a request its reply depends on."""

    model: str
    shows_thinking: bool = True
    has_statistics: bool = False
    token: str = field(default_factory=new_token)  # of its id


def render_error(error: ApiError) -> dict[str, Any]:
    kind = _ERROR_KINDS.get(error.status)
    if kind is None:
        kind = "api_error" if error.status >= 500 else "invalid_request_error"
    message = error.message
    if error.code == "context_length_exceeded":  # clients look for these words, and shorten
        message = f"prompt is too long: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}


class MessageWire:
    """Writes one message, block by block."""

    def __init__(self, options: MessageOptions, call: ObservedCall) -> None:
        self._options, self._call = options, call
        self._id = f"msg_{options.token}"
        self._num_blocks = 0
        self._open: Part | None = None

    def opening(self) -> str:
        usage = {**self._usage(), "output_tokens": 0}
        message = self._message([], stop_reason=None, stop_sequence=None, usage=usage)
        return _event("message_start", message=message) + _event("ping")

    def chunk(self, index: int, deltas: "Sequence[Delta]") -> str:
        return "".join(p for part in split_parts(deltas) for p in self._write(*part))

    def closing(self, index: int, job: Job) -> str:
        return "".join(self._close())

    def ending(self, jobs: Sequence[Job]) -> str:
        delta = self._stop(jobs[0].finish_reason)
        usage = self._usage(jobs)
        return _event("message_delta", delta=delta, usage=usage) + _event("message_stop")

    def failure(self, error: ApiError) -> str:
        return event(to_json(render_error(error)), "error")

    def whole(self, replies: Sequence[Folded], jobs: Sequence[Job]) -> dict[str, Any]:
        (reply,) = replies
        blocks: list[dict[str, Any]] = []
        if reply.reasoning:
            text = reply.reasoning if self._options.shows_thinking else ""
            blocks.append({"type": "thinking", "thinking": text, "signature": UNSIGNED})
        if reply.text:
            blocks.append({"type": "text", "text": reply.text})
        blocks += [block for call in reply.calls for block in _call_blocks(call)]
        return self._message(blocks, **self._stop(reply.finish_reason), usage=self._usage(jobs))

    def _message(self, content: list[dict[str, Any]], **members: Any) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._options.model,
            "content": content,
            **members,
        }

    def _write(self, key: Part, deltas: "list[Delta]") -> Iterator[str]:
        kind, _ = key
        call = deltas[0].tool_call
        if key != self._open:
            yield from self._close()
            block: dict[str, Any] = {"type": "text", "text": ""}
            if kind is DeltaKind.REASONING:
                block = {"type": "thinking", "thinking": "", "signature": ""}
            elif call is not None:
                block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            self._open = key
            yield _event("content_block_start", index=self._num_blocks, content_block=block)
        text = "".join(delta.text for delta in deltas)
        if kind is DeltaKind.TEXT:
            yield self._delta("text_delta", text=text)
        elif kind is DeltaKind.REASONING and self._options.shows_thinking:
            yield self._delta("thinking_delta", thinking=text)
        elif kind is DeltaKind.TOOL_CALL:
            pieces = (delta.tool_call.arguments for delta in deltas if delta.tool_call)
            yield self._delta("input_json_delta", partial_json="".join(pieces))

    def _close(self) -> Iterator[str]:
        if self._open is None:
            return
        if self._open[0] is DeltaKind.REASONING:
            yield self._delta("signature_delta", signature=UNSIGNED)
        yield _event("content_block_stop", index=self._num_blocks)
        self._open = None
        self._num_blocks += 1

    def _delta(self, kind: str, **members: str) -> str:
        delta = {"type": kind, **members}
        return _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _stop(self, reason: FinishReason | None) -> dict[str, Any]:
        text = self._call.stop_text
        word = "stop_sequence" if text is not None else "end_turn"
        if reason is not None:
            word = _STOP_REASONS.get(reason, word)
        return {"stop_reason": word, "stop_sequence": text}

    def _usage(self, jobs: Sequence[Job] = ()) -> dict[str, Any]:
        """What was taken from the cache does not count as input."""
        usage = self._call.usage
        members: dict[str, Any] = {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "service_tier": "standard",
        }
        if jobs and self._options.has_statistics:
            members["draftree"] = statistics(jobs)
        return members


def _call_blocks(call: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """None for a call that was cut short: it has no input that could be told."""
    with suppress(ValueError, RecursionError):
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        yield {"type": "tool_use", "id": call["id"], "name": name, "input": arguments}


def _event(name: str, **members: Any) -> str:
    return event(to_json({"type": name, **members}), name)
