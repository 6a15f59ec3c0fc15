"""Clients that send slowly, send rubbish, read nothing, or come in crowds."""

import json
import socket
import struct
import time

import httpx2
import pytest

from draftree.core import FinishReason
from draftree.serve import body
from draftree.serve import connection as module
from tests.serve.conftest import Running, wait_for
from tests.serve.test_openai import HELLO
from tests.serve.test_reply import PATH, open_stream

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
JSON = "Content-Type: application/json\r\n"


class Raw:
    """A connection on which anything may be sent."""

    def __init__(self, running, receive_bytes=None, address="127.0.0.1"):
        self.socket = socket.socket()
        self.socket.bind((address, 0))
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(120)
        self.socket.connect(("127.0.0.1", running.port))

    def send(self, data):
        self.socket.sendall(data)

    def read(self):
        """Head and content of what comes until the server hangs up."""
        received = b""
        while piece := self.socket.recv(1_000_000):
            received += piece
        head, _, content = received.partition(b"\r\n\r\n")
        return head.decode(), content.decode()

    def read_one(self):
        """A reply in JSON, after which the server waits for more; its status."""
        received = b""
        while not received.endswith(b"}"):
            received += self.socket.recv(100_000)
        return int(received.split()[1])

    def close(self):
        self.socket.close()


@pytest.fixture(scope="module")
def server(shared):
    running = Running(shared[0].open).start()
    yield running
    running.stop()


@pytest.fixture
def running(server, engine):
    """A server without connections, on which the next request must work."""
    wait_for(lambda: not server.server.server_state.connections)
    yield server
    answer = httpx2.post(server.url + PATH, json=HELLO, timeout=120)
    assert answer.json()["choices"][0]["message"]["content"] == "".join(engine.pieces)


def refusal(raw, status):
    head, content = raw.read()
    assert head.startswith(f"HTTP/1.1 {status}"), head
    error = json.loads(content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error["message"]


def post_head(length):
    return f"POST {PATH} HTTP/1.1\r\nHost: x\r\n{JSON}Content-Length: {length}\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500 + b"\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
        (b"GET /health HTTPS/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nBad Name: y\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nA: \x00\r\n\r\n", 400),
        (b"GET /h\xff HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 500_000, 431),
        (b"GET / HTTP/1.1\r\nA: " + b"b" * 3_000_000, 431),
    ],
)
def test_what_is_not_http_is_refused(running, data, status):
    raw = Raw(running)
    raw.send(data)
    assert "not HTTP as it should be" in refusal(raw, status)


def test_rubbish_within_a_body(running):
    raw = Raw(running)
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\n{JSON}Transfer-Encoding: chunked\r\n\r\n"
    raw.send(head.encode() + b"5\r\n{    \r\nrubbish\r\n")
    assert "not HTTP as it should be" in refusal(raw, 400)


def test_rubbish_behind_a_request(running):
    raw = Raw(running)
    raw.send(GET + b"rubbish\r\n\r\n")
    head, content = raw.read()
    assert head.startswith("HTTP/1.1 200")
    assert "HTTP/1.1 400" in content


def test_requests_in_a_row_are_answered_in_their_order(running):
    raw = Raw(running)
    last = GET.replace(b"Host", b"Connection: close\r\nHost")
    raw.send(GET + GET.replace(b"/health", b"/nothing") + last)
    head, content = raw.read()
    statuses = [reply[:3] for reply in (head + content).split("HTTP/1.1 ")[1:]]
    assert statuses == ["200", "404", "200"]


