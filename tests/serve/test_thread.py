"""The engine thread: it opens, fails, opens again, and gives up."""

import threading

import httpx2
import pytest

from draftree.errors import GrammarError, ModelError
from draftree.serve.queue import FairQueue
from draftree.serve.thread import EngineThread, State, explain
from tests.serve import fake
from tests.serve.conftest import count_jobs, wait_for
from tests.serve.test_openai import HELLO, chunks, error_of
from tests.serve.test_reply import open_stream


def post(running, **fields):
    body = {**HELLO, **fields}
    return httpx2.post(f"{running.url}/v1/chat/completions", json=body, timeout=120)


def test_failure_in_a_stream_is_an_error_event(start, engine):
    running = start()
    engine.pieces = ["Hello", fake.Broken("no more memory")]
    text = post(running, stream=True).text
    *_, error, done, rest = text.split("\n\n")
    assert "Hello" in text
    assert '"code":"engine_failure"' in error and "Broken: no more memory" in error
    assert (done, rest) == ("data: [DONE]", "")


def test_server_recovers(start, engine):
    running = start()
    engine.pieces = ["Hello", fake.Broken("once")]
    error = error_of(post(running), 500)
    assert (error["type"], error["code"]) == ("server_error", "engine_failure")
    engine.pieces = ["fine"]
    wait_for(lambda: running.service.state is State.READY)
    assert post(running).json()["choices"][0]["message"]["content"] == "fine"
    assert engine.num_opened == 2
    assert State.RECOVERING in running.states
    text = httpx2.get(f"{running.url}/metrics").text
    assert "draftree_engine_failures_total 1" in text


def test_waiting_requests_survive_a_failure(start, engine):
    from concurrent.futures import ThreadPoolExecutor

    running = start()
    engine.round_s = 0.1
    engine.pieces = ["Hello", fake.Broken("once")]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(post, running)
        wait_for(lambda: engine.started)
        engine.pieces = ["fine"]
        second = pool.submit(post, running)
        assert first.result().status_code == 500
        assert second.result().json()["choices"][0]["message"]["content"] == "fine"


def test_three_failures_in_a_row_end_the_server(start, engine):
    running = start()
    engine.pieces = [fake.Broken("always")]
    for _ in range(3):
        wait_for(lambda: running.service.state is State.READY)
        assert post(running).status_code == 500
    wait_for(lambda: running.service.state is State.FAILED)
    reason = "The engine failed 3 times in a row, at last with Broken: always."
    assert str(running.service.thread.failure) == reason
    assert post(running).status_code == 503


def test_engine_that_cannot_be_opened_again(start, engine):
    running = start()
    engine.pieces = ["Hello", fake.Broken("once")]
    engine.opening_error = ModelError("The file is gone.")
    assert post(running).status_code == 500
    wait_for(lambda: running.service.state is State.FAILED)
    assert str(running.service.thread.failure) == "The file is gone."
    assert httpx2.get(f"{running.url}/health").json()["status"] == "failed"


def test_while_loading_everything_waits_politely(start, engine):
    may_load = threading.Event()
    from tests.serve.conftest import Running

    running = Running(lambda: may_load.wait(120) and engine.open())
    running.service.thread.start()
    running._thread.start()
    try:
        wait_for(lambda: running.server.started)
        health = httpx2.get(f"{running.url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        response = post(running)
        assert error_of(response, 503)["type"] == "service_unavailable_error"
        assert int(response.headers["retry-after"]) >= 1
        assert httpx2.get(f"{running.url}/v1/models").is_success
        may_load.set()
        wait_for(lambda: running.service.state is State.READY)
        assert engine.num_prepared == 1, "ready means that the template is, too"
        assert post(running).is_success
    finally:
        running.stop()


def test_model_that_is_missing_is_a_failure():
    states = []
    engine = fake.Engine(opening_error=ModelError("There is no such model."))
    thread = EngineThread(engine.open, FairQueue(1, 1), states.append)
    thread.start()
    thread.join(120)
    assert states == [State.FAILED]
    assert str(thread.failure) == "There is no such model."


def test_a_reply_that_cannot_go_on_does_not_harm_the_engine(start, engine):
    running = start()
    engine.pieces = ["{", GrammarError("No token may follow.")]
    assert error_of(post(running), 400)["message"] == "No token may follow."
    text = post(running, stream=True).text
    assert "No token may follow." in text and text.endswith("data: [DONE]\n\n")
    assert (engine.num_opened, running.service.state) == (1, State.READY)


def test_wrong_values_of_the_engine_are_400(client, engine, monkeypatch):
    def refuse(messages, **_):
        raise ValueError("token 99 is not in the vocabulary")

    monkeypatch.setattr(engine, "chat", refuse)
    error = error_of(client.post("/v1/chat/completions", json=HELLO), 400)
    assert error["message"] == "Token 99 is not in the vocabulary."


def test_tokens_are_handed_over_at_once(start, engine):
    """A reader must not wait for the next round to see this one."""
    running, is_seen, waits = start(), threading.Event(), []
    engine.pieces = ["first", lambda: waits.append(is_seen.wait(120)), "second"]
    body = {**HELLO, "stream": True}
    url = f"{running.url}/v1/chat/completions"
    with httpx2.stream("POST", url, json=body, timeout=120) as response:
        for line in response.iter_lines():
            if "first" in line:
                is_seen.set()
    assert waits == [True]


def test_explain_keeps_the_sentence():
    assert explain(ValueError("no"), fake.Engine()).message == "No."


def test_stream_is_whole_at_any_speed(start, engine):
    running = start()
    engine.pieces = [f"{number} " for number in range(2000)]
    text = "".join(
        choice["delta"].get("content", "")
        for chunk in chunks(post(running, stream=True))
        for choice in chunk["choices"]
    )
    assert text == "".join(engine.pieces)


@pytest.mark.parametrize("is_stream", [True, False])
def test_empty_reply(start, engine, is_stream):
    running = start()
    engine.pieces = []
    response = post(running, stream=is_stream)
    if is_stream:
        found = chunks(response)
        assert [c["choices"][0]["finish_reason"] for c in found] == [None, "stop"]
    else:
        assert response.json()["choices"][0]["message"]["content"] == ""


def test_conversations_are_kept_when_nothing_waits(start, engine):
    running = start()
    post(running)
    wait_for(lambda: engine.num_kept == 1)
    gate = threading.Event()
    engine.pieces = [lambda: gate.wait(120), "word "]
    streams = [open_stream(running) for _ in range(3)]
    wait_for(lambda: count_jobs(running) == 3)
    gate.set()
    wait_for(lambda: len(engine.ended) == 4)
    wait_for(lambda: engine.num_kept == 2)
    for stream in streams:
        stream.close()


@pytest.mark.parametrize("is_on", [False, True])
def test_replies_are_read_ahead_when_nothing_waits(start, engine, is_on):
    running = start(read_ahead=is_on)
    assert post(running).is_success
    wait_for(lambda: engine.num_kept)
    assert engine.num_foreseen == is_on


def test_keeping_that_fails_harms_nobody(start, engine, monkeypatch):
    running = start()

    def fail(should_stop):
        raise MemoryError("no room")

    monkeypatch.setattr(engine, "offload", fail)
    assert post(running).is_success
    assert post(running).is_success
    assert running.service.state is State.READY
