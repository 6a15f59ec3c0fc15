"""Ollama's own Python client against the real server."""

import json

import pytest

from tests.needs import needs_package
from tests.serve.process import MODEL

pytestmark = needs_package("ollama")
HI = [{"role": "user", "content": "Say hi."}]
OPTIONS = {"num_predict": 12, "num_ctx": 512}


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return f"Rain in {city}."


@pytest.fixture(scope="module")
def client(server):
    import ollama

    return ollama.Client(host=server.url, headers={"Authorization": "Bearer one"})


def test_replies_in_one_piece_and_streamed(client):
    whole = client.chat(MODEL, HI, options=OPTIONS)
    pieces = list(client.chat(MODEL, HI, options=OPTIONS, stream=True))
    assert "".join(piece.message.content for piece in pieces) == whole.message.content != ""
    assert whole.eval_count == pieces[-1].eval_count == 12
    assert (whole.done_reason, pieces[-1].done) == ("length", True)
    assert whole.total_duration > whole.eval_duration > 0
    generated = client.generate(MODEL, "Say hi.", options=OPTIONS)
    assert generated.response == whole.message.content
    raw = client.generate(MODEL, "def fibonacci(n):", raw=True, options=OPTIONS)
    assert raw.response and raw.prompt_eval_count < whole.prompt_eval_count


def test_tools_and_formats(client):
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
    schema["additionalProperties"] = False
    reply = client.chat(MODEL, HI, format=schema)
    assert json.loads(reply.message.content) == {"city": "Paris"}
    call = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    messages = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Rain in Paris.", "tool_name": "get_weather"},
    ]
    assert client.chat(MODEL, messages, tools=[get_weather], options=OPTIONS).message.content


def test_the_model_and_its_vectors(client):
    import ollama

    assert client.list().models[0].model == client.ps().models[0].model == MODEL
    shown = client.show(MODEL)
    assert "completion" in shown.capabilities
    assert shown.modelinfo[f"{shown.details.family}.context_length"] == 2048
    first, second = client.embed(MODEL, ["a", "b"]).embeddings
    assert len(first) == len(second) == shown.modelinfo[f"{shown.details.family}.embedding_length"]
    with pytest.raises(ollama.ResponseError, match="no model 'other'") as caught:
        client.chat("other", HI)
    assert caught.value.status_code == 404
