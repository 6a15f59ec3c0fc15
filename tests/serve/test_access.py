"""Keys, names of the server, and clients."""

import contextlib

import httpx2
import pytest

from draftree.serve.access import Hosts, Keys, client_name


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ({}, None),
        ({"authorization": "Bearer wrong"}, None),
        ({"authorization": "Basic one"}, None),
        ({"authorization": "one"}, None),
        ({"authorization": "Bearer one"}, 0),
        ({"authorization": "bearer  two "}, 1),
        ({"x-api-key": "two"}, 1),
        ({"x-api-key": "one\udcff"}, None),
        ({"x-api-key": ""}, None),
    ],
)
def test_keys(headers, found):
    assert Keys(["one", "two"]).find(headers) == found


def test_without_keys_everyone_may_ask():
    assert Keys([]).find({}) == -1
    assert Keys([]).find({"authorization": "Bearer anything"}) == -1


def test_clients_differ_by_key_and_by_address():
    names = {client_name(key, host) for key in (-1, 0, 1) for host in ("a", "b", None)}
    assert len(names) == 9


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LOCALHOST:8000", "localhost.", "app.localhost", "127.0.0.1:80", "[::1]:80"),
        *("[::1]", "192.168.0.7", "[fe80::1%25eth0]:8000", "box", "box.local", "box.lan", ""),
        *(
            "host.docker.internal:8000",
            "llm.example.org",
            "LLM.example.org.:443",
            "printer.home.arpa",
        ),
    ],
)
def test_own_names(host):
    assert Hosts(["llm.example.org"], has_keys=False).knows(host)


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io"),
        *("notlocal.example", "x.llm.example.org", "evil.example]", "a.b@localhost.c", "1.2.3.4.5"),
    ],
)
def test_names_of_others(host):
    assert not Hosts(["llm.example.org"], has_keys=False).knows(host)
    assert Hosts(["llm.example.org"], has_keys=True).knows(host)
    assert Hosts(["*"], has_keys=False).knows(host)


@pytest.mark.parametrize(
    ("trusted", "statuses"),
    [
        ((), [200, 429, 429]),  # anyone could claim to be anyone
        (("127.0.0.1",), [200, 200, 429]),
        (("127.0.0.0/8",), [200, 200, 429]),
        (("10.0.0.1",), [200, 429, 429]),  # not the proxy that asks
    ],
)
def test_behind_a_proxy_clients_have_their_own_limits(start, engine, trusted, statuses):
    """One stream of the first client runs; another client may ask, the first one may not."""
    engine.pieces, engine.round_s = ["word "] * 3000, 0.01
    running = start(max_per_client=1, trusted_proxies=trusted)
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    found = []
    with contextlib.ExitStack() as stack:
        # What the client wrote itself stands before what the proxy adds.
        for name in ("203.0.113.1", "203.0.113.2", "203.0.113.2, 203.0.113.1"):
            client = stack.enter_context(httpx2.Client(base_url=running.url, timeout=120))
            headers = {"x-forwarded-for": name}
            asked = client.stream("POST", "/v1/chat/completions", json=body, headers=headers)
            found.append(stack.enter_context(asked).status_code)
    assert found == statuses
