"""The real server with the default model, as users meet it: the command, and the SDK."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx2
import openai
import pytest

from tests.serve.conftest import wait_for
from tests.serve.process import MODEL, ROOT, Process, read_metric

STORY = "Tell me a long story about a tree."
ASK = [{"role": "user", "content": STORY}]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="one", max_retries=0) as client:
        yield client


def test_the_server_says_how_to_connect(server):
    said = "".join(server.lines)
    assert f"base URL {server.url}/v1" in said
    assert f"model {MODEL}" in said


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL, "gpt-4o-mini"]
    assert client.models.retrieve(MODEL).id == MODEL


def test_the_same_text_as_a_stream_in_one_piece_and_without_a_server(client, smollm2_path):
    options = {"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**options)
    usage_options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(**options, stream=True, stream_options=usage_options)
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "length"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    result = subprocess.run(
        [sys.executable, "-m", "draftree", "run", MODEL, "--chat", "-p", STORY, "-n", "24"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.stdout.strip() == text.strip()


def test_completions_with_logprobs_stop_and_bias(client):
    options = {"model": MODEL, "prompt": "1 2 3 4 5 6", "temperature": 0, "max_tokens": 8}
    reply = client.completions.create(**options, logprobs=2).choices[0]
    assert reply.text.startswith(" 7 8")
    assert "".join(reply.logprobs.tokens) == reply.text
    assert all(value <= 0 for value in reply.logprobs.token_logprobs)
    assert all(len(top) == 2 for top in reply.logprobs.top_logprobs)
    stopped = client.completions.create(**options, stop=["8"]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (" 7 ", "stop")
    banned = client.completions.create(**options, logit_bias={"39": -100}).choices[0]
    assert banned.text != reply.text


def test_chat_logprobs(client):
    reply = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    ).choices[0]
    scores = reply.logprobs.content
    assert b"".join(bytes(score.bytes) for score in scores).decode() == reply.message.content
    assert all(len(score.top_logprobs) == 3 for score in scores)
    assert all(score.top_logprobs[0].token == score.token for score in scores)


def test_seeds_and_several_replies(client):
    options = {"model": MODEL, "messages": ASK, "max_tokens": 8, "temperature": 1.5, "seed": 5}
    first = client.chat.completions.create(**options, n=2)
    again = client.chat.completions.create(**options)
    texts = [choice.message.content for choice in first.choices]
    assert texts[0] != texts[1]
    assert again.choices[0].message.content == texts[0]


def test_statistics(client):
    reply = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=8, extra_body={"draftree": {"stats": True}}
    )
    found = reply.usage.draftree
    assert 1 <= found["rounds"] <= 8
    assert found["acceptance_length"] >= 1.0
    assert found["tokens_per_second"] > 0
    assert found["ttft_ms"] > 0


def test_errors(client, server):
    ask = client.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="There is no model 'other'"):
        ask(model="other", messages=ASK)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(model=MODEL, messages=ASK, extra_body={"mood": "good"})
    assert caught.value.param == "mood"
    with pytest.raises(openai.BadRequestError) as caught:
        ask(model=MODEL, messages=[{"role": "user", "content": "word " * 5000}])
    assert caught.value.code == "context_length_exceeded"
    assert "2048 tokens" in caught.value.message and "5031 tokens" in caught.value.message
    with pytest.raises(openai.BadRequestError, match="logit_bias: there is no token"):
        ask(model=MODEL, messages=ASK, logit_bias={"99999999": 1})
    wrong = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()
    assert ask(model=MODEL, messages=ASK, max_tokens=1).choices


def test_a_million_tokens_and_fifty_megabytes_are_refused(client, server):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="word " * 1_000_000)
    assert caught.value.code == "context_length_exceeded"
    headers = {"Authorization": "Bearer one", "Content-Type": "application/json"}
    response = httpx2.post(
        f"{server.url}/v1/completions", content=b" " * 50_000_000, headers=headers, timeout=30
    )
    assert response.status_code == 413
    assert client.completions.create(model=MODEL, prompt="a", max_tokens=1).choices


def test_leaving_ends_the_reply(client, server):
    cancelled = read_metric(server, "draftree_cancelled_total")
    tokens = read_metric(server, "draftree_completion_tokens_total")
    stream = client.chat.completions.create(model=MODEL, messages=ASK, stream=True, seed=1)
    for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    stream.close()
    wait_for(lambda: read_metric(server, "draftree_running") == 0, 5)
    wait_for(lambda: read_metric(server, "draftree_cancelled_total") == cancelled + 1, 5)
    assert read_metric(server, "draftree_completion_tokens_total") - tokens < 100


def test_one_client_cannot_keep_another_waiting(client, server):
    options = {"model": MODEL, "messages": ASK, "temperature": 0}
    other = openai.OpenAI(base_url=f"{server.url}/v1", api_key="two", max_retries=0)
    ends = []

    def ask(who, name, count):
        who.chat.completions.create(**options, max_tokens=count)
        ends.append(name)

    with other, ThreadPoolExecutor(8) as pool:
        replies = [pool.submit(ask, client, "many", 100) for _ in range(6)]
        # Of one client, some take turns, and the others wait for an end.
        wait_for(lambda: ends or read_metric(server, "draftree_queue_length") >= 3)
        replies.append(pool.submit(ask, other, "one", 8))
        for reply in replies:
            reply.result()
    assert ends.index("one") <= 3


def test_signals_end_streams_properly(smollm2_path):
    server = Process("--grace", "0.3")
    endless = {"0": -100, "2": -100}  # without its stop tokens no reply ends before the signal
    body = {"model": MODEL, "messages": ASK, "stream": True, "seed": 1, "logit_bias": endless}
    url = f"{server.url}/v1/chat/completions"
    lines = []
    with httpx2.stream("POST", url, json=body, timeout=120) as response:
        for line in response.iter_lines():
            if not line:
                continue
            lines.append(line)
            if len(lines) == 3:
                os.kill(server.process.pid, signal.SIGTERM)
    assert lines[-1] == "data: [DONE]"
    last = json.loads(lines[-2].removeprefix("data: "))
    assert last["error"]["message"] == "The server is shutting down."
    assert server.process.wait(120) == server.stop() == 0
    events = [json.loads(line)["event"] for line in server.lines if line.startswith("{")]
    assert events.count("reply") == events.count("request") == 1