@pytest.mark.parametrize(
    "target", [b"*", b"//", b"/%00", b"/%ff%fe", b"/../../etc/passwd", b"http://a.example/health"]
)
@pytest.mark.parametrize("method", [b"GET", b"OPTIONS", b"CONNECT", b"TRACE", b"BREW"])
def test_odd_targets_and_methods(running, method, target):
    raw = Raw(running)
    raw.send(method + b" " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    head, content = raw.read()
    assert head.split()[1] in ("200", "403", "404", "405"), head
    assert head.split()[1] == "200" or json.loads(content)["error"]["message"]


def test_slow_heads_are_cut_off(running, monkeypatch):
    monkeypatch.setattr(module, "REQUEST_S", 2.0)
    raws = [Raw(running) for _ in range(20)]
    start_s = time.monotonic()
    for letter in GET[:-2]:
        for raw in raws[1:]:
            raw.send(bytes([letter]))
        time.sleep(0.02)
        if time.monotonic() - start_s > 0.3:
            break
    assert raws[0].read() == ("", "")  # said nothing, and is told nothing
    for raw in raws[1:]:
        assert "did not arrive" in refusal(raw, 408)


def test_a_slow_second_head_is_cut_off_too(running, monkeypatch):
    raw = Raw(running)
    raw.send(GET)
    assert raw.read_one() == 200
    monkeypatch.setattr(module, "REQUEST_S", 1.0)
    raw.send(b"GET /health HTT")
    time.sleep(0.15)
    raw.send(b"P/1.1\r\n")
    assert "did not arrive" in refusal(raw, 408)


def test_a_request_in_two_pieces_is_not_cut_off(running, monkeypatch):
    raw = Raw(running)
    for _ in range(2):
        raw.send(GET[:20])
        time.sleep(0.05)
        raw.send(GET[20:])
        assert raw.read_one() == 200
    monkeypatch.setattr(module, "REQUEST_S", 0.2)
    raw.send(GET)
    assert raw.read_one() == 200
    time.sleep(0.4)  # idle connections may stay longer
    raw.send(GET)
    assert raw.read_one() == 200
    raw.close()


def test_a_slow_reply_is_not_a_slow_request(running, engine, monkeypatch):
    monkeypatch.setattr(module, "REQUEST_S", 0.5)
    engine.pieces = ["word "] * 3
    engine.round_s = 0.3
    text = httpx2.post(running.url + PATH, json={**HELLO, "stream": True}, timeout=120).text
    assert text.endswith("data: [DONE]\n\n")
    engine.round_s = 0.0


def test_slow_bodies_are_cut_off(running, monkeypatch):
    monkeypatch.setattr(body, "_READ_S", 1.0)
    raw = Raw(running)
    raw.send(post_head(1000))
    for _ in range(10):
        raw.send(b" ")
        time.sleep(0.02)
    assert raw.read_one() == 408
    raw.close()


def test_bodies_in_tiny_chunks(running):
    raw = Raw(running)
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\n{JSON}Transfer-Encoding: chunked\r\n\r\n"
    content = json.dumps(HELLO).ljust(20_000).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % letter for letter in content)
    raw.send(head.encode() + chunks + b"0\r\n\r\n")
    assert raw.read_one() == 200
    raw.close()


def test_a_body_that_nobody_reads_ends(running, monkeypatch):
    """The answer comes at once; what is left of the body is taken for a while."""
    monkeypatch.setattr(module, "REQUEST_S", 1.0)
    raw = Raw(running)
    raw.send(post_head(1_000_000).replace(PATH.encode(), b"/nothing"))
    assert raw.read_one() == 404
    num_sent, end_s = 0, time.monotonic() + 120
    with pytest.raises(OSError):
        while time.monotonic() < end_s:
            raw.send(b" ")
            num_sent += 1
            time.sleep(0.02)
    assert num_sent > 2  # where nobody takes them, the first or second one fails


def test_a_connection_serves_on_after_a_body_that_nobody_read(running):
    raw = Raw(running)
    raw.send(post_head(200_000).replace(PATH.encode(), b"/nothing") + b" " * 200_000)
    assert raw.read_one() == 404
    raw.send(GET)
    assert raw.read_one() == 200
    raw.close()


def test_a_body_that_is_broken_off(running):
    for linger in (False, True):
        raw = Raw(running)
        raw.send(post_head(1000) + b'{"model"')
        if linger:  # close with a reset
            raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.close()


def test_closing_the_sending_half_is_leaving(running, engine):
    engine.round_s = 0.05
    engine.pieces = ["word "] * 100
    stream = open_stream(running)
    wait_for(lambda: engine.started)
    stream.shutdown(socket.SHUT_WR)
    wait_for(lambda: engine.ended)
    assert engine.started[0].finish_reason is FinishReason.CANCELLED
    stream.close()
    engine.pieces = ["fine"]


