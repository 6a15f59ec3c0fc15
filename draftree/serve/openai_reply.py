"""Replies of the OpenAI API: chunks of a stream, whole completions, usage, log-probabilities.

In: deltas and finished jobs. Out: JSON text as OpenAI's clients expect it. Knows no requests.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from draftree.core import FinishReason
from draftree.serve.identity import new_token
from draftree.serve.queue import Job
from draftree.serve.reply import Folded
from draftree.serve.statistics import statistics
from draftree.serve.wire import ApiError, event, to_json
from draftree.text.reply import DeltaKind

if TYPE_CHECKING:
    from draftree.chat import Delta, TokenLogprob

DONE: Final = "data: [DONE]\n\n"
_TEXT_FIELDS: Final = {DeltaKind.TEXT: "content", DeltaKind.REASONING: "reasoning_content"}


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """What of a request its reply depends on."""

    model: str
    created: int
    fingerprint: str
    num_prompts: int = 1
    num_each: int = 1  # replies to each prompt
    has_logprobs: bool = False
    has_usage: bool = False  # at the end of a stream, in a chunk of its own
    closes_with_usage: bool = False  # in the last chunk of a single reply
    has_statistics: bool = False
    echoes: tuple[str, ...] = ()  # prompts to repeat
    prompt: str | None = None  # as the template wrote it, to be shown
    token: str = field(default_factory=new_token)  # of its id


def render_error(error: ApiError) -> dict[str, Any]:
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
            **error.details,
        }
    }


class _FramedWire:
    """Replies whose chunks have a frame around their choices, written once."""

    def __init__(self, options: ReplyOptions, reply_id: str, chunk_kind: str) -> None:
        self._options, self._id = options, reply_id
        self._head = f'data: {to_json(self._describe(chunk_kind))[:-1]},"choices":['
        self._tail = '],"usage":null}\n\n' if options.has_usage else "]}\n\n"

    def blank(self) -> str:
        """A chunk without choices."""
        return self._wrap("")

    def ending(self, jobs: Sequence[Job]) -> str:
        if not self._options.has_usage:
            return DONE
        usage = to_json(usage_of(jobs, self._options))
        return f'{self._head}],"usage":{usage}}}\n\n{DONE}'

    def failure(self, error: ApiError) -> str:
        return event(to_json(render_error(error))) + DONE

    def _wrap(self, choice: str) -> str:
        return f"{self._head}{choice}{self._tail}"

    def _close(self, chunk: str, job: Job) -> str:
        """The last chunk of a reply."""
        if not self._options.closes_with_usage:
            return chunk
        usage = to_json(usage_of([job], self._options))
        return f'{chunk.removesuffix(self._tail)}],"usage":{usage}}}\n\n'

    def _join(
        self, kind: str, choices: list[dict[str, Any]], jobs: Sequence[Job]
    ) -> dict[str, Any]:
        """In one piece."""
        prompt, usage = self._options.prompt, usage_of(jobs, self._options)
        shown = {} if prompt is None else {"__verbose": {"prompt": prompt}}
        return {**self._describe(kind), "choices": choices, "usage": usage, **shown}

    def _describe(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._options.created,
            "model": self._options.model,
            "system_fingerprint": self._options.fingerprint,
        }


class ChatWire(_FramedWire):
    """Writes chat completions."""

    def __init__(self, options: ReplyOptions) -> None:
        super().__init__(options, f"chatcmpl-{options.token}", "chat.completion.chunk")
        self._num_calls = [0] * options.num_each

    def opening(self) -> str:
        first = '{"role":"assistant","content":"","refusal":null}'
        return "".join(self._choice(index, first) for index in range(self._options.num_each))

    def chunk(self, index: int, deltas: "Sequence[Delta]") -> str:
        pieces = []
        for kind, group in groupby(deltas, lambda delta: delta.kind):
            if kind is DeltaKind.TOOL_CALL:
                calls = to_json(list(self._calls(index, group)))
                pieces.append(self._choice(index, f'{{"tool_calls":{calls}}}'))
                continue
            members = list(group)
            text = to_json("".join(delta.text for delta in members))
            scores = [score for delta in members for score in delta.logprobs]
            has_scores = self._options.has_logprobs and kind is DeltaKind.TEXT
            logprobs = to_json(chat_logprobs(scores)) if has_scores else "null"
            pieces.append(self._choice(index, f'{{"{_TEXT_FIELDS[kind]}":{text}}}', logprobs))
        return "".join(pieces)

    def closing(self, index: int, job: Job) -> str:
        reason = to_json(finish_word(job.finish_reason))
        return self._close(self._choice(index, "{}", reason=reason), job)

    def whole(self, replies: Sequence[Folded], jobs: Sequence[Job]) -> dict[str, Any]:
        choices = []
        for index, reply in enumerate(replies):
            message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
            if reply.reasoning:
                message["reasoning_content"] = reply.reasoning
            if reply.calls:
                message |= {"content": reply.text or None, "tool_calls": reply.calls}
            has_scores = self._options.has_logprobs
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": chat_logprobs(reply.logprobs) if has_scores else None,
                    "finish_reason": finish_word(reply.finish_reason),
                }
            )
        return self._join("chat.completion", choices, jobs)

    def _choice(self, index: int, delta: str, logprobs: str = "null", reason: str = "null") -> str:
        return self._wrap(
            f'{{"index":{index},"delta":{delta},"logprobs":{logprobs},"finish_reason":{reason}}}'
        )

    def _calls(self, index: int, deltas: "Iterable[Delta]") -> Iterator[dict[str, Any]]:
        """Consecutive pieces of a call are sent as one; only a call's first has id and name."""
        found = [delta.tool_call for delta in deltas if delta.tool_call is not None]
        for number, group in groupby(found, lambda call: call.index):
            pieces = list(group)
            arguments = "".join(piece.arguments for piece in pieces)
            if number < self._num_calls[index]:
                yield {"index": number, "function": {"arguments": arguments}}
                continue
            self._num_calls[index] = number + 1
            yield {
                "index": number,
                "id": pieces[0].id,
                "type": "function",
                "function": {"name": pieces[0].name, "arguments": arguments},
            }


