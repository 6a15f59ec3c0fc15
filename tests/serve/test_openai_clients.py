"""Tools that people already have, against the real server with the default model."""

import importlib.util
import json
import os
import subprocess
import sys

import httpx2
import pytest

from tests.serve.test_default_model import ASK, MODEL, Process

LITELLM = """
import json, sys
import litellm
url, model = sys.argv[1:]
shared = dict(model=f"openai/{model}", api_base=f"{url}/v1", api_key="one", temperature=0,
              messages=[{"role": "user", "content": "Tell me a long story about a tree."}],
              max_tokens=12, num_retries=0)
whole = litellm.completion(**shared)
chunks = list(litellm.completion(**shared, stream=True, stream_options={"include_usage": True}))
schema = {"type": "object", "properties": {"year": {"type": "integer"}}, "required": ["year"],
          "additionalProperties": False}
format = {"type": "json_schema", "json_schema": {"name": "y", "schema": schema, "strict": True}}
shaped = litellm.completion(**{**shared, "max_tokens": 32}, response_format=format)
tool = {"type": "function", "function": {"name": "plant", "parameters": {
    "type": "object", "properties": {"count": {"type": "integer", "maximum": 9}},
    "required": ["count"], "additionalProperties": False}}}
called = litellm.completion(**{**shared, "max_tokens": 48}, tools=[tool], tool_choice="required")
errors = []
for change in ({"model": "openai/other"}, {"api_key": "wrong"}, {"max_tokens": 0}):
    try:
        litellm.completion(**{**shared, **change})
    except Exception as error:
        errors.append(type(error).__name__)
print(json.dumps({
    "whole": whole.choices[0].message.content,
    "stream": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
    "tokens": [whole.usage.completion_tokens, chunks[-1].usage.completion_tokens],
    "finish_reason": whole.choices[0].finish_reason,
    "shaped": shaped.choices[0].message.content,
    "calls": [call.function.name for call in called.choices[0].message.tool_calls or ()],
    "arguments": [call.function.arguments for call in called.choices[0].message.tool_calls or ()],
    "errors": errors,
}))
"""


@pytest.fixture(scope="module")
def server(smollm2_path):
    server = Process("--api-key", "one")
    yield server
    assert server.stop() == 0, "".join(server.lines)


@pytest.mark.skipif(not importlib.util.find_spec("litellm"), reason="litellm is not installed")
def test_litellm(server):
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    result = subprocess.run(
        [sys.executable, "-c", LITELLM, server.url, MODEL],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["whole"] == found["stream"] != ""
    assert (found["tokens"], found["finish_reason"]) == ([12, 12], "length")
    assert set(json.loads(found["shaped"])) == {"year"}
    assert found["calls"] == ["plant"] * len(found["calls"]) != []
    assert all(set(json.loads(text)) == {"count"} for text in found["arguments"])
    assert found["errors"] == ["NotFoundError", "AuthenticationError", "BadRequestError"]


class OpenWebUi:
    """What Open WebUI sends, in its words: `url` and `key` as they are typed into its form."""

    def __init__(self, url, key):
        self.url = url
        self.headers = {"Content-Type": "application/json"}
        if key:
            self.headers["Authorization"] = f"Bearer {key}"

    def verify(self):
        """The button that checks a connection shows the error's text, or that all is well."""
        return httpx2.get(f"{self.url}/models", headers=self.headers, timeout=10)

    def list_models(self):
        found = self.verify().json()["data"]
        return [model["id"] for model in found if not model.get("pipeline")]

    def complete(self, **fields):
        body = json.dumps({"model": MODEL, "messages": ASK, **fields})
        url = f"{self.url}/chat/completions"
        return httpx2.post(url, content=body, headers=self.headers, timeout=60)

    def chat(self, **fields):
        """A message, its text put together as the page shows it."""
        response = self.complete(stream=True, **fields)
        assert "text/event-stream" in response.headers["content-type"]
        text = ""
        for line in response.text.splitlines():
            if not line.startswith("data:") or line == "data: [DONE]":
                continue
            data = json.loads(line.removeprefix("data:"))
            assert "error" not in data
            for choice in data["choices"][:1]:
                text += choice["delta"].get("content") or ""
        return text


def test_open_webui_connects(server):
    page = OpenWebUi(f"{server.url}/v1", "one")
    assert page.verify().status_code == 200
    assert page.verify().json()["object"] == "list"
    assert page.list_models() == [MODEL]
    assert len(page.chat(max_tokens=8, stop=["\n\n\n"])) > 5
    counted = page.chat(max_tokens=8, stream_options={"include_usage": True})
    assert len(counted) > 5
    title = page.complete(stream=False, max_completion_tokens=8).json()
    assert title["choices"][0]["message"]["content"]


@pytest.mark.parametrize("key", ["", "wrong"])
def test_open_webui_is_told_what_is_wrong(server, key):
    page = OpenWebUi(f"{server.url}/v1", key)
    refused = page.verify()
    assert refused.status_code == 401
    assert "API key" in refused.json()["error"]["message"]
    assert page.complete(stream=True).status_code == 401


@pytest.mark.parametrize("key", ["", "anything"])
def test_open_webui_needs_no_key_where_there_is_none(brief, key):
    page = OpenWebUi(f"{brief.url}/v1", key)
    assert page.list_models() == ["fake"]
    assert page.chat(model="fake", max_tokens=2) != ""
    from_a_container = {**page.headers, "Host": "host.docker.internal:8000"}
    assert httpx2.get(f"{page.url}/models", headers=from_a_container).is_success
