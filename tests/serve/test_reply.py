"""Clients that leave, wait, or read slowly."""

import asyncio
import socket
import threading

import httpx2
import pytest

from draftree.core import FinishReason
from draftree.serve import queue, reply
from draftree.serve.openai_reply import ChatWire
from draftree.text.reply import DeltaKind
from tests.serve.conftest import wait_for
from tests.serve.fake import Call, Delta
from tests.serve.test_openai import HELLO, chunks

PATH = "/v1/chat/completions"


def open_stream(running, version="1.1", **fields):
    """A raw connection that has sent a request, and reads nothing yet."""
    request = httpx2.Request("POST", running.url + PATH, json={**HELLO, "stream": True, **fields})
    head = f"POST {PATH} HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(request.content)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", running.port))
    connection.sendall(head.encode() + request.content)
    return connection


@pytest.mark.parametrize("is_stream", [True, False])
def test_leaving_ends_the_reply_within_a_round(start, engine, is_stream):
    running = start()
    engine.round_s = 0.05
    engine.pieces = ["word "] * 1000
    connection = open_stream(running, stream=is_stream)
    wait_for(lambda: engine.started and engine.started[0].usage.completion_tokens >= 3)
    (generation,), num_tokens = engine.started, []
    cancel = generation.cancel
    generation.cancel = lambda: num_tokens.append(generation.usage.completion_tokens) or cancel()
    connection.close()
    wait_for(lambda: engine.ended)
    assert generation.usage.completion_tokens <= num_tokens[0] + 1
    assert generation.finish_reason is FinishReason.CANCELLED
    wait_for(lambda: running.service.queue.num_admitted == 0)
    metrics = httpx2.get(f"{running.url}/metrics").text
    assert "draftree_cancelled_total 1" in metrics
    assert 'route="/v1/chat/completions",status="499"} 1' in metrics


def test_leaving_while_nothing_is_said(start, engine):
    """Rounds whose text is held back produce no deltas, and must still be interruptible."""
    running = start()
    engine.round_s = 0.05
    engine.pieces = [lambda: None] * 1000
    connection = open_stream(running)
    wait_for(lambda: engine.started)
    connection.close()
    wait_for(lambda: engine.ended)
    assert engine.started[0].finish_reason is FinishReason.CANCELLED


def test_leaving_the_queue(start, engine):
    running, gate = start(), threading.Event()
    engine.pieces = [lambda: gate.wait(120), "word "]
    first = open_stream(running)
    wait_for(lambda: engine.started)
    second, third = open_stream(running), open_stream(running)
    wait_for(lambda: running.service.queue.num_waiting == 2)
    second.close()
    wait_for(lambda: running.service.queue.num_waiting == 1)
    assert running.service.queue.num_admitted == 2
    gate.set()
    wait_for(lambda: len(engine.ended) == 2)
    assert len(engine.started) == 2
    for connection in (first, third):
        connection.close()


def test_leaving_ends_all_replies_of_a_request(start, engine):
    running = start()
    engine.round_s = 0.05
    engine.pieces = ["word "] * 1000
    connection = open_stream(running, n=5)
    wait_for(lambda: engine.started)
    connection.close()
    wait_for(lambda: running.service.queue.num_admitted == 0)
    assert len(engine.started) == 1


def test_slow_reader_keeps_nobody_waiting(start, engine):
    running = start()
    engine.pieces = ["x" * 10_000] * 400
    connection = open_stream(running)
    wait_for(lambda: len(engine.ended) == 1)
    engine.pieces = ["quick"]
    answer = httpx2.post(running.url + PATH, json=HELLO, timeout=120).json()
    assert answer["choices"][0]["message"]["content"] == "quick"
    received = b""
    while b"[DONE]" not in received[-100:]:
        received += connection.recv(1_000_000)
    connection.close()
    assert received.count(b"x") >= 4_000_000


