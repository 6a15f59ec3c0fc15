"""Bodies that are too long, too slow, or not JSON at all; and the next request works."""

import asyncio
import json
import socket
from types import SimpleNamespace

import httpx2
import pytest

from draftree.serve import body
from draftree.serve.wire import ApiError
from tests.serve.test_openai import HELLO, error_of

PATH = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def small(shared):
    """A server that takes little."""
    from tests.serve.conftest import Running

    running = Running(shared[0].open, max_body_bytes=100_000).start()
    yield running
    running.stop()


@pytest.fixture
def post(small, engine):
    with httpx2.Client(base_url=small.url, timeout=120) as client:
        yield lambda content, headers=JSON: client.post(PATH, content=content, headers=headers)
        assert client.post(PATH, json=HELLO).is_success


def test_too_long(post):
    error = error_of(post(b" " * 300_000), 413)
    assert error["code"] == "request_too_large"
    assert "MiB" in error["message"]


def test_too_long_without_a_length(post):
    error_of(post(b" " * 1000 for _ in range(300)), 413)


def test_too_long_is_said_before_it_is_sent(small):
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += "Content-Length: 99999999\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", small.port)) as connection:
        connection.sendall(head.encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")


def test_just_short_enough(post):
    filler = b" " * (100_000 - len(httpx2.Request("POST", "http://x", json=HELLO).content))
    content = httpx2.Request("POST", "http://x", json=HELLO).content
    assert post(content + filler).is_success
    error_of(post(content + filler + b" "), 413)


def test_large_bodies_are_parsed_too(client, engine):
    engine.max_ctx = 10**6
    message = {"role": "user", "content": "x" * 500_000}
    assert client.post(PATH, json={**HELLO, "messages": [message]}).is_success


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_other_kinds_of_body(post, kind):
    error = error_of(post(b"{}", {"content-type": kind}), 415)
    assert "Content-Type: application/json" in error["message"]


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "application/x+json"])
def test_kinds_of_json(post, kind):
    assert error_of(post(b"{}", {"content-type": kind}), 400)["param"] in ("model", "messages")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"model": "\xff"}', b"[]"])
def test_bad_json(post, content):
    error_of(post(content), 400)


class Slow:
    headers = JSON
    state = SimpleNamespace(client="a", body_bytes=0)

    async def stream(self):
        yield b"{"
        await asyncio.sleep(10)


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate, gzip"])
def test_encoded_bodies_are_refused_by_name(post, coding):
    error = error_of(post(b"\x1f\x8b", {**JSON, "content-encoding": coding}), 415)
    sentence = f"The body is encoded as {coding!r}; send it without Content-Encoding."
    assert error["message"] == sentence


def test_identity_is_no_encoding(post):
    assert post(json.dumps(HELLO), {**JSON, "content-encoding": "Identity"}).is_success


def test_too_slow(small, monkeypatch):
    monkeypatch.setattr(body, "_READ_S", 0.01)
    with pytest.raises(ApiError) as caught:
        asyncio.run(body._read(Slow(), small.service))
    assert caught.value.status == 408


def test_a_client_that_leaves_while_it_sends(small):
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", small.port)) as connection:
        connection.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
    assert httpx2.get(f"{small.url}/health").is_success
