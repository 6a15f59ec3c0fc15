"""The text of a reply as it arrives -> reasoning, text and tool calls, ended by stop strings.

The same comes out (put together by kind) however the text is cut. Stop strings are looked for in
what follows the reasoning.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from draftree.text.detokenize import StopStrings
from draftree.text.segments import Segment, SegmentKind, Segments
from draftree.text.tools.dialect import Piece, ToolCallDelta, ToolParser


class DeltaKind(StrEnum):
    TEXT = "text"
    REASONING = "reasoning"
    TOOL_CALL = "tool_call"
    PAUSE = "pause"  # nothing new: others may have their turn, where that was asked for


@dataclass(frozen=True, slots=True)
class ReplyPiece:
    kind: DeltaKind
    text: str = ""
    tool_call: ToolCallDelta | None = None


class ReplyReader:
    """segments: None where reasoning is not told apart. is_single: a second call ends the reply.
    is_forced: there are only calls, so text that is left at the end is one that was cut off.
    """

    def __init__(
        self,
        *,
        segments: Segments | None = None,
        stop: Sequence[str] = (),
        parser: ToolParser | None = None,
        is_single: bool = False,
        is_forced: bool = False,
    ) -> None:
        self.is_stopped = False
        self._segments, self._parser = segments, parser
        self._stops = StopStrings(tuple(stop))
        self._is_single, self._is_forced = is_single, is_forced

    @property
    def is_reasoning(self) -> bool:
        return self._segments is not None and self._segments.is_reasoning

    def push(self, text: str) -> list[ReplyPiece]:
        if self.is_stopped or not text:
            return []
        if self._segments is None:
            return self._read_content(text)
        return self._sort(self._segments.push(text))

    def finish(self) -> list[ReplyPiece]:
        """What was held back; nothing once the reply has been stopped."""
        if self.is_stopped:
            return []
        pieces = self._sort(self._segments.finish()) if self._segments is not None else []
        if not self.is_stopped:
            pieces += self._parse(self._stops.finish()) + self._end_calls()
        return pieces

    def _sort(self, segments: list[Segment]) -> list[ReplyPiece]:
        pieces: list[ReplyPiece] = []
        for kind, text in segments:
            if kind is SegmentKind.REASONING:
                pieces.append(ReplyPiece(DeltaKind.REASONING, text))
            elif not self.is_stopped:
                pieces += self._read_content(text)
        return pieces

    def _read_content(self, text: str) -> list[ReplyPiece]:
        text, is_stopped = self._stops.push(text)
        pieces = self._parse(text)
        if is_stopped and not self.is_stopped:
            pieces += self._end_calls()
        self.is_stopped |= is_stopped
        return pieces

    def _parse(self, text: str) -> list[ReplyPiece]:
        if self._parser is None:
            return [ReplyPiece(DeltaKind.TEXT, text)] if text else []
        return self._show(self._parser.push(text))

    def _end_calls(self) -> list[ReplyPiece]:
        pieces = self._parser.finish() if self._parser is not None else []
        return self._show([piece for piece in pieces if piece.call or not self._is_forced])

    def _show(self, pieces: list[Piece]) -> list[ReplyPiece]:
        shown: list[ReplyPiece] = []
        for text, call in pieces:
            if call is not None and call.index > 0 and self._is_single:
                self.is_stopped = True
                break
            kind = DeltaKind.TEXT if call is None else DeltaKind.TOOL_CALL
            shown.append(ReplyPiece(kind, text, call))
        return shown
