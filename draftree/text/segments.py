"""A text stream -> reasoning and content, for models that think between <think> and </think>.

The opening tag counts only before any other text, the closing tag only while reasoning. Newlines
next to the tags belong to neither. Tags that arrive in pieces are held back until they are whole.
"""

from enum import StrEnum
from typing import Final, NamedTuple

from draftree.text.detokenize import held_back

OPENING: Final = "<think>"
CLOSING: Final = "</think>"


class SegmentKind(StrEnum):
    REASONING = "reasoning"
    CONTENT = "content"


class Segment(NamedTuple):
    kind: SegmentKind
    text: str


class Segments:
    """is_reasoning: the prompt itself ended with the opening tag."""

    def __init__(self, *, is_reasoning: bool = False) -> None:
        self.is_reasoning = is_reasoning
        self._may_open = not is_reasoning
        self._is_fresh = is_reasoning  # right after a tag
        self._held = ""

    def push(self, text: str) -> list[Segment]:
        return self._split(self._held + text, is_last=False)

    def finish(self) -> list[Segment]:
        """What was held back because it might have become a tag."""
        return self._split(self._held, is_last=True)

    def _split(self, text: str, is_last: bool) -> list[Segment]:
        self._held = ""
        if self._may_open:
            start = text.lstrip()
            if OPENING.startswith(start) and start != OPENING and not is_last:
                self._held = text
                return []
            if start.startswith(OPENING):
                text = start.removeprefix(OPENING)
                self.is_reasoning = self._is_fresh = True
            self._may_open = False
        if not self.is_reasoning:
            return self._emit(SegmentKind.CONTENT, text)
        before, tag, after = text.partition(CLOSING)
        if tag:
            found = self._emit(SegmentKind.REASONING, before.rstrip("\n"))
            self.is_reasoning, self._is_fresh = False, True
            return found + self._emit(SegmentKind.CONTENT, after)
        if not is_last:  # newlines may turn out to stand before the closing tag
            keep = held_back(text, (CLOSING,))
            end = len(text[: len(text) - keep].rstrip("\n"))
            text, self._held = text[:end], text[end:]
        return self._emit(SegmentKind.REASONING, text)

    def _emit(self, kind: SegmentKind, text: str) -> list[Segment]:
        if self._is_fresh:
            text = text.lstrip("\n")
            self._is_fresh = not text
        return [Segment(kind, text)] if text else []
