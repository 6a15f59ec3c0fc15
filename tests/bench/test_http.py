"""Clients against a small server of the standard library that keeps to a script."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from draftree.bench import http
from draftree.bench.http import (
    Endpoint,
    HttpOptions,
    StreamedReply,
    ask,
    measure_http,
    read_events,
    spread_of,
    summarize_level,
)
from draftree.errors import BenchError


class Scripted(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self._send(200, [json.dumps({"data": [{"id": "some/model"}]}).encode()])

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.bodies.append(body)
            server.keys.append(self.headers.get("Authorization"))
            server.num_running += 1
            server.most_running = max(server.most_running, server.num_running)
        refusal = [b'{"error": {"message": "no such thing"}}']
        parts = server.script if server.status == 200 else refusal
        self._send(server.status, parts[:-1])
        with server.lock:  # before the client knows that this was all
            server.num_running -= 1
        self.wfile.write(parts[-1])

    def _send(self, status, parts):
        self.send_response(status)
        self.end_headers()
        for part in parts:
            self.wfile.write(part)
            self.wfile.flush()
            time.sleep(0.01)


def event(data):
    return f"data: {json.dumps(data)}\n\n".encode()


def piece(text, name="content"):
    return event({"choices": [{"delta": {name: text}}], "usage": None})


SCRIPT = [
    event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
    b": waiting\n\n",
    piece("think", "reasoning_content"),
    piece("one "),
    piece("two"),
    event({"choices": [], "usage": {"completion_tokens": 7}}),
    b"data: [DONE]\n\n",
]


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    server.lock = threading.Lock()
    server.bodies, server.keys, server.script, server.status = [], [], SCRIPT, 200
    server.num_running = server.most_running = 0
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_reply_is_read_as_it_comes(server):
    reply = ask(Endpoint(f"{server.url}/v1/", api_key="secret"), "m", "Hello", 9)
    assert (reply.text, reply.num_tokens, reply.is_counted) == ("thinkone two", 7, True)
    assert len(reply.piece_s) == 3 and len(reply.gaps_ms) == 2
    assert 0.0 < reply.piece_s[0] < reply.piece_s[-1] <= reply.end_s
    assert min(reply.gaps_ms) >= 0.0
    (body,) = server.bodies
    assert body["messages"] == [{"role": "user", "content": "Hello"}]
    assert (body["max_tokens"], body["temperature"], body["stream"]) == (9, 0, True)
    assert server.keys == ["Bearer secret"]
    assert "secret" not in repr(Endpoint("http://x", api_key="secret"))


def test_pieces_are_counted_where_the_server_does_not(server):
    server.script = [SCRIPT[3], SCRIPT[4]]  # ends without [DONE], too
    reply = ask(Endpoint(server.url), "m", "Hello", 9)
    assert (reply.num_tokens, reply.is_counted) == (2, False)


def test_a_short_request_is_sent_while_the_long_one_is_written(server, say, monkeypatch):
    """Were the long one over by then, nothing would be measured."""
    monkeypatch.setattr(http, "_LEAD_S", 0.05)
    is_written, seen = threading.Event(), []

    def answer(endpoint, model, prompt, num_tokens):
        if num_tokens == 1200:
            assert is_written.wait(120)
            return StreamedReply("long", 1100, True, [0.1], 9.0)
        if "behind" in prompt:
            seen.append(is_written.is_set())
            is_written.set()
            return StreamedReply("short", 8, True, [0.2, 0.3], 0.4)
        is_written.clear()
        return StreamedReply("short", 8, True, [0.05, 0.1], 0.2)

    monkeypatch.setattr(http, "ask", answer)
    measures = http.measure_behind(Endpoint(server.url), "m", 3, say)
    assert seen == [False] * 3 and measures.num_ahead == 1100
    assert measures.headline() == {"behind_ms": 200.0, "alone_ms": 50.0}


def test_levels_have_as_many_clients_at_a_time(server, say, monkeypatch):
    monkeypatch.setattr(http, "_LEAD_S", 0.0)
    measures = measure_http(Endpoint(server.url), ["a", "b"], HttpOptions((1, 3), 2, 4), say)
    assert measures.model == "some/model" and measures.is_counted
    assert list(measures.levels) == ["1", "3"]
    assert [level.num_tokens for level in measures.levels.values()] == [14, 42]
    assert [level.ttft.count for level in measures.levels.values()] == [2, 6]
    assert 1 < server.most_running <= 3
    assert measures.behind.num_ahead == 7
    prompts = [body["messages"][0]["content"] for body in server.bodies]
    assert len(set(prompts)) == len(prompts) == 10 + 8 + 2 * 3
    assert len(measures.first.ttft_ms) == 10
    assert "a" not in json.dumps(measures.levels["1"].ttft_ms.samples)


def test_the_first_request_is_held_against_the_tenth(server, say, monkeypatch):
    firsts = iter([0.3, *[0.2] * 8, 0.1])

    def answer(endpoint, model, prompt, num_tokens, system):
        return StreamedReply("short", 8, True, [next(firsts)], 0.4)

    monkeypatch.setattr(http, "ask", answer)
    measures = http.measure_first(Endpoint(server.url), "m", "Hello", say)
    assert measures.headline() == {"first_over_tenth": 3.0}


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ([event({"error": {"message": "engine failed"}})], "broke off.*engine failed"),
        ([b"data: {oops\n\n"], "not JSON"),
        ([SCRIPT[-1]], "without text"),
    ],
)
def test_broken_streams_are_sentences(server, script, words):
    server.script = script
    with pytest.raises(BenchError, match=words):
        ask(Endpoint(server.url), "m", "Hello", 9)


def test_refusals_are_sentences(server):
    server.status = 404
    with pytest.raises(BenchError, match=r"answered 404 to chat/completions: .*no such thing"):
        ask(Endpoint(server.url), "m", "Hello", 9)
    with pytest.raises(BenchError, match="is not a URL"):
        Endpoint("localhost:8000").find_model()
    with pytest.raises(BenchError, match="does not answer"):
        Endpoint("http://127.0.0.1:9").find_model()


def test_levels_are_summed():
    replies = [
        StreamedReply("a", 5, True, [0.1, 0.2, 0.4], 0.5),
        StreamedReply("b", 5, True, [0.3], 0.7),
    ]
    level = summarize_level(replies, 2.0)
    assert level.throughput == 5.0
    assert level.ttft_ms.samples == (100.0, 300.0) and level.ttft.median == 200.0
    assert level.gap_ms.count == 2 and level.gap_ms.median == 150.0
    assert level.token_ms.median == 100.0


def test_spread_of_few_and_many():
    assert (spread_of([]).count, spread_of([3.0]).p95) == (0, 3.0)
    many = spread_of([float(i) for i in range(101)])
    assert (many.median, many.p95, many.count) == (50.0, 95.0, 101)


def test_events_end_with_done():
    lines = [b"event: x\n", b"data: {}\n", b"data: 3\n", b"data: [DONE]\n", b"data: {}\n"]
    assert list(read_events(iter(lines))) == [{}]
