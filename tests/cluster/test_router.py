"""Serve's hook: the order of replicas, from a request and from queues as Serve knows them."""

import asyncio
from types import SimpleNamespace

from draftree.cluster.message import Relayed
from draftree.serve.identity import Identity
from tests.needs import needs_package


def pending(*args):
    return SimpleNamespace(args=args, routing_context=SimpleNamespace(should_backoff=False))


def choose(lens, request):
    from draftree.cluster.router import ConversationRouter

    router = object.__new__(ConversationRouter)
    router._replica_queue_len_cache = SimpleNamespace(get=lambda key: lens[key.unique_id])
    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in lens]
    groups = asyncio.run(router.choose_replicas(replicas, request))
    return [sorted(replica.replica_id.unique_id for replica in group) for group in groups]


def relayed(**members):
    return Relayed("POST", "/", b"/", b"", (), b"", None, Identity("t", 1, 2), **members)


@needs_package("ray")
def test_order():
    lens = {"a": 0, "b": 3, "c": None}
    request = pending(relayed(prefers="b", avoids=("c",)))
    assert choose(lens, request) == [["b"], ["a"], ["c"]]
    assert request.routing_context.should_backoff
    assert choose({**lens, "b": 9}, pending(relayed(prefers="b"))) == [["a", "b", "c"]]


@needs_package("ray")
def test_other_calls_have_no_preference():
    assert choose({"a": 1, "b": 0}, pending()) == [["a", "b"]]
    assert choose({"a": 1, "b": 0}, None) == [["a", "b"]]
