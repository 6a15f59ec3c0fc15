"""What every request passes through: keys, errors, CORS, health, metrics, logs, the schema."""

import json
import logging

import httpx2
import pytest

from draftree.serve.log import JsonLines
from tests.serve.conftest import wait_for
from tests.serve.test_openai import HELLO, error_of


@pytest.fixture
def lines():
    """Log lines as they are written."""
    found = []

    class Collect(logging.Handler):
        def emit(self, record):
            found.append(json.loads(JsonLines().format(record)))

    logger, collect = logging.getLogger("draftree"), Collect()
    level = logger.level
    logger.addHandler(collect)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(collect)
    logger.setLevel(level)


def test_health_is_open_and_all_else_needs_the_key(start):
    url = start(api_keys=("secret", "other")).url
    assert httpx2.get(f"{url}/health").json()["status"] == "ok"
    for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
            error = error_of(httpx2.get(url + path, headers=headers), 401)
            assert error["code"] == "invalid_api_key"
    for headers in ({"Authorization": "Bearer secret"}, {"x-api-key": "other"}):
        assert httpx2.get(f"{url}/v1/models", headers=headers).is_success
    wrong = httpx2.post(f"{url}/v1/chat/completions", json=HELLO)
    assert error_of(wrong, 401)["type"] == "authentication_error"


def test_unknown_paths_and_methods(client):
    assert "GET /v1/nothing" in error_of(client.get("/v1/nothing"), 404)["message"]
    response = client.get("/v1/chat/completions")
    assert "GET /v1/chat/completions" in error_of(response, 404)["message"]
    assert response.headers["allow"] == "POST"
    error_of(client.put("/v1/chat/completions"), 405)


def test_every_reply_has_an_id(client):
    found = [client.get(path).headers for path in ("/health", "/health", "/no", "/v1/messages")]
    assert len({headers["x-request-id"] for headers in found}) == len(found)
    assert all(headers["x-request-id"] == headers["request-id"] for headers in found)


def test_cors_is_off_unless_asked(client, start):
    origin = {"Origin": "http://page.example"}
    assert "access-control-allow-origin" not in client.get("/health", headers=origin).headers
    url = start(cors_origins=("http://page.example",), api_keys=("k",)).url
    asked = {**origin, "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization, content-type"
    preflight = httpx2.options(f"{url}/v1/chat/completions", headers=asked)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == "http://page.example"
    refused = httpx2.get(f"{url}/v1/models", headers=origin)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "http://page.example"
    other = httpx2.get(f"{url}/health", headers={"Origin": "http://other.example"})
    assert "access-control-allow-origin" not in other.headers


def test_options_without_an_origin_says_who_may_connect(client, start):
    url = f"{start(cors_origins=('*',)).url}/v1/chat/completions"
    for headers in ({}, {"Origin": "http://page.example"}):
        found = httpx2.options(url, headers=headers)
        assert found.status_code == 204
        assert found.headers["access-control-allow-origin"] == "*"
        assert b"Access-Control-Allow-Origin" in dict(found.headers.raw)
    wrong = {"Origin": "http://page.example", "Access-Control-Request-Method": "BREW"}
    assert httpx2.options(url, headers=wrong).status_code == 400
    assert client.options("/v1/chat/completions").status_code == 405


def test_metrics_count_routes_and_tokens(start):
    url = start().url
    httpx2.post(f"{url}/v1/chat/completions", json=HELLO)
    httpx2.post(f"{url}/v1/chat/completions", json={})
    httpx2.get(f"{url}/v1/models/x/y")
    httpx2.get(f"{url}/anything")

    def text():
        return httpx2.get(f"{url}/metrics").text

    wait_for(lambda: "draftree_completion_tokens_total 2" in text())
    for line in (
        'draftree_requests_total{route="/v1/chat/completions",status="200"} 1',
        'draftree_requests_total{route="/v1/chat/completions",status="400"} 1',
        'draftree_requests_total{route="/v1/models/{name:path}",status="404"} 1',
        'draftree_requests_total{route="other",status="404"} 1',
        "draftree_ttft_seconds_count 1",
        "draftree_queue_length 0",
    ):
        assert line in text().splitlines()


def test_logs_say_what_happened_without_the_text(client, engine, lines):
    body = {**HELLO, "user": "ann", "messages": [{"role": "user", "content": "private words"}]}
    engine.pieces = ["more private words"]
    identity = client.post("/v1/chat/completions", json=body).headers["x-request-id"]
    wait_for(lambda: {"request", "reply"} <= {line["event"] for line in lines})
    (request,) = [line for line in lines if line["event"] == "request"]
    (reply,) = [line for line in lines if line["event"] == "reply"]
    assert request["id"] == reply["id"] == identity
    assert (request["status"], request["user"], request["client"]) == (200, "ann", "127.0.0.1")
    assert (reply["prompt_tokens"], reply["completion_tokens"]) == (3, 1)
    assert reply["acceptance_length"] == 1.0
    assert "private words" not in json.dumps(lines)


def test_prompts_are_logged_only_when_asked(start, lines):
    url = start(log_prompts=True).url
    httpx2.post(f"{url}/v1/chat/completions", json=HELLO)
    (prompt,) = [line for line in lines if line["event"] == "prompt"]
    assert json.loads(prompt["body"]) == HELLO


def test_a_bug_is_a_500_that_shows_nothing(client, engine, monkeypatch, lines):
    monkeypatch.setattr(engine, "chat", lambda messages, **_: {}["secret"])
    error = error_of(client.post("/v1/chat/completions", json=HELLO), 500)
    assert (error["type"], error["message"]) == ("server_error", "Internal error.")
    assert any("KeyError" in line.get("error", "") for line in lines)
    monkeypatch.undo()
    assert client.post("/v1/chat/completions", json=HELLO).is_success


def test_schema_describes_the_bodies(client):
    schema = client.get("/openapi.json").json()
    post = schema["paths"]["/v1/chat/completions"]["post"]
    reference = post["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    body = schema["components"]["schemas"][reference.rsplit("/", 1)[1]]
    assert body["additionalProperties"] == {"type": "null"}
    assert body["properties"]["messages"]["minItems"] == 1
    text = json.dumps(schema)
    names = schema["components"]["schemas"]
    for part in text.split('"#/components/schemas/')[1:]:
        assert part.partition('"')[0] in names
