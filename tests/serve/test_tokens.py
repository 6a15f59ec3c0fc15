"""Tokens of texts, texts of tokens and prompts of conversations, with a real, tiny model."""

from types import SimpleNamespace

import httpx2
import pytest

from draftree.serve.openai_fields import ChatRequest
from draftree.serve.openai_messages import show_prompt
from draftree.text.tokenizer import Tokenizer
from tests.serve.test_openai import error_of
from tests.text.metadata import sentencepiece_metadata

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def client(brief):
    with httpx2.Client(base_url=brief.url, timeout=120) as client:
        yield client


def test_there_and_back(client):
    tokens = client.post("/tokenize", json={"content": "Hello wörld 🌳"}).json()["tokens"]
    assert len(tokens) > 1 and all(isinstance(token, int) for token in tokens)
    reply = client.post("/detokenize", json={"tokens": tokens}).json()
    assert reply == {"content": "Hello wörld 🌳"}
    assert client.post("/detokenize", json={"tokens": []}).json() == {"content": ""}


def test_pieces_are_text_or_bytes(client):
    body = {"content": "a🌳", "with_pieces": True}
    tokens = client.post("/tokenize", json=body).json()["tokens"]
    pieces = [token["piece"] for token in tokens]
    whole = b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in pieces)
    assert whole == "a🌳".encode()
    assert any(isinstance(piece, list) for piece in pieces)


def test_special_tokens(client, brief):
    text = "<|im_end|>"
    as_one = client.post("/tokenize", json={"content": text}).json()["tokens"]
    body = {"content": text, "parse_special": False}
    as_text = client.post("/tokenize", json=body).json()["tokens"]
    assert len(as_one) == 1 < len(as_text)


def test_what_is_refused(client):
    error = error_of(client.post("/tokenize", json={"content": "x " * 100_000}), 400)
    assert error["code"] == "context_length_exceeded"
    assert error_of(client.post("/detokenize", json={"tokens": [10**8]}), 400)["param"] == "tokens"
    assert error_of(client.post("/tokenize", json={}), 400)["param"] == "content"


def test_a_conversation_as_the_template_writes_it(client):
    prompt = client.post("/apply-template", json={"messages": MESSAGES}).json()["prompt"]
    assert "Hi" in prompt and prompt.endswith("<|im_start|>assistant\n")
    begun = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    reply = client.post("/apply-template", json={"messages": begun}).json()["prompt"]
    assert reply.endswith("It is") and reply.startswith(prompt)
    counted = client.post("/v1/messages/count_tokens", json={"messages": begun}).json()
    tokens = client.post("/tokenize", json={"content": reply}).json()["tokens"]
    assert counted["input_tokens"] == len(tokens)


def test_a_reply_shows_its_prompt_where_that_is_asked(client):
    prompt = client.post("/apply-template", json={"messages": MESSAGES}).json()
    ask = {"messages": MESSAGES, "max_tokens": 1}
    shown = client.post("/v1/chat/completions", json={**ask, "verbose": True}).json()
    assert shown["__verbose"] == prompt
    for more in ({"verbose": False}, {}):
        assert "__verbose" not in client.post("/v1/chat/completions", json={**ask, **more}).json()


def test_a_prompt_is_shown_as_its_tokens_spell_it():
    tokenizer = Tokenizer.from_metadata(sentencepiece_metadata(0))
    engine = SimpleNamespace(tokenizer=tokenizer, render_chat=lambda *a, **k: "Hi", can_think=False)
    engine.plan = SimpleNamespace(max_ctx=64)
    assert show_prompt(engine, ChatRequest(messages=MESSAGES)) == "<s> Hi"


def test_parts_that_a_reply_goes_on_from_are_paragraphs(client):
    parts = [{"type": "text", "text": "It"}, {"type": "text", "text": "is"}]
    begun = [*MESSAGES, {"role": "assistant", "content": parts}]
    prompts = [
        client.post("/apply-template", json={"messages": messages}).json()["prompt"]
        for messages in (begun, [*begun, *MESSAGES])
    ]
    assert prompts[0].endswith("It\n\nis") and "It\nis" in prompts[1]


def test_prompts_are_counted_before_they_are_sent(client):
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    asks = {
        "/v1/chat/completions": {"messages": MESSAGES},
        "/v1/responses": {"input": "Hi", "instructions": "Be brief.", "tools": [tool]},
    }
    for path, ask in asks.items():
        counted = client.post(f"{path}/input_tokens", json=ask).json()
        usage = client.post(path, json=ask).json()["usage"]
        used = usage.get("prompt_tokens") or usage["input_tokens"]
        assert counted == {"object": "response.input_tokens", "input_tokens": used}
    error = error_of(client.post("/v1/responses/input_tokens", json={"input": "x " * 9**6}), 400)
    assert error["code"] == "context_length_exceeded"
