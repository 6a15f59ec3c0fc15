"""Requests of the Anthropic API become calls on the engine, and replies what its clients expect."""

import json
import typing

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_create_params

from draftree.serve.anthropic_fields import CountRequest, MessagesRequest
from draftree.text.grammar import FormatKind, ResponseFormat
from tests.serve.conftest import wait_for

HELLO = {"model": "fake", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
USAGE = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "service_tier": "standard"}


def ask(client, path="/v1/messages", **fields):
    return client.post(path, json={**HELLO, **fields})


def events(response):
    """The events of a stream, each of which is named twice."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *found, rest = response.text.split("\n\n")
    assert rest == ""
    parsed = []
    for one in found:
        name, data = one.split("\n")
        parsed.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {parsed[-1]['type']}"
    return parsed


def error_of(response, status, kind="invalid_request_error"):
    assert response.status_code == status, response.text
    content = response.json()
    assert content["type"] == "error"
    assert set(content["error"]) == {"type", "message"}
    assert content["error"]["type"] == kind
    return content["error"]["message"]


def test_fields_reach_the_engine(client, engine):
    engine.max_ctx, engine.thinks = 1000, True
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    response = ask(
        client,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1;"},
            {"type": "text", "text": "Be brief.", **cached},
            {"type": "text", "text": "Be kind."},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "hi", **cached}]},
            {"role": "system", "content": "Mind the time."},
            {
                "role": "assistant",
                "content": [
                    {"type": "redacted_thinking", "data": "abc"},
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "text", "text": "Adding.", "citations": None},
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": "é"}},
                    {"type": "tool_use", "id": "c2", "name": "add", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "5"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "c2",
                        "content": [{"type": "text", "text": "no a"}],
                        "is_error": True,
                        **cached,
                    },
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
        max_tokens=99,
        temperature=0.25,
        top_p=0.5,
        top_k=9,
        stop_sequences=["a", "b"],
        tools=[{**TOOL, "strict": True, "type": "custom", **cached}],
        tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 7},
        output_config={
            "effort": "low",
            "format": {"type": "json_schema", "schema": {"type": "object"}},
        },
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        metadata={"user_id": "me"},
        service_tier="standard_only",
        **cached,
    )
    assert response.is_success, response.text
    call = engine.calls[0]
    sampling = call.pop("sampling")
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.25, 0.5, 9)
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": "é"}'}},
        {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
    ]
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    assert call == {
        "prompt": [
            {"role": "system", "content": "Be brief.\nBe kind."},
            {"role": "user", "content": "hi\nMind the time."},
            {
                "role": "assistant",
                "content": "Adding.",
                "reasoning_content": "Hm.",
                "tool_calls": calls,
            },
            {"role": "tool", "tool_call_id": "c1", "content": "5"},
            {"role": "tool", "tool_call_id": "c2", "content": "Error: no a"},
            {"role": "user", "content": "And?"},
        ],
        "max_tokens": 99,
        "tools": [{"type": "function", "function": {**function, "strict": True}}],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "parallel_tool_calls": False,
        "response_format": ResponseFormat(FormatKind.JSON_SCHEMA, {"type": "object"}),
        "continue_final": False,
        "thinking": True,
        "thinking_budget": 7,
    }


def test_defaults(client, engine):
    assert ask(client, system="Be brief.", top_p=0).is_success
    call = engine.calls[0]
    assert call["prompt"][0] == {"role": "system", "content": "Be brief."}
    assert call["sampling"].temperature == 1.0
    assert 0 < call["sampling"].top_p < 1e-6
    assert (call["tools"], call["tool_choice"], call["parallel_tool_calls"]) == (None, "auto", True)
    assert (call["thinking"], call["thinking_budget"]) == (None, None)
    assert call["response_format"] is None


@pytest.mark.parametrize(
    ("choice", "expected"),
    [({"type": "auto"}, "auto"), ({"type": "any"}, "required"), ({"type": "none"}, "auto")],
)
def test_tool_choice(client, engine, choice, expected):
    assert ask(client, tools=[TOOL], tool_choice=choice).is_success
    call = engine.calls[0]
    assert call["tool_choice"] == expected
    assert (call["tools"] is None) == (choice["type"] == "none")


@pytest.mark.parametrize(
    ("fields", "thinking", "budget"),
    [
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"thinking": {"type": "adaptive"}}, None, None),
        ({"output_config": {"effort": "medium"}}, None, 4096),
        ({"output_config": {"effort": "max"}}, None, None),
    ],
)
def test_thinking(client, engine, fields, thinking, budget):
    assert ask(client, **fields).is_success
    assert (engine.calls[0]["thinking"], engine.calls[0]["thinking_budget"]) == (thinking, budget)


def begun(block):
    """A conversation whose last message is the assistant's."""
    return {"messages": [*HELLO["messages"], {"role": "assistant", "content": [block]}]}


