"""Ollama's API: what reaches the engine, what comes back line by line, and what is refused."""

import json

import httpx2
import pytest

from draftree.core import FinishReason
from draftree.serve.ollama import read_messages
from draftree.serve.ollama_fields import OllamaMessage
from draftree.text.grammar import FormatKind, ResponseFormat
from tests.serve.fake import THINKING_AND_CALLS

USER = {"role": "user", "content": "hi"}
FUNCTION = {"name": "add", "description": "Add.", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}


def ask(client, path="chat", **fields):
    given = {"messages": [USER]} if path == "chat" else {"prompt": "hi"}
    return client.post(f"/api/{path}", json={"model": "fake", **given, **fields})


def lines_of(reply):
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.text.splitlines()]


def test_a_stream_is_lines_and_the_last_one_counts(client):
    *lines, last = lines_of(ask(client))
    assert "".join(line["message"]["content"] for line in lines) == "Hello there"
    assert all(line["done"] is False and line["model"] == "fake" for line in lines)
    assert (last["done"], last["done_reason"]) == (True, "stop")
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["prompt_eval_count"], last["prompt_eval_duration"]) == (3, 5_000_000)
    assert (last["eval_count"], last["eval_duration"]) == (2, 20_000_000)
    assert last["total_duration"] > 0 and last["created_at"].endswith("Z")


def test_in_one_piece(client, engine):
    engine.finish_reason = FinishReason.LENGTH
    reply = ask(client, stream=False).json()
    assert reply["message"] == {"role": "assistant", "content": "Hello there"}
    assert (reply["done"], reply["done_reason"]) == (True, "length")
    reply = ask(client, "generate", stream=False).json()
    assert (reply["response"], reply["eval_count"]) == ("Hello there", 2)


def test_generate_streams_text(client, engine):
    *lines, last = lines_of(ask(client, "generate", system="Be brief."))
    assert "".join(line["response"] for line in lines) == "Hello there"
    assert (last["response"], last["done"]) == ("", True)
    assert [message["role"] for message in engine.calls[0]["prompt"]] == ["system", "user"]


def test_raw_goes_past_the_template(client, engine):
    options = {"num_predict": 5}
    assert ask(client, "generate", raw=True, stream=False, options=options).is_success
    assert (engine.calls[0]["prompt"], engine.calls[0]["max_tokens"]) == ("hi", 5)
    assert ask(client, "generate", raw=True, stream=False).is_success
    assert engine.calls[1]["max_tokens"] == engine.max_ctx
    refused = ask(client, "generate", raw=True, system="x")
    assert (refused.status_code, "system" in refused.json()["error"]) == (400, True)


@pytest.mark.parametrize("is_stream", [False, True])
def test_thinking_and_calls(client, engine, is_stream):
    engine.thinks, engine.pieces = True, THINKING_AND_CALLS
    engine.finish_reason = FinishReason.TOOL_CALLS
    reply = ask(client, stream=is_stream, think=True, tools=[TOOL])
    lines = lines_of(reply) if is_stream else [reply.json()]
    messages = [line["message"] for line in lines]
    assert "".join(message.get("thinking", "") for message in messages) == "Let me see"
    assert "".join(message["content"] for message in messages) == "Adding."
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    assert calls == [
        {"id": "call_1", "function": {"name": "add", "arguments": {"a": 1}}},
        {"id": "call_2", "function": {"name": "add", "arguments": {}}},
    ]
    assert lines[-1]["done_reason"] == "stop"
    assert engine.calls[0]["tools"] == [TOOL] and engine.calls[0]["thinking"] is True


def test_options_reach_the_engine_and_others_are_named(client, engine):
    options = {
        "num_predict": 7,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 3,
        "stop": ["x"],
        "repeat_penalty": 1.5,
        "repeat_last_n": -1,
        "presence_penalty": 1,
        "frequency_penalty": 0.5,
        "num_ctx": 4096,
        "num_gpu": 99,
    }
    reply = ask(client, options=options, keep_alive="5m", stream=False)
    named = reply.headers["x-draftree-ignored"].split(", ")
    assert set(named) == {"options.num_ctx", "options.num_gpu", "keep_alive"}
    call = engine.calls[0]
    sampling = call["sampling"]
    assert (call["max_tokens"], call["stop"]) == (7, ("x",))
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 4, 0.9)
    assert (sampling.min_p, sampling.seed, sampling.repetition_penalty) == (0.1, 3, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, 0.5)


@pytest.mark.parametrize("count", [None, -1, -2, 0])
def test_without_a_limit_the_context_is_one(client, engine, count):
    assert ask(client, options={"num_predict": count}, stream=False).is_success
    assert engine.calls[0]["max_tokens"] == engine.max_ctx


@pytest.mark.parametrize("path", ["chat", "generate"])
def test_formats(client, engine, path):
    schema = {"type": "object", "properties": {}}
    for wanted in ("json", schema, ""):
        assert ask(client, path, format=wanted, stream=False).is_success
    found = [call["response_format"] for call in engine.calls]
    by_schema = ResponseFormat(FormatKind.JSON_SCHEMA, schema)
    assert found == [ResponseFormat(FormatKind.JSON_OBJECT), by_schema, None]


