"""Replies watched on their way from the engine: what stopped them, and how long they thought.

In: a call on the engine. Out: the same call, whose reply can be asked afterwards. For APIs that say
more of a reply than its finish reason. Knows no API.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, cast

from draftree.core import FinishReason, Usage
from draftree.serve.queue import Call
from draftree.text.detokenize import StopStrings
from draftree.text.reply import DeltaKind

if TYPE_CHECKING:
    from draftree.chat import Delta, Engine, Generation

Part = tuple[DeltaKind, int]  # of a reply: its kind, and the number of a call


class ObservedCall:
    """A call on the engine; `reply` is that of the latest one."""

    def __init__(self, call: Call, stop: Sequence[str] = ()) -> None:
        self._call, self._stop = call, stop
        self.reply: Observed | None = None
        self.reads: list[int] = []  # tokens of the prompt that were read, after each chunk of it

    def __call__(self, engine: "Engine") -> "Generation":
        generation, reads = self._call(engine), list[int]()
        generation.watch_prompt(lambda: reads.append(generation.usage.read_tokens))
        self.reply, self.reads = Observed(generation, self._stop), reads
        return cast("Generation", self.reply)  # all of it that the engine thread uses

    @property
    def usage(self) -> Usage:
        return self.reply.usage if self.reply is not None else Usage()

    @property
    def stop_text(self) -> str | None:
        return self.reply.stop_text if self.reply is not None else None

    @property
    def num_reasoning(self) -> int:
        """Tokens up to the end of the reasoning."""
        return self.reply.num_reasoning if self.reply is not None else 0


class Observed:
    """A generation that ends before a stop string in its text; reasoning and calls may hold any."""

    def __init__(self, generation: "Generation", stop: Sequence[str]) -> None:
        self.stop_text: str | None = None
        self.num_reasoning = 0
        self._generation, self.stream = generation, generation.stream
        self.watch_rounds, self.pause_when = generation.watch_rounds, generation.pause_when
        self.cancel, self.close = generation.cancel, generation.close
        self._words = tuple(stop)
        self._stops = StopStrings(self._words)
        self._held = ""

    @property
    def usage(self) -> Usage:
        return self._generation.usage

    @property
    def finish_reason(self) -> FinishReason | None:
        is_stopped = self.stop_text is not None
        return FinishReason.STOP if is_stopped else self._generation.finish_reason

    def __iter__(self) -> "Iterator[Delta]":
        last = None
        for delta in self._generation:
            if delta.kind is DeltaKind.PAUSE:
                yield delta
                continue
            last = delta
            if delta.kind is DeltaKind.REASONING:
                self.num_reasoning = self.usage.completion_tokens
            if delta.kind is DeltaKind.TEXT and self._words:
                delta = replace(delta, text=self._show(delta.text))
            else:
                yield from self._let_go(delta)
            if delta.kind is not DeltaKind.TEXT or delta.text:
                yield delta
            if self.stop_text is not None:
                return
        if last is not None:
            yield from self._let_go(last)

    def _show(self, text: str) -> str:
        """What of the text cannot be the beginning of a stop string."""
        whole = self._held + text
        shown, is_stopped = self._stops.push(text)
        self._held = whole[len(shown) :]
        if is_stopped:
            # Of those that begin here, the one that is complete first is the shortest.
            found = (word for word in self._words if self._held.startswith(word))
            self.stop_text = min(found, key=len)
        return shown

    def _let_go(self, delta: "Delta") -> "Iterator[Delta]":
        """What was held back and turned out to be text, as if it came with this delta."""
        text, self._held = self._stops.finish(), ""
        if text:
            yield replace(delta, kind=DeltaKind.TEXT, text=text, tool_call=None, logprobs=())


def split_parts(deltas: "Sequence[Delta]") -> "Iterator[tuple[Part, list[Delta]]]":
    """Deltas that follow each other in one part of a reply: its text, its reasoning, or a call."""

    def part_of(delta: "Delta") -> Part:
        return delta.kind, delta.tool_call.index if delta.tool_call is not None else 0

    for part, group in groupby(deltas, part_of):
        yield part, list(group)
