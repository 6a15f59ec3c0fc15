"""Serve's hook: the order of replicas, from a request and from queues as Serve knows them."""

import asyncio
from types import SimpleNamespace

from draftree.cluster.message import Relayed
from draftree.serve.identity import Identity
from tests.needs import needs_package


def pending(*args):
    return SimpleNamespace(args=args, routing_context=SimpleNamespace(should_backoff=False))


def choose(lens, request, probed=None):
    """lens: as Serve remembers them; probed: what replicas say whose lengths it has forgotten."""
    from draftree.cluster.router import ConversationRouter

    router = object.__new__(ConversationRouter)
    router._replica_queue_len_cache = SimpleNamespace(get=lambda key: lens[key.unique_id])
    asked = []

    async def probe(replicas, backoff_index):
        asked.extend(replica.replica_id.unique_id for replica in replicas)
        return [(r, (probed or {}).get(r.replica_id.unique_id)) for r in replicas]

    router._probe_queue_lens = probe
    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in lens]
    groups = asyncio.run(router.choose_replicas(replicas, request))
    assert asked == [name for name, length in lens.items() if length is None]
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


@needs_package("ray")
def test_a_forgotten_length_is_asked_for():
    """An entry that has expired says nothing, least of all that the replica is idle."""
    request = pending(relayed(prefers="a"))
    assert choose({"a": 5, "b": None}, request, {"b": 5}) == [["a"], ["b"]]
    assert choose({"a": None, "b": 0}, request, {"a": 9}) == [["a", "b"]]
    assert choose({"a": None, "b": None}, request, {"a": 2, "b": 0}) == [["a"], ["b"]]
    assert choose({"a": None, "b": 0}, request) == [["a"], ["b"]]  # a does not answer
    assert choose({"a": None, "b": 0, "c": 9}, request) == [["a", "b", "c"]]
