"""Requests of the OpenAI API become calls on the engine, and replies what its clients expect."""

import json

import pytest

from draftree.core import FinishReason
from draftree.errors import GrammarError
from draftree.text.grammar import FormatKind, ResponseFormat
from draftree.text.reply import DeltaKind
from tests.serve.fake import Call, Delta, Score

HELLO = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def chat(client, **fields):
    return client.post("/v1/chat/completions", json={**HELLO, **fields})


def complete(client, **fields):
    return client.post("/v1/completions", json={"model": "fake", "prompt": "hi", **fields})


def chunks(response):
    """The chunks of a stream, which must end as OpenAI's do."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, last, rest = response.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def error_of(response, status):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].endswith(".")
    return error


def test_whole_chat_completion(client):
    reply = chat(client).json()
    assert reply["id"].startswith("chatcmpl-")
    assert reply["object"] == "chat.completion"
    assert reply["model"] == "fake"
    assert reply["system_fingerprint"].startswith("fp_")
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
    assert all("usage" not in c for c in found)
    first, *middle, last = [c["choices"][0] for c in found]
    assert first["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(c["delta"]["content"] for c in middle) == "Hello there"
    assert (last["delta"], last["finish_reason"]) == ({}, "stop")
    assert {c["finish_reason"] for c in (first, *middle)} == {None}


def test_usage_at_the_end_of_a_stream(client):
    *others, last = chunks(chat(client, stream=True, stream_options={"include_usage": True}))
    assert all(c["usage"] is None for c in others)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 5


def test_reasoning_and_calls_in_a_stream(client, engine):
    engine.finish_reason = FinishReason.TOOL_CALLS
    engine.pieces = [
        Delta("Let me", DeltaKind.REASONING),
        Delta(" see", DeltaKind.REASONING),
        Delta("Adding."),
        Delta(kind=DeltaKind.TOOL_CALL, tool_call=Call(0, "call_1", "add", '{"a"')),
        Delta(kind=DeltaKind.TOOL_CALL, tool_call=Call(0, None, None, ": 1}")),
        Delta(kind=DeltaKind.TOOL_CALL, tool_call=Call(1, "call_2", "add", "{}")),
    ]
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


def test_replies_differ_in_their_seeds(client, engine):
    reply = chat(client, n=3, seed=-1, temperature=0.5).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert reply["usage"]["prompt_tokens"] == 3
    assert sorted(call["sampling"].seed for call in engine.calls) == [0, 1, 2**63 - 1]


def test_seed_is_random_if_not_given(client, engine):
    for _ in range(2):
        chat(client)
    assert engine.calls[0]["sampling"].seed != engine.calls[1]["sampling"].seed


def test_fields_reach_the_engine(client, engine):
    assert chat(
        client,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "Ann"},
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "5"},
        ],
        temperature=0.25,
        top_p=0.5,
        top_k=9,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=2,
        seed=5,
        stop=["a", "b", "c", "d", "e"],
        logit_bias={"7": -100},
        max_completion_tokens=9,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "add"}},
        parallel_tool_calls=False,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"a": 1}}},
        chat_template_kwargs={"enable_thinking": False},
        thinking_budget=3,
        user="me",
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
    ).is_success
    call = engine.calls[0]
    sampling = call.pop("sampling")
    prompt = call.pop("prompt")
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.25, 0.5, 9)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.seed) == (0.125, 1.5, 5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1, 2)
    assert call == {
        "stop": ("a", "b", "c", "d", "e"),
        "logit_bias": {7: -100},
        "max_tokens": 9,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "parallel_tool_calls": False,
        "response_format": ResponseFormat(FormatKind.JSON_SCHEMA, {"a": 1}),
        "thinking": False,
        "thinking_budget": 3,
        "logprobs": None,
    }
    assert [message["role"] for message in prompt] == ["system", "user", "assistant", "tool"]
    assert prompt[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": "{}"}


def test_defaults(client, engine):
    chat(client, stop="x", top_p=0, tools=[], response_format={"type": "json_object"})
    complete(client)
    first, second = engine.calls
    assert first["sampling"].temperature == 1.0
    assert 0 < first["sampling"].top_p < 1e-6
    assert first["max_tokens"] == engine.max_ctx
    assert (first["stop"], first["tools"], first["tool_choice"]) == (("x",), None, "auto")
    assert first["response_format"] == ResponseFormat(FormatKind.JSON_OBJECT)
    assert second["max_tokens"] == 16


@pytest.mark.parametrize(
    ("effort", "thinking", "budget"),
    [("none", False, None), ("minimal", None, 256), ("low", None, 1024), ("high", None, None)],
)
def test_reasoning_effort(client, engine, effort, thinking, budget):
    assert chat(client, reasoning_effort=effort).is_success
    assert (engine.calls[0]["thinking"], engine.calls[0]["thinking_budget"]) == (thinking, budget)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"foo": 1}, "foo"),
        ({"messages": []}, "messages"),
        ({"temperature": 3}, "temperature"),
        ({"n": 65}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [""]}, "stop[0]"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"foo": 1}}, "stream_options.foo"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tools"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"store": True}, "store"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities[1]"),
        ({"functions": []}, "functions"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"verbosity": "low"}, "verbosity"),
        ({"chat_template_kwargs": {"tone": "x"}}, "chat_template_kwargs.tone"),
        ({"draftree": {"trees": 1}}, "draftree.trees"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
    ],
)
def test_what_chat_refuses_is_named(client, engine, fields, param):
    assert param in error_of(chat(client, **fields), 400)["param"]
    assert engine.calls == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [100], "echo": True}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"messages": []}, "messages"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_what_completions_refuse_is_named(client, engine, fields, param):
    assert error_of(complete(client, **fields), 400)["param"].startswith(param)
    assert engine.calls == []


def test_what_asks_for_nothing_is_taken(client):
    assert complete(client, suffix=None, best_of=2, n=2, echo=False).is_success
    assert chat(client, **dict.fromkeys(("audio", "functions", "store", "n", "stop"))).is_success


def test_too_long_a_prompt(client):
    message = {"role": "user", "content": "x" * 100}
    error = error_of(chat(client, messages=[message]), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "64 tokens" in error["message"] and "100 tokens" in error["message"]
    assert error_of(complete(client, prompt="x" * 100, stream=True), 400)["param"] == "prompt"


@pytest.mark.parametrize("has_tools", [False, True])
def test_what_only_the_engine_can_tell_is_named_too(client, engine, monkeypatch, has_tools):
    assert error_of(chat(client, logit_bias={"100": 1}), 400)["param"] == "logit_bias"
    assert error_of(complete(client, logit_bias={"100": 1}), 400)["param"] == "logit_bias"
    assert error_of(complete(client, prompt=[1, 100]), 400)["param"] == "prompt"
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    field = "chat_template_kwargs.enable_thinking"
    assert error_of(chat(client, **thinking), 400)["param"] == field
    assert engine.calls == []

    def refuse(*_, **__):
        raise GrammarError("It is too deep.")

    monkeypatch.setattr(engine, "chat", refuse)
    fields = {"tools": [TOOL]} if has_tools else {"response_format": {"type": "json_object"}}
    error = error_of(chat(client, **fields), 400)
    assert (error["param"], error["code"]) == (*fields, "invalid_schema")


def test_unknown_model(client):
    error = error_of(chat(client, model="other"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'fake'" in error["message"]
    assert error_of(client.get("/v1/models/a/b"), 404)["code"] == "model_not_found"


def test_models(start):
    import httpx2

    url = start(model_id="org/name", aliases=("other",)).url
    listed = httpx2.get(f"{url}/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["org/name", "other"]
    assert httpx2.get(f"{url}/v1/models/org/name").json() == listed["data"][0]
    reply = httpx2.post(f"{url}/v1/chat/completions", json={**HELLO, "model": "other"}).json()
    assert reply["model"] == "other"


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
    assert found["speculation_off"] is None
    assert "draftree" not in chat(client).json()["usage"]


def test_text_that_is_not_utf8_can_be_sent(client, engine):
    engine.pieces = ["a\ud800b", "\u2028 \n\r\"'"]
    text = chat(client).json()["choices"][0]["message"]["content"]
    streamed = chunks(chat(client, stream=True))
    assert text == "a?b\u2028 \n\r\"'"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in streamed) == text