def content(block, role="user"):
    return {"messages": [{"role": role, "content": [block]}]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"foo": 1}, "Unknown field: foo"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "bot", "content": "hi"}]}, "messages[0]"),
        (content({"type": "image", "source": {}}), "messages[0].content[0]: Input tag 'image'"),
        (content({"type": "document", "source": {}}), "Input tag 'document'"),
        (content({"type": "tool_result", "tool_use_id": "a", "foo": 1}), ".content[0].foo"),
        (content({"type": "thinking", "thinking": "a"}), "'thinking'"),
        (
            content({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}),
            "messages[0].content[0].content[0].type",
        ),
        (begun({"type": "tool_use", "id": "a", "name": "add", "input": {}}), "text alone"),
        (begun({"type": "thinking", "thinking": "Hm."}), "text alone"),
        ({"tools": [TOOL, TOOL]}, "'add'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice names 'x'"),
        ({"thinking": {"type": "between_tools"}}, "thinking"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "edits[0]"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"temperature": 3}, "temperature"),
        ({"container": "x"}, "container is not supported here"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported here"),
        ({"metadata": {"name": "x"}}, "metadata.name"),
    ],
)
def test_what_is_refused_is_named(client, engine, fields, words):
    assert words in error_of(ask(client, **fields), 400)
    assert engine.calls == []


def test_a_reply_goes_on_from_the_last_message(client, engine):
    turn = {"role": "assistant", "content": "It is"}
    assert ask(client, messages=[*HELLO["messages"], turn]).is_success
    assert engine.calls[-1]["continue_final"] is True
    assert engine.calls[-1]["prompt"][-1] == turn
    assert ask(client).is_success
    assert engine.calls[-1]["continue_final"] is False
    engine.thinks = True
    thinking = {"type": "enabled", "budget_tokens": 2}
    fields = {"messages": [*HELLO["messages"], turn], "thinking": thinking}
    assert "cannot think first" in error_of(ask(client, **fields), 400)


def test_what_cannot_change_the_text_is_taken_and_named(client, engine):
    fields = {"speed": "fast", "service_tier": "priority", "cache_control": {"type": "ephemeral"}}
    reply = ask(client, **fields, top_k=-1)
    assert reply.headers["x-draftree-ignored"] == "cache_control, speed, service_tier"
    assert engine.calls[-1]["sampling"].top_k == 0
    assert "x-draftree-ignored" not in ask(client).headers
    reply = ask(client, thinking={"type": "enabled", "budget_tokens": 5})
    assert reply.headers["x-draftree-ignored"] == "thinking"  # this model cannot
    assert (engine.calls[-1]["thinking"], engine.calls[-1]["thinking_budget"]) == (None, None)


def test_a_budget_must_leave_room(client, engine):
    engine.thinks = True
    message = error_of(ask(client, thinking={"type": "enabled", "budget_tokens": 9}), 400)
    assert "thinking.budget_tokens" in message


def test_too_long_a_prompt(client):
    messages = [{"role": "user", "content": "x" * 100}]
    message = error_of(ask(client, messages=messages, stream=True), 400)
    assert message.startswith("prompt is too long: ")
    assert "64 tokens" in message and "100 tokens" in message


def test_other_errors(client, start):
    import httpx2

    error_of(ask(client, model="other"), 404, "not_found_error")
    error_of(client.get("/v1/messages"), 404, "not_found_error")
    error_of(client.post("/v1/messages", content=b"{", headers={"content-type": "a/b"}), 415)
    running = start(api_keys=("secret",), max_queue=1, max_per_client=1, max_body_bytes=1000)
    url = f"{running.url}/v1/messages"
    for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong"}):
        wrong = httpx2.post(url, json=HELLO, headers=headers)
        error_of(wrong, 401, "authentication_error")
    for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
        assert httpx2.post(url, json=HELLO, headers=headers).is_success
    wait_for(lambda: running.service.queue.num_admitted == 0)
    long = {**HELLO, "system": "x" * 2000}
    error_of(httpx2.post(url, json=long, headers=headers), 413, "request_too_large")
    running.service.queue.admit("someone", 1)
    full = httpx2.post(url, json=HELLO, headers=headers)
    error_of(full, 503, "overloaded_error")
    assert int(full.headers["retry-after"]) >= 1
    running.service.queue.release("someone")