def test_long_waits_show_signs_of_life(start, engine, monkeypatch):
    monkeypatch.setattr(reply, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(reply, "_GLANCE_S", 0.05)
    running, gates = start(), [threading.Event(), threading.Event()]
    engine.pieces = [lambda: gates[0].wait(120), "word", lambda: gates[1].wait(120)]
    lines = []
    with httpx2.stream("POST", running.url + PATH, json={**HELLO, "stream": True}) as response:
        for line in filter(None, response.iter_lines()):
            lines.append(line)
            is_said = any("word" in each for each in lines)
            if lines[-2:] == [": waiting"] * 2:
                gates[is_said].set()
    first = next(i for i, line in enumerate(lines) if "word" in line)
    assert lines[:first].count(": waiting") >= 2 and lines[first:].count(": waiting") >= 2
    assert lines[-1] == "data: [DONE]"


BODIES = {
    "/v1/chat/completions": HELLO,
    "/v1/completions": {"model": "fake", "prompt": "Hi"},
    "/v1/responses": {"model": "fake", "input": "Hi"},
    "/v1/messages": {
        "model": "fake",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "Hi"}],
    },
}


@pytest.mark.parametrize("path", BODIES)
def test_waiting_and_reading_are_shown_as_comments(start, engine, monkeypatch, path):
    monkeypatch.setattr(reply, "_GLANCE_S", 0.02)
    engine.parallel = 1
    running, gates = start(), {name: threading.Event() for name in ("first", "half", "all")}

    def read_half():
        generation = engine.started[-1]
        generation.usage.prompt_tokens, generation.usage.read_tokens = 65536, 4096
        gates["half"].wait(120)
        generation.usage.read_tokens = 8192
        gates["all"].wait(120)
        generation.usage.read_tokens = 65535

    engine.pieces = [lambda: gates["first"].wait(120), "word"]
    first = open_stream(running)
    wait_for(lambda: engine.started)
    engine.pieces = [read_half, "word"]
    running.service.queue.note_duration(24.0)
    lines, keys = [], {": queue 1, about 12 s": "first", ": prefill 4096/65536": "half"}
    keys[": prefill 8192/65536"] = "all"
    body = {**BODIES[path], "stream": True}
    with httpx2.stream("POST", running.url + path, json=body, timeout=120) as response:
        for line in response.iter_lines():
            lines.append(line)
            if line in keys:
                gates[keys[line]].set()
    said = [line for line in lines if line.startswith(":") and line != ": waiting"]  # if it is slow
    assert said == list(keys), "each is said once"
    assert "word" in "".join(lines)
    first.close()


@pytest.fixture
def writes(monkeypatch):
    """What servers of this process write to their sockets."""
    found = []
    transport = asyncio.selector_events._SelectorSocketTransport
    write = transport.write

    def note(self, data):
        found.append(bytes(data))
        write(self, data)

    monkeypatch.setattr(transport, "write", note)
    return found


def test_what_need_not_be_waited_for_is_written_together(client, engine, writes, monkeypatch):
    monkeypatch.setattr(queue, "_FRAME_S", 5.0)
    engine.pieces = ["word "] * 100
    found = chunks(client.post(PATH, json={**HELLO, "stream": True}))
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in found) == "word " * 100
    head, first, *rest, end = writes
    assert head.startswith(b"HTTP/1.1 200") and end == b"0\r\n\r\n"
    assert b'"role":"assistant"' in first and b"word" in first
    assert b"[DONE]" in (rest or [first])[-1]
    assert len(rest) <= 1  # what came after the first round


def test_frames_are_written_once_each(client, engine, writes, monkeypatch):
    """Rounds of several tokens; those of one frame share a write, past the application's layers."""
    monkeypatch.setattr(queue, "_FRAME_S", 0.05)
    engine.round_s = 0.005
    engine.pieces = ["word "] * 60
    found = chunks(client.post(PATH, json={**HELLO, "stream": True}))
    frames = [one for one in writes if b"word" in one]
    assert sum(one.count(b"word") for one in frames) == 60
    assert all(one.count(b"data: ") <= 3 for one in frames)
    assert 2 <= len(frames) <= len(found) < 30


def test_clients_of_older_http_get_no_chunks(start, engine, monkeypatch):
    monkeypatch.setattr(queue, "_FRAME_S", 0.01)
    running = start()
    engine.round_s = 0.005
    engine.pieces = ["word "] * 20
    with open_stream(running, version="1.0") as connection:
        text = b"".join(iter(lambda: connection.recv(2**16), b"")).decode()
    events = text.partition("\r\n\r\n")[2].split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events[:-1])
    assert text.count("word ") == 20


