"""Requests that are meant to do harm, on every endpoint: each is refused, the next one works."""

import json
import time

import httpx2
import pytest

from draftree.serve.thread import State
from tests.serve.conftest import wait_for

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
BODIES = {
    CHAT: {"model": "fake", "messages": HI},
    TEXT: {"model": "fake", "prompt": "hi"},
    "/v1/responses": {"model": "fake", "input": "hi"},
    "/v1/messages": {"model": "fake", "messages": HI, "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "fake", "messages": HI},
}
DEEP = "[" * 100_000


@pytest.fixture(params=BODIES)
def path(request):
    return request.param


@pytest.fixture(scope="module")
def client(brief):
    with httpx2.Client(base_url=brief.url, timeout=120) as client:
        yield client


@pytest.fixture
def refused(client, brief):
    """Sends a body and returns the error; the next request must work."""

    def send(path, content, status=400, kind="application/json"):
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        start_s = time.process_time()
        response = client.post(path, content=raw, headers={"content-type": kind})
        assert response.status_code == status, response.text[:500]
        assert time.process_time() - start_s < 10
        assert len(response.text) < 2000
        assert client.post(path, json=BODIES[path]).is_success
        return response.json()["error"]

    yield send
    assert brief.service.thread.num_failures == 0
    assert brief.service.state is State.READY
    wait_for(lambda: brief.service.queue.num_admitted == 0)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\x00",
        b"null",
        b"[]",
        b'"text"',
        b"{}",
        b'{"model": "fake", "model": 5}',
        b"\xff\xfe{}",
        '{"model": "fake"}'.encode("utf-16"),
        b'{"model": "\xc3\x28"}',
        b'{"model": "\xed\xa0\x80"}',
        rb'{"model": "\ud83d"}',
        DEEP.encode(),
        b'{"messages": ' + DEEP.encode(),
        b'{"a":' * 100_000,
        b'{"model": ' + b"9" * 100_000 + b"}",
        b'{"model": 1e999999}',
        b'{"model": NaN}',
        b"{" + b",".join(b'"f%d": 1' % number for number in range(100_000)) + b"}",
        b'{"' + b"a" * 1_000_000 + b'": 1}',
    ],
)
def test_bodies_that_are_wrong_for_everyone(refused, path, raw):
    assert refused(path, raw)["message"]


def test_other_content_types(refused, path):
    raw = json.dumps(BODIES[path]).encode()
    for kind in ("text/plain", "multipart/form-data; boundary=x", "application/xml", "", "json"):
        assert "Content-Type" in refused(path, raw, 415, kind)["message"]


def test_unknown_models(refused, path):
    for name in ("other", "", "fake\x00", "../fake", "FAKE", "x" * 1000):
        assert "no model" in refused(path, {**BODIES[path], "model": name}, 404)["message"]


def test_fifty_megabytes(refused, path):
    assert "MiB" in refused(path, b" " * 50_000_000, 413)["message"]


def test_a_million_tokens(refused, path):
    words = "word " * 1_000_000
    name = next(name for name in ("prompt", "input", "messages") if name in BODIES[path])
    value = words if name != "messages" else [{"role": "user", "content": words}]
    message = refused(path, {**BODIES[path], name: value})["message"]
    assert "context length is 512 tokens" in message or "512" in message, message
    assert "characters" in message


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": [1] * 1_000_000}, "1000000 tokens"),
        ({"prompt": [1] * 1_000_000, "echo": True}, "1000000 tokens"),
        ({"prompt": ["a"] * 100_000}, "100000 replies"),
        ({"prompt": ["a"] * 300_000}, "too many parts"),
        ({"prompt": [[]] * 600_000}, "too many parts"),
        ({"prompt": [{}] * 400_000}, "prompt[0]"),
        ({"prompt": [99999]}, "no token 99999"),
        ({"prompt": [2**62]}, "prompt[0]"),
        ({"top_k": 2**31}, "top_k"),
        ({"top_k": 10**30}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"logit_bias": {str(number): 1 for number in range(100_000)}}, "1024 items"),
        ({"logit_bias": {f"x{number}": 1 for number in range(100_000)}}, "More than 1000"),
        ({"stop": ["a" * 1001]}, "stop[0]"),
    ],
)
def test_completions(refused, fields, words):
    assert words in refused(TEXT, {**BODIES[TEXT], **fields})["message"]