def test_effort(client, engine):
    engine.thinks = True
    for think in ("low", "medium", "high", "max", False):
        assert ask(client, think=think, stream=False).is_success
    found = [(call["thinking"], call["thinking_budget"]) for call in engine.calls]
    assert found == [(True, 1024), (True, 4096), (True, None), (True, None), (False, None)]


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("chat", {"think": True}, "does not support thinking"),
        ("chat", {"messages": [{**USER, "images": ["aGk="]}]}, "messages[0].images"),
        ("chat", {"messages": [{"role": "bot", "content": ""}]}, "messages[0].role"),
        ("chat", {"options": {"mirostat": 2}}, "options.mirostat"),
        ("chat", {"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "repeat_last_n"),
        ("chat", {"options": {"colour": 1}}, "Unknown field: options.colour"),
        ("chat", {"logprobs": True}, "logprobs"),
        ("chat", {"tools": [TOOL, TOOL]}, "same name"),
        ("chat", {"format": "xml"}, "format"),
        ("generate", {"suffix": "x"}, "suffix"),
        ("generate", {"context": [1, 2]}, "context"),
        ("generate", {"template": "x"}, "template"),
        ("generate", {"prompt": "x" * 100}, "maximum context length"),
        ("embed", {"input": ""}, "empty"),
        ("embed", {"input": "a" * 9, "truncate": False}, "9 tokens"),
        ("embed", {"input": "a", "dimensions": 2}, "dimensions"),
        ("embeddings", {"prompt": ""}, "empty"),
    ],
)
def test_what_is_refused_is_named(client, engine, path, fields, words):
    reply = ask(client, path, **fields)
    assert reply.status_code == 400
    assert words in reply.json()["error"]
    assert engine.calls == []


def test_an_unknown_model_and_a_path_that_is_not_there(client):
    reply = ask(client, model="other")
    assert (reply.status_code, "no model 'other'" in reply.json()["error"]) == (404, True)
    assert ask(client, model="fake:latest", stream=False).json()["model"] == "fake:latest"
    assert "error" in client.post("/api/pull", json={"model": "x"}).json()


def test_a_stream_that_breaks_off_says_so(start, engine):
    engine.pieces = ["Hello", RuntimeError("broken")]
    running = start()
    reply = httpx2.post(f"{running.url}/api/chat", json={"messages": [USER]}, timeout=120)
    if reply.status_code == 200:
        assert "failed" in json.loads(reply.text.splitlines()[-1])["error"]
    else:
        assert (reply.status_code, "failed" in reply.json()["error"]) == (500, True)


def test_curl_need_not_say_that_it_sends_json(client):
    form = {"content-type": "application/x-www-form-urlencoded"}
    content = json.dumps({"prompt": "hi", "stream": False})
    assert client.post("/api/generate", content=content, headers=form).is_success
    page = {**form, "origin": "https://example.org"}
    assert client.post("/api/generate", content=content, headers=page).status_code == 415


def test_nothing_asked_for_is_a_model_that_is_loaded(client, engine):
    reply = ask(client, "generate", prompt=None).json()
    assert (reply["response"], reply["done_reason"]) == ("", "load")
    assert ask(client, messages=[]).json()["done_reason"] == "load"
    assert engine.calls == []


def test_what_it_tells_of_its_model(client):
    (entry,) = client.get("/api/tags").json()["models"]
    assert (entry["name"], entry["size"]) == ("fake", 98_000_000)
    assert entry["details"]["family"] == "unreal"
    assert entry["details"]["parameter_size"] == "135.0M"
    assert len(entry["digest"]) == 64
    (loaded,) = client.get("/api/ps").json()["models"]
    assert (loaded["model"], loaded["context_length"]) == ("fake", 64)
    shown = client.post("/api/show", json={"model": "fake"}).json()
    assert shown["capabilities"] == ["completion", "tools", "embedding"]
    assert shown["model_info"]["unreal.context_length"] == 64
    assert client.post("/api/show", json={"model": "x"}).status_code == 404
    version = client.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4), "some clients ask for that"


def test_embeddings(client):
    reply = ask(client, "embed", input=["a", "abc" * 9], keep_alive=0).json()
    assert reply["embeddings"] == [[1, 0, 0, 1], [8, 0, 0, 1]], "long texts are cut"
    assert reply["prompt_eval_count"] == 9
    assert ask(client, "embeddings", prompt="abc").json() == {"embedding": [3, 0, 0, 1]}


def test_results_find_their_calls():
    def call(name, **more):
        return {"function": {"name": name, "arguments": {"a": 1}}, **more}

    messages = [
        {"role": "assistant", "tool_calls": [call("add"), call("sub"), call("add", id="mine")]},
        {"role": "tool", "content": "2", "tool_name": "sub"},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "3", "tool_call_id": "mine", "tool_name": "add"},
        {"role": "tool", "content": "4", "tool_name": "other"},
        {"role": "assistant", "content": "So", "thinking": "Hm."},
    ]
    found = read_messages([OllamaMessage(**message) for message in messages])
    ids = [each["id"] for each in found[0]["tool_calls"]]
    assert len(set(ids)) == 3 and ids[2] == "mine"
    assert found[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    results = [message["tool_call_id"] for message in found[1:5]]
    assert results == [ids[1], ids[0], "mine", "call_0"]
    assert found[5] == {"role": "assistant", "content": "So", "reasoning_content": "Hm."}
