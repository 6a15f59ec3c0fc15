"""Requests made up from the OpenAPI schema, right and wrong ones, against a real, tiny engine."""

import contextlib
from collections import Counter
from copy import deepcopy

import pytest
import requests
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable

schemathesis = pytest.importorskip("schemathesis")
RIGHT, WRONG = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE


def operations(brief, mode):
    """Every endpoint. Right requests name the right model; wrong ones have bodies to get wrong."""
    document = deepcopy(requests.get(f"{brief.url}/openapi.json", timeout=10).json())
    for schema in document["components"]["schemas"].values():
        if mode is RIGHT and "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"enum": ["fake"]}
    loaded = schemathesis.openapi.from_dict(document)
    loaded.config.update(base_url=brief.url)
    found = [result.ok() for result in loaded.get_all_operations()]
    return [each for each in found if mode is RIGHT or each.method == "post"]


def fuzz(brief, mode, num_each, number):
    """Send so many made-up requests to each endpoint; how often which status came back."""
    statuses = Counter()
    with requests.Session() as session:

        def send(case):
            response = case.call(session=session, timeout=20)
            statuses[case.operation.path, response.status_code] += 1
            check(response)
            assert brief.service.thread.num_failures == 0, case.body

        for operation in operations(brief, mode):
            strategy = operation.as_strategy(generation_mode=mode)
            limits = settings(
                max_examples=num_each,
                database=None,
                deadline=None,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            )
            with contextlib.suppress(Unsatisfiable):  # nothing to choose: it was asked once
                seed(number)(limits(given(case=strategy)(send)))()
        assert session.get(f"{brief.url}/health", timeout=10).json() == {
            "status": "ok",
            "model": "fake",
            "queue": 0,
            "running": 0,
        }
    assert brief.service.queue.num_admitted == 0
    return statuses


def check(response):
    assert response.status_code < 500, response.text
    assert response.headers["x-request-id"]
    if response.status_code >= 400:
        error = response.json()["error"]
        assert len(error["message"]) > 10 and error["message"].endswith(".")
        assert "type" in error
    elif response.headers["content-type"][0].startswith("text/event-stream"):
        assert "engine_failure" not in response.text
        assert response.text.endswith("\n\n")


def test_a_few_hundred(brief):
    right, wrong = fuzz(brief, RIGHT, 24, 1), fuzz(brief, WRONG, 24, 2)
    paths = {path for path, status in right if status == 200}
    assert len({path for path, _ in wrong}) >= 5
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"} <= paths
    assert all(400 <= status < 500 for _, status in wrong)
    assert sum(right.values()) + sum(wrong.values()) >= 250


@pytest.mark.long
def test_thousands(brief):
    statuses = fuzz(brief, RIGHT, 400, 3) + fuzz(brief, WRONG, 200, 4)
    print(f"\n{sum(statuses.values())} requests")
    for (path, status), count in sorted(statuses.items()):
        print(f"{path:32} {status} {count:6}")
    assert sum(statuses.values()) >= 2000