class CompletionWire(_FramedWire):
    """Writes text completions."""

    def __init__(self, options: ReplyOptions) -> None:
        super().__init__(options, f"cmpl-{options.token}", "text_completion")
        self._offsets = [len(self._echo(index)) for index in range(self._num_replies)]

    @property
    def _num_replies(self) -> int:
        return self._options.num_prompts * self._options.num_each

    def opening(self) -> str:
        echoes = ((index, self._echo(index)) for index in range(self._num_replies))
        return "".join(self._choice(index, text) for index, text in echoes if text)

    def chunk(self, index: int, deltas: "Sequence[Delta]") -> str:
        text = "".join(delta.text for delta in deltas)
        logprobs = "null"
        if self._options.has_logprobs:
            scores = [score for delta in deltas for score in delta.logprobs]
            logprobs = to_json(text_logprobs(scores, self._offsets[index]))
        self._offsets[index] += len(text)
        return self._choice(index, text, logprobs)

    def closing(self, index: int, job: Job) -> str:
        reason = to_json(finish_word(job.finish_reason))
        return self._close(self._choice(index, "", reason=reason), job)

    def whole(self, replies: Sequence[Folded], jobs: Sequence[Job]) -> dict[str, Any]:
        choices = []
        for index, reply in enumerate(replies):
            has_scores, offset = self._options.has_logprobs, self._offsets[index]
            choices.append(
                {
                    "text": self._echo(index) + reply.text,
                    "index": index,
                    "logprobs": text_logprobs(reply.logprobs, offset) if has_scores else None,
                    "finish_reason": finish_word(reply.finish_reason),
                }
            )
        return self._join("text_completion", choices, jobs)

    def _echo(self, index: int) -> str:
        options = self._options
        return options.echoes[index // options.num_each] if options.echoes else ""

    def _choice(self, index: int, text: str, logprobs: str = "null", reason: str = "null") -> str:
        return self._wrap(
            f'{{"text":{to_json(text)},"index":{index},"logprobs":{logprobs},'
            f'"finish_reason":{reason}}}'
        )


def usage_of(jobs: Sequence[Job], options: ReplyOptions) -> dict[str, Any]:
    """A prompt counts once, however many replies it gets."""
    prompts = [job.usage for job in jobs[:: options.num_each]]
    num_prompt = sum(usage.prompt_tokens for usage in prompts)
    num_completion = sum(job.usage.completion_tokens for job in jobs)
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
    }
    if options.has_statistics:
        usage["draftree"] = statistics(jobs)
    return usage


def finish_word(reason: FinishReason | None) -> str:
    """A reply that was cancelled has no reader, and no word either."""
    return "stop" if reason in (None, FinishReason.CANCELLED) else str(reason)


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes this for tokens that cannot come."""
    return max(logprob, -9999.0)


def chat_logprobs(scores: "Sequence[TokenLogprob]") -> dict[str, Any]:
    def describe(score: "TokenLogprob") -> dict[str, Any]:
        text = score.text.decode("utf-8", "replace")
        return {"token": text, "logprob": finite(score.logprob), "bytes": list(score.text)}

    content = [
        {**describe(score), "top_logprobs": [describe(other) for other in score.top]}
        for score in scores
    ]
    return {"content": content, "refusal": None}


def text_logprobs(scores: "Sequence[TokenLogprob]", offset: int) -> dict[str, Any]:
    texts = [score.text.decode("utf-8", "replace") for score in scores]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    tops = [
        {other.text.decode("utf-8", "replace"): finite(other.logprob) for other in score.top}
        for score in scores
    ]
    return {
        "tokens": texts,
        "token_logprobs": [finite(score.logprob) for score in scores],
        "top_logprobs": tops,
        "text_offset": offsets,
    }