def test_readers_that_stall_are_cut_off(running, engine, monkeypatch):
    monkeypatch.setattr(module, "READ_S", 0.5)
    engine.pieces = ["x" * 50_000] * 200
    stalled = Raw(running, receive_bytes=4096)
    content = json.dumps({**HELLO, "stream": True}).encode()
    stalled.send(post_head(len(content)) + content)
    wait_for(lambda: engine.started)
    wait_for(lambda: not running.server.server_state.connections)
    wait_for(lambda: running.service.queue.num_admitted == 0)
    wait_for(lambda: not running.server.server_state.tasks)
    engine.pieces = ["fine"]
    stalled.close()


def test_readers_that_stall_at_the_end_are_cut_off(running, engine, monkeypatch):
    """A reply that is all written, but for what the kernel did not take."""
    monkeypatch.setattr(module, "READ_S", 0.5)
    engine.pieces = ["x" * 8_000_000]
    stalled = Raw(running, receive_bytes=4096)
    content = json.dumps(HELLO).encode()
    head = post_head(len(content)).replace(b"Host", b"Connection: close\r\nHost")
    stalled.send(head + content)
    wait_for(lambda: engine.ended)
    wait_for(lambda: not running.server.server_state.connections)
    engine.pieces = ["fine"]
    stalled.close()


def test_slow_readers_get_everything(running, engine, monkeypatch):
    monkeypatch.setattr(module, "READ_S", 10.0)
    engine.pieces = [f"{number:<5000}" for number in range(120)]
    slow = Raw(running, receive_bytes=4096)
    content = json.dumps({**HELLO, "stream": True}).encode()
    slow.send(post_head(len(content)) + content)
    received, deadline = b"", time.monotonic() + 120
    while b"[DONE]" not in received[-200:]:
        assert time.monotonic() < deadline
        received += slow.socket.recv(65_536)
        time.sleep(0.01)
    slow.close()
    assert received.count(b" ") > 550_000
    engine.pieces = ["fine"]


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/v1/models", "/nothing"])
def test_heads_are_those_of_whole_replies(running, path):
    whole, head = (httpx2.request(method, running.url + path) for method in ("GET", "HEAD"))
    assert (head.status_code, head.content) == (whole.status_code, b"")
    changing = ("date", "request-id", "x-request-id", "content-length")
    for name in whole.headers:
        assert name in head.headers
        assert name in changing or whole.headers[name] == head.headers[name]
    assert int(head.headers["content-length"]) > 0
    assert httpx2.head(running.url + PATH).status_code == 404


def test_targets_may_name_the_host(running):
    for target, host, status in (
        (b"http://127.0.0.1:8000/health?a=b", b"x", 200),
        (b"HTTP://localhost/v1/models", b"evil.example", 200),
        (b"http://evil.example/health", b"localhost", 403),
        (b"http://localhost/nothing", b"x", 404),
    ):
        raw = Raw(running)
        raw.send(b"GET " + target + b" HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
        assert raw.read_one() == status
        raw.close()


def test_two_lengths_of_a_body_end_the_connection(running):
    content = json.dumps(HELLO).encode()
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content)
    raw = Raw(running)
    head = post_head(5).replace(b"Host", b"Transfer-Encoding: chunked\r\nHost")
    raw.send(head + chunked + GET)
    head, content = raw.read()
    assert head.startswith("HTTP/1.1 200") and "connection: close" in head.lower()
    assert json.loads(content)["choices"]
    raw.close()


def test_stopping_does_not_wait_for_readers_that_stall(start, engine, monkeypatch):
    monkeypatch.setattr("draftree.serve.server._LAST_WORDS_S", 1)
    running = start(grace_s=0.2)
    engine.pieces = ["x" * 50_000] * 200
    stalled = Raw(running, receive_bytes=4096)
    content = json.dumps({**HELLO, "stream": True}).encode()
    stalled.send(post_head(len(content)) + content)
    wait_for(lambda: engine.ended)
    running.server.should_exit = True
    running._thread.join(120)
    assert not running._thread.is_alive()
    stalled.close()
