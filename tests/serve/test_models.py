"""The lists of models, in the shapes of OpenAI, Anthropic and Codex."""

import httpx2

from draftree.serve.thread import State
from tests.serve.conftest import Running, wait_for

ANTHROPIC = {"anthropic-version": "2023-06-01"}


def test_entries_tell_how_long_the_context_is(client):
    (entry,) = client.get("/v1/models").json()["data"]
    assert (entry["id"], entry["object"], entry["context_length"]) == ("fake", "model", 64)
    assert client.get("/v1/models/fake").json() == entry


def test_anthropics_clients_get_their_own_shape(start):
    url = start(aliases=("other",)).url
    listed = httpx2.get(f"{url}/v1/models?limit=20", headers=ANTHROPIC).json()
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "fake", "other")
    assert [entry["type"] for entry in listed["data"]] == ["model", "model"]
    one = httpx2.get(f"{url}/v1/models/other", headers=ANTHROPIC).json()
    assert one == listed["data"][1]
    assert one["created_at"].endswith("Z") and one["display_name"] == "other"


def test_codex_learns_of_the_context(client):
    listed = client.get("/v1/models?client_version=0.169.0").json()
    (entry,) = listed["models"]
    assert (entry["slug"], entry["context_window"]) == ("fake", 64)
    assert "models" not in client.get("/v1/models").json()


def test_while_the_model_is_loaded_its_context_is_not_known(engine):
    """The list is there all the same."""
    running = Running(engine.open)
    running._thread.start()
    try:
        wait_for(lambda: running.server.started)
        assert running.service.state is State.LOADING
        (entry,) = httpx2.get(f"{running.url}/v1/models").json()["data"]
        assert entry["context_length"] is None
    finally:
        running.service.thread.start()
        wait_for(lambda: running.service.state is State.READY)
        running.stop()
