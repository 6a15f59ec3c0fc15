"""Replies of the Anthropic API are what its clients expect, whole and as a stream."""

import pytest

from draftree.core import FinishReason
from draftree.serve import queue
from tests.serve import fake
from tests.serve.fake import THINKING_AND_CALLS, Delta
from tests.serve.test_anthropic import HELLO, TOOL, USAGE, ask, events


def test_whole_message(client):
    reply = ask(client).json()
    assert reply.pop("id").startswith("msg_")
    assert reply == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "Hello there"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 3, "output_tokens": 2, **USAGE},
    }


def test_stream(client):
    start, ping, *blocks, delta, stop = events(ask(client, stream=True))
    message = start["message"]
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 3, "output_tokens": 0, **USAGE},
    }
    assert (ping, stop) == ({"type": "ping"}, {"type": "message_stop"})
    first, *middle, last = blocks
    block = {"type": "text", "text": ""}
    assert first == {"type": "content_block_start", "index": 0, "content_block": block}
    assert last == {"type": "content_block_stop", "index": 0}
    assert {e["delta"]["type"] for e in middle} == {"text_delta"}
    assert "".join(e["delta"]["text"] for e in middle) == "Hello there"
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"] == {"input_tokens": 3, "output_tokens": 2, **USAGE}


PIECES = [*THINKING_AND_CALLS, Delta("Done.")]


@pytest.mark.parametrize("round_s", [0.0, 0.03])
def test_thinking_and_calls_in_a_stream(client, engine, round_s):
    engine.finish_reason, engine.pieces = FinishReason.TOOL_CALLS, PIECES
    engine.round_s = round_s
    found = events(ask(client, tools=[TOOL], stream=True))[2:-2]
    starts = [e["content_block"] for e in found if e["type"] == "content_block_start"]
    assert starts == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "call_1", "name": "add", "input": {}},
        {"type": "tool_use", "id": "call_2", "name": "add", "input": {}},
        {"type": "text", "text": ""},
    ]
    texts = [""] * 5
    for number, text in enumerate(texts):
        part = [e for e in found if e["index"] == number]
        assert part[0]["type"] == "content_block_start"
        assert part[-1]["type"] == "content_block_stop"
        for one in part[1:-1]:
            text += "".join(value for key, value in one["delta"].items() if key != "type")
        texts[number] = text
    assert texts == ["Let me seeunsigned", "Adding.", '{"a": 1}', "{}", "Done."]


def test_thinking_and_calls_in_one_piece(client, engine):
    engine.finish_reason, engine.pieces = FinishReason.TOOL_CALLS, PIECES
    reply = ask(client, tools=[TOOL]).json()
    assert reply["stop_reason"] == "tool_use"
    assert reply["content"] == [
        {"type": "thinking", "thinking": "Let me see", "signature": "unsigned"},
        {"type": "text", "text": "Adding.Done."},
        {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "call_2", "name": "add", "input": {}},
    ]


def test_thinking_can_be_kept_back(client, engine):
    engine.pieces = PIECES[:3]
    hidden = {"type": "adaptive", "display": "omitted"}
    block = ask(client, thinking=hidden).json()["content"][0]
    assert block == {"type": "thinking", "thinking": "", "signature": "unsigned"}
    stream = ask(client, thinking=hidden, stream=True)
    assert "Let me" not in stream.text
    deltas = [e["delta"]["type"] for e in events(stream) if e["type"] == "content_block_delta"]
    assert deltas == ["signature_delta", "text_delta"]


def test_frames_without_anything_to_show_do_not_end_the_stream(client, engine, monkeypatch):
    monkeypatch.setattr(queue, "_FRAME_S", 0.01)
    engine.pieces, engine.round_s = [*PIECES[:1] * 12, PIECES[2]], 0.005
    stream = ask(client, thinking={"type": "adaptive", "display": "omitted"}, stream=True)
    assert events(stream)[-1] == {"type": "message_stop"}


def test_a_call_that_was_cut_short_is_left_out_of_a_whole_message(client, engine):
    engine.finish_reason, engine.pieces = FinishReason.LENGTH, PIECES[2:4]
    reply = ask(client, tools=[TOOL]).json()
    assert reply["stop_reason"] == "max_tokens"
    assert reply["content"] == [{"type": "text", "text": "Adding."}]


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_stop_sequence_is_named(client, engine, is_stream):
    engine.pieces = ["one E", "ND two"]
    response = ask(client, stop_sequences=["two", "END"], stream=is_stream)
    if is_stream:
        found = events(response)
        text = "".join(e["delta"].get("text", "") for e in found if "delta" in e)
        reply = found[-2]["delta"]
    else:
        reply = response.json()
        text = reply["content"][0]["text"]
    assert text == "one "
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "END")
    plain = ask(client, stop_sequences=["three"]).json()
    assert (plain["stop_reason"], plain["stop_sequence"]) == ("end_turn", None)


def test_a_reply_without_text_has_no_blocks(client, engine):
    engine.pieces = []
    assert ask(client).json()["content"] == []
    names = [e["type"] for e in events(ask(client, stream=True))]
    assert names == ["message_start", "ping", "message_delta", "message_stop"]


def test_a_stream_that_breaks_off_says_so(start, engine):
    import httpx2

    engine.pieces = ["Hel", fake.Broken("secret")]
    engine.round_s = 0.03
    *_, last = events(httpx2.post(f"{start().url}/v1/messages", json={**HELLO, "stream": True}))
    assert last["type"] == "error"
    assert last["error"]["type"] == "api_error"


@pytest.mark.parametrize("is_stream", [False, True])
def test_statistics_when_asked(client, is_stream):
    response = ask(client, stream=is_stream, draftree={"stats": True})
    usage = events(response)[-2]["usage"] if is_stream else response.json()["usage"]
    assert usage["draftree"]["rounds"] == 2
    assert "draftree" not in ask(client).json()["usage"]


def test_what_came_from_the_cache_is_told_apart(client, engine):
    def restore():
        engine.started[-1].usage.cached_tokens = 2

    engine.pieces = [restore, "Hello"]
    usage = ask(client).json()["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (1, 2)