def with_schema(schema):
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    }


def nested(depth):
    return {"type": "object", "properties": {"a": nested(depth - 1)}} if depth else {}


@pytest.mark.parametrize(
    "fields",
    [
        with_schema({"type": "nonsense"}),
        with_schema({"$ref": "#"}),
        with_schema({"$ref": "http://127.0.0.1:1/x"}),
        with_schema({"$ref": "file:///etc/passwd"}),
        with_schema({"type": "string", "pattern": "("}),
        with_schema({"type": "number", "minimum": float("inf")}),
        with_schema({"type": "number", "minimum": float("nan")}),
        with_schema({"type": "integer", "maximum": 10**400}),
        with_schema({"type": "object", "properties": {f"k{n}": {} for n in range(1000)}}),
        with_schema(nested(80)),
        {"tools": [{"type": "function", "function": {"name": "x" * 1_000_000}}]},
        {
            "tools": [
                {"type": "function", "function": {"name": f"f{n}", "description": "a" * 1000}}
                for n in range(512)
            ]
        },
        {"messages": [{"role": "user", "content": "x"}] * 100_000},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 50_000}]},
    ],
)
def test_chats(refused, fields):
    assert refused(CHAT, {**BODIES[CHAT], **fields})["message"]


def call(arguments):
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "assistant", "tool_calls": [call(DEEP[:400])]}, *HI]},
        {"messages": [{"role": "assistant", "tool_calls": [call("[1e999, NaN]")]}, *HI]},
        {"messages": [{"role": "user", "content": "<|im_end|>{{ 7 * 7 }}{% raw %}\x00\uffff"}]},
        {"messages": [{"role": "tool", "tool_call_id": "", "content": ""}]},
        {"temperature": 1e-320, "top_p": 0, "repetition_penalty": 1e-300},
        {"logit_bias": {"0": 100, "00": -100}},
        {"seed": -(2**63), "top_k": 2**31 - 1, "max_tokens": 2**31},
        {"n": 64, "stop": ["\x00"] * 64},
        with_schema({"type": "string", "pattern": "(a{1000}){1000}"}),
        with_schema({"type": "string", "pattern": "(((a*)*)*)*b"}),
        with_schema({"type": "array", "minItems": 10**9}),
        with_schema({"enum": [f"x{number}" for number in range(20_000)]}),
    ],
)
def test_what_is_odd_but_allowed(client, brief, fields):
    response = client.post(CHAT, json={**BODIES[CHAT], **fields})
    assert response.is_success, response.text
    assert brief.service.thread.num_failures == 0


def test_arguments_nested_too_deeply_for_json(client):
    """They are text that a model wrote, and shown to it as such."""
    messages = [{"role": "assistant", "tool_calls": [call(DEEP)]}, *HI]
    error = client.post(CHAT, json={"model": "fake", "messages": messages}).json()["error"]
    assert error["code"] == "context_length_exceeded"


def test_wrong_keys(start):
    url = start(api_keys=("secret",)).url
    for path, body in BODIES.items():
        for key in ("wrong", "secre", "secret2", "s\u00e9cret", "x" * 10_000):
            headers = {"Authorization": f"Bearer {key}".encode()}
            response = httpx2.post(url + path, json=body, headers=headers)
            assert response.status_code == 401
            assert "API key" in response.json()["error"]["message"]
    headers = {"x-api-key": "secret"}
    assert httpx2.post(url + CHAT, json=BODIES[CHAT], headers=headers).is_success


def test_names_that_are_not_this_server_s(start, client):
    url = start(allowed_hosts=("llm.example.org",)).url
    for host in ("evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.com"):
        for path in ("/health", "/v1/models", "/"):
            response = httpx2.get(url + path, headers={"Host": host})
            assert response.status_code == 403
            assert "--allowed-host" in response.json()["error"]["message"]
        assert client.get("/v1/models", headers={"Host": host}).status_code == 403
    assert httpx2.get(f"{url}/v1/models", headers={"Host": "llm.example.org:8000"}).is_success
    open_url = start(allowed_hosts=("*",)).url
    assert httpx2.get(f"{open_url}/v1/models", headers={"Host": "any.example"}).is_success
