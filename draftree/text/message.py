"""A reply put together from its pieces, as the message in which clients send it back."""

from typing import Any

from draftree.text.reply import DeltaKind, ReplyPiece


class ReplyMessage:
    def __init__(self) -> None:
        self.text = self.reasoning = ""
        self.calls: list[dict[str, Any]] = []

    def add(self, piece: ReplyPiece) -> None:
        if piece.kind is DeltaKind.TEXT:
            self.text += piece.text
        elif piece.kind is DeltaKind.REASONING:
            self.reasoning += piece.text
        elif (call := piece.tool_call) is not None:
            if call.index == len(self.calls):
                function = {"name": call.name or "", "arguments": ""}
                self.calls.append({"id": call.id, "type": "function", "function": function})
            self.calls[call.index]["function"]["arguments"] += call.arguments

    def write(self, *, has_reasoning: bool) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls:
            message |= {"content": self.text or None, "tool_calls": self.calls}
        return message | ({"reasoning_content": self.reasoning} if has_reasoning else {})
