"""A real engine that breaks in the middle of a pass: what its clients get, then and afterwards."""

import json
import logging
import threading
import weakref

import httpx2
import pytest

from draftree.chat import Engine
from draftree.errors import CapacityError
from draftree.serve import thread
from draftree.serve.thread import State
from tests.serve.conftest import Running, wait_for
from tests.tiny import tiny_path

TEXT = {"prompt": "one two three four", "max_tokens": 40, "temperature": 0, "model": "fake"}
OTHER = {**TEXT, "prompt": "five six seven", "seed": 3, "temperature": 0.8}
NUM_PASSES = 7  # of which the last one fails


@pytest.fixture(params=["qwen3", "qwen35"])
def running(request, monkeypatch):
    """Notes, whenever an engine is opened, whether an earlier one is still in memory."""
    # What the tests' own tools keep of the log would keep the engine, too.
    monkeypatch.setattr(thread, "_log", logging.Logger("alone"))
    path, opened, alive = str(tiny_path(request.param)), [], []

    def open_engine():
        alive.append(any(each() is not None for each in opened))
        engine = Engine.open(path, max_ctx=512, draft="none")
        opened.append(weakref.ref(engine.tokens))
        return engine

    running = Running(open_engine)
    running.opened, running.alive = opened, alive
    yield running.start()
    running.stop()


def complete(running, body):
    response = httpx2.post(f"{running.url}/v1/completions", json=body, timeout=120)
    assert response.is_success, response.text
    return response.json()["choices"][0]["text"]


def stream(running, body):
    """The text and the error that a stream ends with."""
    url, body = f"{running.url}/v1/completions", {**body, "stream": True}
    text, error = "", None
    with httpx2.stream("POST", url, json=body, timeout=120) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    for data in map(json.loads, lines[:-1]):
        assert error is None
        error = data.get("error")
        text += "".join(choice["text"] for choice in data.get("choices", ()))
    return text, error


def break_pass(running, kind, words, hold=lambda: None):
    """One of the next passes computes all that it should, but nobody hears of it."""
    target = running.service.thread.engine.tokens.target
    forward, count = target.forward, 0

    def run(rows):
        nonlocal count
        verified = forward(rows)
        count += 1
        if count == NUM_PASSES:
            hold()
            raise kind(words)
        return verified

    target.forward = run


def test_it_is_opened_again_and_the_next_replies_are_right(running):
    expected, other = complete(running, TEXT), complete(running, OTHER)
    is_held, waits = threading.Event(), threading.Event()

    def hold():
        is_held.set()
        waits.wait(120)

    break_pass(running, RuntimeError, "a kernel failed", hold)
    found = []
    first = threading.Thread(target=lambda: found.append(stream(running, TEXT)))
    second = threading.Thread(target=lambda: found.append(complete(running, OTHER)))
    first.start()
    wait_for(is_held.is_set)  # until then, both would take turns
    second.start()
    wait_for(lambda: running.service.queue.num_waiting == 1)
    waits.set()
    first.join(120)
    second.join(120)
    (text, error), waiting = found
    assert expected.startswith(text) and 0 < len(text) < len(expected)
    assert error["code"] == "engine_failure"
    assert error["message"] == "The engine failed: RuntimeError: a kernel failed."
    assert waiting == other
    assert (complete(running, TEXT), complete(running, OTHER)) == (expected, other)
    assert running.states == [State.READY, State.RECOVERING, State.READY]
    assert running.alive == [False, False], "the broken engine was there beside the new one"
    assert running.service.thread.num_failures == 1


def test_a_reply_that_cannot_go_on_leaves_the_engine_whole(running):
    expected = complete(running, TEXT)
    engine = running.service.thread.engine
    break_pass(running, CapacityError, "The text is too long.")
    text, error = stream(running, TEXT)
    assert expected.startswith(text) and 0 < len(text) < len(expected)
    assert error["code"] == "context_length_exceeded"
    assert complete(running, TEXT) == expected
    assert running.service.thread.engine is engine
    assert running.states == [State.READY]
