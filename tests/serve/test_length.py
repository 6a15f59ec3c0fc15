"""What cannot fit is refused before it is tokenized."""

import time

import pytest

from draftree.errors import CapacityError
from draftree.serve.length import check_length, longest_token
from tests.serve import fake


def test_what_might_fit_is_let_through():
    engine = fake.Engine(max_ctx=10)
    assert longest_token(engine.tokenizer) == 3
    check_length(engine, 32)
    with pytest.raises(CapacityError, match="33 characters, which are more than 11 tokens"):
        check_length(engine, 33)


def test_thirty_megabytes_are_refused_at_once(client, engine, monkeypatch):
    monkeypatch.setattr(engine, "complete", lambda *_, **__: time.sleep(60))
    body = {"model": "fake", "prompt": "word " * 6_000_000}
    error = client.post("/v1/completions", json=body).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    messages = [{"role": "user", "content": [{"type": "text", "text": "word " * 100}]}]
    body = {"model": "fake", "messages": messages}
    error = client.post("/v1/chat/completions", json=body).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