def test_too_many_requests_of_one_client(start, engine):
    import httpx2

    running = start(max_per_client=1)
    running.service.queue.admit("127.0.0.1", 1)
    error_of(httpx2.post(f"{running.url}/v1/messages", json=HELLO), 429, "rate_limit_error")
    running.service.queue.release("127.0.0.1")


def test_headers_of_clients_are_taken(client):
    headers = {"anthropic-version": "2042-01-01", "anthropic-beta": "a-2025-01-01,b"}
    assert client.post("/v1/messages?beta=true", json=HELLO, headers=headers).is_success


def test_who_asks_is_logged(client, monkeypatch):
    found = []
    monkeypatch.setattr(
        "draftree.serve.app.log_event", lambda name, **fields: found.append(fields.get("user"))
    )
    ask(client, metadata={"user_id": "me"})
    wait_for(lambda: "me" in found)  # the request before may be logged as late
    assert found.count("me") == 1


def test_count_tokens(client, engine, monkeypatch):
    asked = []

    def encode_chat(messages, **options):
        asked.append((messages, options))
        return [1, 2, 3, 4]

    monkeypatch.setattr(engine, "encode_chat", encode_chat, raising=False)
    path = "/v1/messages/count_tokens"
    body = {"model": "fake", "messages": HELLO["messages"], "system": "Be brief.", "tools": [TOOL]}
    assert client.post(path, json=body).json() == {"input_tokens": 4}
    ((messages, options),) = asked
    assert [message["content"] for message in messages] == ["Be brief.", "hi"]
    assert options["tools"][0]["function"]["name"] == "add"
    assert options["thinking"] is None
    assert "Unknown field: max_tokens" in error_of(ask(client, path), 400)
    error_of(client.post(path, json={**body, "model": "x"}), 404, "not_found_error")
    monkeypatch.setattr(engine, "encode_chat", lambda *_, **__: int("x"), raising=False)
    error_of(client.post(path, json=body), 400)


@pytest.mark.parametrize(
    ("model", "hints"),
    [
        (MessagesRequest, message_create_params.MessageCreateParamsBase),
        (MessagesRequest, beta_create_params.MessageCreateParamsBase),
        (CountRequest, message_count_tokens_params.MessageCountTokensParams),
    ],
)
def test_every_field_of_the_sdk_is_known(model, hints):
    in_headers = {"betas"}
    assert set(typing.get_type_hints(hints)) - set(model.model_fields) - in_headers == set()


@pytest.mark.parametrize(
    "system",
    [
        "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch={};\nBe brief.",
        "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch={}\nBe brief.",
        "x-anthropic-billing-header: cc_version=2.1; cch={};Be brief.",
        "\nx-anthropic-billing-header: {}\nx-anthropic-other: a=1;\nBe brief.",
    ],
)
@pytest.mark.parametrize("is_block", [False, True])
def test_lines_that_differ_between_requests_do_not_reach_the_model(
    client, engine, system, is_block
):
    for value in ("eb6c6", "0aaa9"):
        text = system.format(value)
        blocks = [{"type": "text", "text": text}]
        assert ask(client, system=blocks if is_block else text).is_success
    first, second = (generation.prompt for generation in engine.started)
    assert first == second
    assert first[0] == {"role": "system", "content": "Be brief."}


def test_words_about_such_lines_stay(client, engine):
    for text in ("", "Drop x-anthropic-billing-header: a=1; lines.\nx-anthropic-b: 2"):
        assert ask(client, system=text).is_success
        assert engine.started[-1].prompt[0] == {"role": "system", "content": text}


def test_compression_is_prefetched_by_request(client, engine):
    assert ask(client, draftree={"compress": "auto", "compress_keep": "auto"}).status_code == 200
    assert (engine.calls[-1]["compress"], engine.calls[-1]["compress_keep"]) == ("auto", "auto")
    assert ask(client, draftree={"compress": "on"}).status_code == 400