def test_a_wire_that_fails_breaks_the_stream_off(start, engine, monkeypatch):
    monkeypatch.setattr(queue, "_FRAME_S", 0.01)
    chunk = ChatWire.chunk

    def fail_later(self, index, deltas):
        if engine.started[0].usage.completion_tokens > 10:
            raise KeyError("no such thing")
        return chunk(self, index, deltas)

    monkeypatch.setattr(ChatWire, "chunk", fail_later)
    running = start()
    engine.round_s = 0.005
    engine.pieces = ["word "] * 1000
    with open_stream(running) as connection:
        connection.settimeout(120)
        text = b"".join(iter(lambda: connection.recv(2**16), b"")).decode()
    assert "word" in text and "[DONE]" not in text
    wait_for(lambda: engine.ended)


def test_clients_take_turns(start, engine):
    from concurrent.futures import ThreadPoolExecutor

    running = start(api_keys=("one", "two"))
    gate = threading.Event()
    engine.pieces = [lambda: gate.wait(120), "word"]

    def ask(key):
        headers = {"Authorization": f"Bearer {key}"}
        body = {**HELLO, "messages": [{"role": "user", "content": key}]}
        return httpx2.post(running.url + PATH, json=body, headers=headers, timeout=120)

    with ThreadPoolExecutor(8) as pool:
        replies = [pool.submit(ask, "one")]
        wait_for(lambda: engine.started)  # and so alone
        replies += [pool.submit(ask, "one") for _ in range(5)]
        wait_for(lambda: running.service.queue.num_waiting == 5)
        replies += [pool.submit(ask, "two") for _ in range(2)]
        wait_for(lambda: running.service.queue.num_waiting == 7)
        gate.set()
        assert all(reply.result().is_success for reply in replies)
    order = [generation.prompt[0]["content"] for generation in engine.started]
    assert order == ["one", "one", "two", "one", "two", "one", "one", "one"]


def test_queue_is_bounded(start, engine):
    running = start(max_queue=3, max_per_client=2)
    engine.round_s = 0.05
    engine.pieces = ["word "] * 1000
    connections = [open_stream(running) for _ in range(2)]
    wait_for(lambda: running.service.queue.num_admitted == 2)
    response = httpx2.post(running.url + PATH, json=HELLO)
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["type"] == "rate_limit_error"
    running.service.queue.admit("elsewhere", 1)
    running.service.queue.max_per_client = 3
    assert httpx2.post(running.url + PATH, json=HELLO).status_code == 503
    for connection in connections:
        connection.close()
    wait_for(lambda: running.service.queue.num_admitted == 1)
    engine.pieces = ["free"]
    assert httpx2.post(running.url + PATH, json=HELLO).is_success


def test_more_replies_than_one_may_have_are_refused(start):
    running = start(max_per_client=2)
    error = httpx2.post(running.url + PATH, json={**HELLO, "n": 3}).json()["error"]
    assert error["param"] == "n"
    assert running.service.queue.num_admitted == 0


def test_folded_calls():
    folded = reply.Folded()
    calls = [Call(0, "a", "f", "{"), Call(0, None, None, "}"), Call(1, "b", "g", "[]")]
    folded.extend([Delta(kind=DeltaKind.TOOL_CALL, tool_call=call) for call in calls])
    functions = [{"name": "f", "arguments": "{}"}, {"name": "g", "arguments": "[]"}]
    assert [(call["id"], call["function"]) for call in folded.calls] == [
        ("a", functions[0]),
        ("b", functions[1]),
    ]


def test_two_streams_are_not_mixed(start, engine):
    from concurrent.futures import ThreadPoolExecutor

    running = start()
    engine.round_s = 0.001
    original = engine._start

    def echo(length, options, prompt):
        generation = original(length, options, prompt)
        generation._pieces = [f"{prompt[0]['content']} "] * 20
        return generation

    engine._start = echo

    def ask(name):
        body = {**HELLO, "messages": [{"role": "user", "content": name}], "stream": True}
        found = chunks(httpx2.post(running.url + PATH, json=body, timeout=120))
        return "".join(c["choices"][0]["delta"].get("content", "") for c in found)

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, (f"n{number}" for number in range(16))))
    del engine._start
    assert texts == [f"n{number} " * 20 for number in range(16)]


def test_a_wait_is_told_in_round_numbers():
    told = [reply.describe_wait(seconds) for seconds in (0.2, 12.4, 89, 91, 300)]
    assert told == ["about 1 s", "about 12 s", "about 89 s", "about 2 min", "about 5 min"]
