"""Requests of the OpenAI API become calls on the engine, and replies what its clients expect."""

import json

import pytest

from draftree.errors import GrammarError
from draftree.serve.wire import TOO_LONG
from draftree.text.grammar import FormatKind, ResponseFormat

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
    sizes = {"n_prompt_tokens", "n_ctx"} if error["type"] == TOO_LONG else set()
    assert {"message", "type", "param", "code"} == set(error) - sizes
    assert error["message"].endswith(".")
    return error


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
        "continue_final": False,
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
@pytest.mark.parametrize("has_object", [False, True])
def test_reasoning_effort(client, engine, effort, thinking, budget, has_object):
    field = {"reasoning": {"effort": effort}} if has_object else {"reasoning_effort": effort}
    assert chat(client, **field).is_success
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
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities[1]"),
        ({"functions": [{}]}, "functions"),
        ({"verbosity": "low"}, "verbosity"),
        ({"chat_template_kwargs": {"tone": "x"}}, "chat_template_kwargs.tone"),
        ({"draftree": {"trees": 1}}, "draftree.trees"),
        ({"draftree": {"compress": "on"}}, "draftree.compress"),
        ({"draftree": {"compress_keep": 0}}, "draftree.compress_keep"),
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
        ({"messages": [1]}, "messages"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_what_completions_refuse_is_named(client, engine, fields, param):
    assert error_of(complete(client, **fields), 400)["param"].startswith(param)
    assert engine.calls == []


@pytest.mark.parametrize("prompt", ["", [], [""], ["x", ""], [[]], [[1], []]])
def test_an_empty_prompt_is_refused(client, prompt):
    reply = client.post("/v1/completions", json={"model": "fake", "prompt": prompt})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "The prompt is empty."
    assert reply.json()["error"]["param"] == "prompt"


def test_what_asks_for_nothing_is_taken(client):
    assert complete(client, suffix=None, best_of=2, n=2, echo=False).is_success
    assert chat(client, **dict.fromkeys(("audio", "functions", "store", "n", "stop"))).is_success


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_what_is_no_number_is_refused(client, engine, number):
    """Where a number is expected, and where anything may be, but JSON has no such thing."""
    for field in ('"logit_bias": {"5": %s}', '"temperature": %s'):
        error = error_of(post_raw(client, field % number), 400)
        assert "finite number" in error["message"]
    if number != "1e999":
        schema = (
            '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": %s}}}]'
        )
        error = error_of(post_raw(client, schema % number), 400)
        assert error["message"].startswith("NaN and Infinity are not JSON: ")
    assert engine.calls == []
    assert post_raw(client, f'"user": "{number}"').is_success


def post_raw(client, fields):
    content = f"{json.dumps(HELLO)[:-1]}, {fields}}}"
    headers = {"content-type": "application/json"}
    return client.post("/v1/chat/completions", content=content, headers=headers)


def test_too_long_a_prompt(client):
    message = {"role": "user", "content": "x" * 100}
    error = error_of(chat(client, messages=[message]), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "64 tokens" in error["message"] and "100 tokens" in error["message"]
    sizes = error["type"], error["n_prompt_tokens"], error["n_ctx"]
    assert sizes == (TOO_LONG, 100, 64)  # as llama.cpp's clients know it
    assert error_of(complete(client, prompt="x" * 100, stream=True), 400)["param"] == "prompt"


@pytest.mark.parametrize("has_tools", [False, True])
def test_what_only_the_engine_can_tell_is_named_too(client, engine, monkeypatch, has_tools):
    assert error_of(chat(client, logit_bias={"100": 1}), 400)["param"] == "logit_bias"
    assert error_of(complete(client, logit_bias={"100": 1}), 400)["param"] == "logit_bias"
    assert error_of(complete(client, prompt=[1, 100]), 400)["param"] == "prompt"
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


def test_compression_is_prefetched_by_request(client, engine):
    asked = {"compress": "always", "compress_keep": 0.1}
    assert chat(client, draftree=asked).status_code == 200
    assert {name: engine.calls[-1][name] for name in asked} == asked
    assert chat(client, draftree={"stats": True}).status_code == 200
    assert "compress" not in engine.calls[-1]
    response = complete(client, draftree=asked)
    assert "draftree.compress" in error_of(response, 400)["param"], "texts are not shortened"
