"""A text stream -> reasoning and content, for models that think between <think> and </think>.

The opening tag counts only before any other text, the closing tag only while reasoning. Newlines
next to the tags belong to neither. Tags that arrive in pieces are held back until they are whole.
"""

from enum import StrEnum
from typing import NamedTuple

from draftree.text.detokenize import held_back


class SegmentKind(StrEnum):
    REASONING = "reasoning"
    CONTENT = "content"


class Segment(NamedTuple):
    kind: SegmentKind
    text: str


class Segments:
    """is_reasoning: the prompt itself ended with the opening tag."""

    def __init__(
        self, *, is_reasoning: bool = False, opening: str = "<think>", closing: str = "</think>"
    ) -> None:
        self._opening: str | None = None if is_reasoning else opening  # None: too late for it
        self._closing: str | None = closing if is_reasoning else None  # None: not reasoning
        self._after_opening = closing
        self._is_fresh = is_reasoning  # right after a tag
        self._held = ""

    @property
    def is_reasoning(self) -> bool:
        return self._closing is not None

    def push(self, text: str) -> list[Segment]:
        return self._split(self._held + text, is_last=False)

    def finish(self) -> list[Segment]:
        """What was held back because it might have become a tag."""
        return self._split(self._held, is_last=True)

    def _split(self, text: str, is_last: bool) -> list[Segment]:
        self._held = ""
        if self._opening is not None:
            start = text.lstrip()
            if self._opening.startswith(start) and start != self._opening and not is_last:
                self._held = text
                return []
            if start.startswith(self._opening):
                text = start.removeprefix(self._opening)
                self._closing, self._is_fresh = self._after_opening, True
            self._opening = None
        if self._closing is None:
            return self._emit(SegmentKind.CONTENT, text)
        before, tag, after = text.partition(self._closing)
        if tag:
            found = self._emit(SegmentKind.REASONING, before.rstrip("\n"))
            self._closing, self._is_fresh = None, True
            return found + self._emit(SegmentKind.CONTENT, after)
        if not is_last:  # newlines may turn out to stand before the closing tag
            keep = held_back(text, (self._closing,))
            end = len(text[: len(text) - keep].rstrip("\n"))
            text, self._held = text[:end], text[end:]
        return self._emit(SegmentKind.REASONING, text)

    def _emit(self, kind: SegmentKind, text: str) -> list[Segment]:
        if self._is_fresh:
            text = text.lstrip("\n")
            self._is_fresh = not text
        return [Segment(kind, text)] if text else []
