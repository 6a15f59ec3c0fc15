"""Keys and clients."""

import pytest

from draftree.serve.access import Keys, client_name


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
