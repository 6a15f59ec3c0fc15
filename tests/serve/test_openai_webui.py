"""What Open WebUI asks of a server, against the real one with the default model."""

import json

import httpx2
import pytest

from tests.serve.process import MODEL
from tests.serve.test_default_model import ASK


class OpenWebUi:
    """What Open WebUI sends, in its words: `url` and `key` as they are typed into its form."""

    def __init__(self, url, key):
        self.url = url
        self.headers = {"Content-Type": "application/json"}
        if key:
            self.headers["Authorization"] = f"Bearer {key}"

    def verify(self):
        """The button that checks a connection shows the error's text, or that all is well."""
        return httpx2.get(f"{self.url}/models", headers=self.headers, timeout=120)

    def list_models(self):
        found = self.verify().json()["data"]
        return [model["id"] for model in found if not model.get("pipeline")]

    def complete(self, **fields):
        body = json.dumps({"model": MODEL, "messages": ASK, **fields})
        url = f"{self.url}/chat/completions"
        return httpx2.post(url, content=body, headers=self.headers, timeout=120)

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
    assert page.list_models() == [MODEL, "gpt-4o-mini"]
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
