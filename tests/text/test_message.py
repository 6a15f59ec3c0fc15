"""A reply put together is the message that clients send back."""

from draftree.text.message import ReplyMessage
from draftree.text.reply import DeltaKind, ReplyPiece
from draftree.text.tools.dialect import ToolCallDelta


def _call(index: int, call_id: str | None, name: str | None, arguments: str) -> ReplyPiece:
    return ReplyPiece(DeltaKind.TOOL_CALL, "", ToolCallDelta(index, call_id, name, arguments))


def test_pieces_become_a_message() -> None:
    message = ReplyMessage()
    assert message.write(has_reasoning=False) == {"role": "assistant", "content": ""}
    for piece in (
        ReplyPiece(DeltaKind.REASONING, "Hm."),
        _call(0, "a", "add", '{"x"'),
        _call(0, None, None, ": 1}"),
        _call(1, "b", "now", "{}"),
    ):
        message.add(piece)
    calls = [
        {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}},
        {"id": "b", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]
    written = {"role": "assistant", "content": None, "tool_calls": calls}
    assert message.write(has_reasoning=False) == written
    message.add(ReplyPiece(DeltaKind.TEXT, "Done."))
    whole = {**written, "content": "Done.", "reasoning_content": "Hm."}
    assert message.write(has_reasoning=True) == whole
