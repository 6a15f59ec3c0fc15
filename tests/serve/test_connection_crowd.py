"""Many connections at a time: crowds are told to come back, idle ones make room, and one client
leaves room for others.
"""
# ruff: noqa: F811  (fixtures are imported, and named again by the tests that use them)

import json
import threading

import httpx2
import pytest

from draftree.serve import connection as module
from tests.serve.conftest import wait_for
from tests.serve.test_connection import (  # noqa: F401
    GET,
    JSON,
    Raw,
    post_head,
    refusal,
    running,
    server,
)
from tests.serve.test_openai import HELLO
from tests.serve.test_reply import PATH


@pytest.mark.parametrize("name", ["MAX_CONNECTIONS", "MAX_PER_CLIENT"])
def test_crowds_are_told_to_come_back(running, monkeypatch, name):
    """All but those who ask how the server is, as long as they do not keep it busy."""
    monkeypatch.setattr(module, name, 5)
    monkeypatch.setattr(module, "MAX_CROWDED", 0)
    busy = [send_half(running) for _ in range(5)]
    refused = Raw(running)
    head, content = refused.read()
    assert head.startswith("HTTP/1.1 503") and "retry-after" in head.lower()
    assert json.loads(content)["error"]["message"] == "There are too many connections."
    monkeypatch.setattr(module, "MAX_CROWDED", 2)
    late = [Raw(running) for _ in range(4)]  # of which the first two make room for the last two
    assert [raw.read() for raw in late[:2]] == [("", "")] * 2
    for raw in late[2:]:
        raw.send(post_head(2) + b"{}")
        assert raw.read_one() == 503
        raw.send(GET)
        assert raw.read_one() == 200
    busy[0].close()
    wait_for(lambda: num_busy(running) == 4)
    late[2].send(post_head(2) + b"{}")
    assert late[2].read_one() == 400
    for raw in (*busy, *late, refused):
        raw.close()
    wait_for(lambda: not running.server.server_state.connections)


def test_one_client_leaves_room_for_others(running, monkeypatch):
    monkeypatch.setattr(module, "MAX_PER_CLIENT", 3)
    busy = [send_half(running, "127.0.0.2") for _ in range(3)]
    for address, status in (("127.0.0.2", 503), ("127.0.0.1", 400)):
        raw = Raw(running, address=address)
        raw.send(post_head(2) + b"{}")
        assert raw.read_one() == status
        raw.close()
    for raw in busy:
        raw.close()


@pytest.mark.parametrize("sent", [b"", b"POST /v1/cha", GET])
def test_idle_connections_make_room(running, monkeypatch, sent):
    """Whether they sent nothing yet, a part of a request, or had an answer."""
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 5)
    raws = [Raw(running) for _ in range(5)]
    for raw in raws:
        if sent:
            raw.send(sent)
        if sent == GET:
            assert raw.read_one() == 200
    wait_for(lambda: len(running.server.server_state.connections) == 5)
    late = [Raw(running) for _ in range(2)]
    for raw in late:
        raw.send(post_head(2) + b"{}")
        assert raw.read_one() == 400
    assert [raw.read() for raw in raws[:2]] == [("", "")] * 2
    assert len(running.server.server_state.connections) == 5
    for raw in (*raws, *late):
        raw.close()


def test_a_thousand_idle_connections_shut_nobody_out(running):
    raws = [Raw(running) for _ in range(820)]
    assert httpx2.get(f"{running.url}/health").is_success
    assert httpx2.post(running.url + PATH, json=HELLO).is_success
    assert len(running.server.server_state.connections) <= module.MAX_PER_CLIENT
    for raw in raws:
        raw.close()


def send_half(running, address="127.0.0.1"):
    """A connection on which a request is being sent."""
    before = num_busy(running)
    raw = Raw(running, address=address)
    raw.send(post_head(200))
    wait_for(lambda: num_busy(running) == before + 1)
    return raw


def num_busy(running):
    return sum(not each.is_idle for each in list(running.server.server_state.connections))


def test_idle_crowds_do_not_disturb(running):
    raws = [Raw(running) for _ in range(300)]
    threads = [threading.Thread(target=raw.send, args=(b"POST /v1/cha",)) for raw in raws]
    for thread in threads:
        thread.start()
    assert httpx2.post(running.url + PATH, json=HELLO, timeout=120).is_success
    for thread in threads:
        thread.join()
    for raw in raws:
        raw.close()
