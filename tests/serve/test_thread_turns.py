"""Requests that take turns on a server's engine: what each of them gets, and who waits for whom."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx2
import pytest

from draftree.chat import Engine
from draftree.core import FinishReason
from draftree.serve.thread import State
from draftree.serve.turns import Turns
from tests.serve import fake
from tests.serve.conftest import Running, count_jobs, wait_for
from tests.serve.test_openai import HELLO
from tests.serve.test_reply import open_stream
from tests.tiny import tiny_path

SCHEMA = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 2, "maxItems": 4}
USAGE = {"include_usage": True}
BATCHED = "\ndraftree_batched_rounds_total "
FORMAT = {"type": "json_schema", "json_schema": {"name": "colours", "schema": SCHEMA}}


@pytest.fixture(params=["qwen3", "qwen35", "qwen3 batched", "qwen35 batched"])
def running(request):
    """A real engine, whose requests change after every chunk and every round."""
    family, _, batched = request.param.partition(" ")
    path, batching = str(tiny_path(family)), "always" if batched else "off"
    options = {"max_ctx": 256, "draft": "none", "chunk": 8, "budget": 7, "parallel": 4}
    options["batching"] = batching
    running = Running(lambda: Engine.open(path, **options))
    running.service.thread.turns = Turns(slice_s=0.0)
    yield running.start()
    running.stop()


def bodies():
    """Requests of every kind; no two begin alike."""
    chat = {"model": "fake", "max_tokens": 30, "stream": True, "stream_options": USAGE}
    for number in range(8):
        text = f"{number} " + "and a word " * (4 * number)
        body = {**chat, "messages": [{"role": "user", "content": text}], "seed": number}
        body["temperature"] = 0 if number % 2 else 1.5
        if number % 4 == 1:
            body |= {"logprobs": True, "top_logprobs": 2}
        if number % 4 == 2:
            body |= {"response_format": FORMAT, "max_tokens": 60}
        yield body


def ask(running, body):
    """Everything of a reply but what tells it from another one of the same text."""
    url = f"{running.url}/v1/chat/completions"
    text, scores, usage, reason = "", [], None, None
    with httpx2.stream("POST", url, json=body, timeout=120) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk["usage"] or usage
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
                scores += (choice["logprobs"] or {}).get("content") or ()
                reason = choice["finish_reason"] or reason
    del usage["prompt_tokens_details"]  # a template's beginning may be known or not
    return text, scores, usage, reason


def test_interleaved_replies_are_those_of_requests_alone(running):
    expected = [ask(running, body) for body in bodies()]
    assert all(text for text, *_ in expected) and expected[1][1]
    engine = running.service.thread.engine.tokens
    most_swapped, most_live, turns = 0, 0, running.service.thread.turns
    begin = turns.begin

    def watch():
        nonlocal most_swapped, most_live
        most_live = max(most_live, len(turns.jobs))
        most_swapped = max(most_swapped, engine.swapped_bytes)
        return begin()

    turns.begin = watch
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda body: ask(running, body), bodies()))
    assert found == expected
    num_batched = int(httpx2.get(f"{running.url}/metrics").text.split(BATCHED)[1].split()[0])
    assert bool(num_batched) == bool(engine.plan.batch)
    assert most_live == 3 and 0 < most_swapped <= engine.plan.swapped_bytes
    wait_for(lambda: turns.jobs == [])
    assert engine.swapped_bytes == 0


def test_leaving_while_preempted_and_while_reading(running):
    """Of requests that could go on for long, none is left behind."""
    thread = running.service.thread
    text = [{"role": "user", "content": "word " * 30}]
    for _ in range(3):
        streams = [open_stream(running, messages=text, max_tokens=200) for _ in range(5)]
        wait_for(lambda: thread.turns.preempted)
        for stream in streams:
            stream.close()
        wait_for(lambda: running.service.queue.num_admitted == 0)
    wait_for(lambda: thread.turns.jobs == [])
    assert thread.engine.tokens.swapped_bytes == 0
    assert ask(running, next(bodies()))[0]


def test_stopping_ends_what_is_preempted(running):
    service = running.service
    streams = [open_stream(running, max_tokens=220, n=1) for _ in range(6)]
    wait_for(lambda: service.thread.turns.preempted)
    service.options = replace(service.options, grace_s=0.0)
    running.stop()
    assert not service.thread._thread.is_alive() and service.thread.failure is None
    assert service.queue.num_admitted == 0 and service.thread.turns.jobs == []
    for stream in streams:
        stream.close()


def test_a_short_request_does_not_wait_for_a_long_one(start, engine):
    running = start()
    running.service.thread.turns._slice_s = 0.0
    engine.pieces = ["long "] * 1000
    engine.round_s = 0.01
    first = open_stream(running)
    wait_for(lambda: engine.started)
    engine.pieces, engine.round_s = ["short"], 0.0
    url = f"{running.url}/v1/chat/completions"
    answer = httpx2.post(url, json=HELLO, timeout=120).json()
    assert answer["choices"][0]["message"]["content"] == "short"
    assert engine.started[0].usage.completion_tokens < 1000
    assert engine.ended == [engine.started[1]]
    first.close()


def test_one_client_leaves_room_for_another(start, engine):
    """However long its requests, and however many wait."""
    running = start(api_keys=("one", "two"))
    running.service.thread.turns._slice_s = 0.0
    engine.round_s, engine.pieces = 0.002, ["word "] * 100_000
    url, headers = f"{running.url}/v1/chat/completions", {"Authorization": "Bearer one"}
    with ThreadPoolExecutor(6) as pool:
        for _ in range(6):
            pool.submit(httpx2.post, url, json=HELLO, headers=headers, timeout=120)
        wait_for(lambda: len(engine.started) == 3 and running.service.queue.num_waiting == 3)
        engine.pieces = ["short"]
        headers = {"Authorization": "Bearer two"}
        answer = httpx2.post(url, json=HELLO, headers=headers, timeout=120).json()
        assert answer["choices"][0]["message"]["content"] == "short"
        assert len(engine.started) == 4 and len(engine.ended) == 1
        while running.service.queue.num_admitted:
            for generation in list(engine.started):
                generation.cancel()
            time.sleep(0.005)


def test_one_at_a_time_where_that_is_prefetched(start, engine):
    engine.parallel = 1
    running = start()
    running.service.thread.turns._slice_s = 0.0
    engine.round_s = 0.005
    engine.pieces = ["word "] * 20
    streams = [open_stream(running) for _ in range(3)]
    wait_for(lambda: len(engine.ended) == 3)
    assert engine.started == engine.ended
    for stream in streams:
        stream.close()


def test_replies_of_one_request_follow_each_other(start, engine):
    """They are read one after the other."""
    running = start()
    running.service.thread.turns._slice_s = 0.0
    engine.pieces = ["word "] * 20
    assert httpx2.post(f"{running.url}/v1/chat/completions", json={**HELLO, "n": 3}).is_success
    assert engine.started == engine.ended and len(engine.ended) == 3


def test_when_the_engine_fails_those_begin_again_that_can(start, engine):
    """A reader who has part of a reply is told; the others notice nothing."""
    running, gate = start(), threading.Event()
    running.service.thread.turns._slice_s = 0.0
    engine.pieces = ["one", lambda: gate.wait(120), " two", fake.Broken("once"), "never"]
    url = f"{running.url}/v1/chat/completions"
    with ThreadPoolExecutor(3) as pool:
        failing = pool.submit(httpx2.post, url, json={**HELLO, "stream": True}, timeout=120)
        wait_for(lambda: engine.started)
        engine.pieces = ["three", " four", " five"] * 20
        preempted = pool.submit(httpx2.post, url, json={**HELLO, "stream": True}, timeout=120)
        whole = pool.submit(httpx2.post, url, json=HELLO, timeout=120)
        wait_for(lambda: count_jobs(running) == 3)
        gate.set()
        assert "Broken: once" in failing.result().text
        assert "three" in preempted.result().text
        assert "is opened again" in preempted.result().text
        text = whole.result().json()["choices"][0]["message"]["content"]
    assert text == "three four five" * 20
    wait_for(lambda: running.service.state is State.READY)
    wait_for(lambda: running.service.queue.num_admitted == 0)
    assert engine.num_opened == 2
    assert "draftree_engine_failures_total 1" in httpx2.get(f"{running.url}/metrics").text


def test_live_and_preempted_requests_are_counted(start, engine):
    running, gates = start(), [threading.Event() for _ in range(2)]
    running.service.thread.turns._slice_s = 0.0
    engine.pieces = ["one ", lambda: gates[0].wait(120), "two ", lambda: gates[1].wait(120), "."]
    first = open_stream(running)
    wait_for(lambda: engine.started)
    second = open_stream(running)
    wait_for(lambda: count_jobs(running) == 2)
    gates[0].set()
    wait_for(lambda: len(running.service.thread.turns.preempted) == 1)
    text = httpx2.get(f"{running.url}/metrics").text
    assert "draftree_running 2" in text and "draftree_preempted 1" in text
    assert httpx2.get(f"{running.url}/health").json()["running"] == 2
    gates[1].set()
    wait_for(lambda: len(engine.ended) == 2)
    assert {each.finish_reason for each in engine.ended} == {FinishReason.STOP}
    for stream in (first, second):
        stream.close()
