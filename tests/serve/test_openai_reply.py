"""Replies of the OpenAI API are what its clients expect, whole and as a stream."""

import pytest

from draftree.core import FinishReason
from draftree.text.reply import DeltaKind
from tests.serve.fake import THINKING_AND_CALLS, Call, Delta, Score
from tests.serve.test_openai import HELLO, TOOL, chat, chunks, complete


def test_whole_chat_completion(client):
    reply = chat(client).json()
    assert reply["id"].startswith("chatcmpl-")
    assert reply["object"] == "chat.completion"
    assert reply["model"] == "fake"
    assert reply["system_fingerprint"].startswith("b")
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello there", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert reply["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_chat_stream(client):
    found = chunks(chat(client, stream=True))
    assert len({(c["id"], c["created"], c["system_fingerprint"]) for c in found}) == 1
    assert {c["object"] for c in found} == {"chat.completion.chunk"}
    first, *middle, last = [c["choices"][0] for c in found]
    assert first["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(c["delta"]["content"] for c in middle) == "Hello there"
    assert (last["delta"], last["finish_reason"]) == ({}, "stop")
    assert {c["finish_reason"] for c in (first, *middle)} == {None}


def test_usage_at_the_end_of_a_stream(client):
    """Unasked for it stands in the last chunk, so that every chunk has a choice."""
    for ask in (chat, complete):
        *others, last = chunks(ask(client, stream=True))
        assert all("usage" not in c for c in others)
        assert last["choices"] and last["usage"]["total_tokens"] == 5
        for fields in ({"stream_options": {"include_usage": False}}, {"n": 2}):
            assert all("usage" not in c for c in chunks(ask(client, stream=True, **fields)))
    *others, last = chunks(chat(client, stream=True, stream_options={"include_usage": True}))
    assert all(c["usage"] is None for c in others)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 5


def test_reasoning_and_calls_in_a_stream(client, engine):
    engine.finish_reason = FinishReason.TOOL_CALLS
    engine.pieces = THINKING_AND_CALLS
    reply = chat(client, tools=[TOOL]).json()["choices"][0]
    calls = [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "add", "arguments": '{"a": 1}'},
        },
        {"id": "call_2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
    ]
    assert reply["finish_reason"] == "tool_calls"
    assert reply["message"] == {
        "role": "assistant",
        "content": "Adding.",
        "refusal": None,
        "reasoning_content": "Let me see",
        "tool_calls": calls,
    }
    deltas = [c["choices"][0]["delta"] for c in chunks(chat(client, tools=[TOOL], stream=True))]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "Let me see"
    assert "".join(d.get("content", "") for d in deltas) == "Adding."
    pieces = [piece for d in deltas for piece in d.get("tool_calls", ())]
    assert "".join(p["function"]["arguments"] for p in pieces if p["index"] == 0) == '{"a": 1}'
    named = [(p["index"], p["id"], p["type"], p["function"]["name"]) for p in pieces if "id" in p]
    assert named == [(0, "call_1", "function", "add"), (1, "call_2", "function", "add")]


def test_content_is_null_beside_calls_alone(client, engine):
    engine.pieces = [Delta(kind=DeltaKind.TOOL_CALL, tool_call=Call(0, "call_1", "add", "{}"))]
    assert chat(client, tools=[TOOL]).json()["choices"][0]["message"]["content"] is None


SCORES = (
    Score(1, b"Hel", -0.5, (Score(1, b"Hel", -0.5), Score(2, b"By", float("-inf")))),
    Score(3, b"\xc3", -0.25, (Score(3, b"\xc3", -0.25),)),
)


def test_chat_logprobs(client, engine):
    engine.pieces = [Delta("Hel", logprobs=SCORES)]
    expected = {
        "content": [
            {
                "token": "Hel",
                "logprob": -0.5,
                "bytes": [72, 101, 108],
                "top_logprobs": [
                    {"token": "Hel", "logprob": -0.5, "bytes": [72, 101, 108]},
                    {"token": "By", "logprob": -9999.0, "bytes": [66, 121]},
                ],
            },
            {
                "token": "\ufffd",
                "logprob": -0.25,
                "bytes": [195],
                "top_logprobs": [{"token": "\ufffd", "logprob": -0.25, "bytes": [195]}],
            },
        ],
        "refusal": None,
    }
    assert chat(client, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"] == expected
    assert engine.calls[-1]["logprobs"] == 2
    stream = chunks(chat(client, logprobs=True, stream=True))
    assert [c["choices"][0]["logprobs"] for c in stream] == [None, expected, None]
    assert engine.calls[-1]["logprobs"] == 0


def test_completion_logprobs(client, engine):
    engine.pieces = [Delta("Hel", logprobs=SCORES[:1]), Delta("lo", logprobs=SCORES[1:])]
    whole = complete(client, logprobs=2).json()["choices"][0]["logprobs"]
    assert whole == {
        "tokens": ["Hel", "\ufffd"],
        "token_logprobs": [-0.5, -0.25],
        "top_logprobs": [{"Hel": -0.5, "By": -9999.0}, {"\ufffd": -0.25}],
        "text_offset": [0, 3],
    }
    found = [c["choices"][0]["logprobs"] for c in chunks(complete(client, logprobs=2, stream=True))]
    offsets = [offset for each in found if each for offset in each["text_offset"]]
    assert offsets == [0, 3]


def test_whole_completion(client):
    reply = complete(client).json()
    assert reply["object"] == "text_completion"
    assert reply["id"].startswith("cmpl-")
    assert reply["choices"] == [
        {"text": "Hello there", "index": 0, "logprobs": None, "finish_reason": "stop"}
    ]


@pytest.mark.parametrize("is_stream", [False, True])
def test_several_prompts_with_several_replies_each(client, engine, is_stream):
    response = complete(client, prompt=[[1], [2, 3]], n=2, echo=True, stream=is_stream)
    found = chunks(response) if is_stream else [response.json()]
    texts = ["", "", "", ""]
    for choice in (choice for c in found for choice in c["choices"]):
        texts[choice["index"]] += choice["text"]
    assert texts == [
        "<1>Hello there",
        "<1>Hello there",
        "<2><3>Hello there",
        "<2><3>Hello there",
    ]
    assert sorted(call["prompt"] for call in engine.calls) == [[1], [1], [2, 3], [2, 3]]
    if not is_stream:
        assert found[0]["usage"]["prompt_tokens"] == 6
        assert found[0]["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("how", ["body", "header"])
def test_statistics_when_asked(client, engine, is_stream, how):
    fields = {"draftree": {"stats": True}} if how == "body" else {}
    headers = {"X-Draftree-Stats": "1"} if how == "header" else {}
    response = client.post(
        "/v1/chat/completions", json={**HELLO, **fields, "stream": is_stream}, headers=headers
    )
    last = chunks(response)[-1] if is_stream else response.json()
    found = last["usage"]["draftree"]
    assert (found["rounds"], found["acceptance_length"]) == (2, 1.0)
    assert found["tokens_per_second"] == 100.0
    assert found["ttft_ms"] >= found["queue_ms"] >= 0
    assert found["prefill_ms"] == 5.0
    assert found["speculation_off"] is None and found["host_rounds"] is None
    assert found["compression"] is None
    assert "draftree" not in chat(client).json()["usage"]


def test_text_that_is_not_utf8_can_be_sent(client, engine):
    engine.pieces = ["a\ud800b", "\u2028 \n\r\"'"]
    text = chat(client).json()["choices"][0]["message"]["content"]
    streamed = chunks(chat(client, stream=True))
    assert text == "a?b\u2028 \n\r\"'"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in streamed) == text
