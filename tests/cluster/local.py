"""Replicas in this process, without Ray: the real application on engines of our choice."""

import asyncio
import json
from contextlib import aclosing
from functools import partial

from draftree.cluster.connection import ReplyServer
from draftree.cluster.ingress import Ingress
from draftree.cluster.message import ReplicaLost, Unavailable
from draftree.cluster.replica import Replica
from draftree.cluster.routing import rank_replicas
from draftree.serve.service import ServeOptions


class LocalPool:
    """As a cluster has it. cuts: after so many bytes of a body the replica dies, one a request."""

    def __init__(self, *open_engines, **options):
        given = ServeOptions(**{"model_id": "fake", **options})
        self.replicas = {
            f"r{number}": Replica(f"r{number}", open_engine, given)
            for number, open_engine in enumerate(open_engines)
        }
        self.asked = []  # names, and the requests they got
        self.cuts = []
        self.on_ask = lambda count: None

    async def ask(self, request):
        groups = rank_replicas(dict.fromkeys(self.replicas, 0), request.prefers, request.avoids)
        if not groups:
            raise Unavailable
        name = groups[0][0]
        self.asked.append((name, request))
        self.on_ask(len(self.asked))
        cut = self.cuts.pop(0) if self.cuts else None
        relay = partial(self.replicas[name].relay, request)
        replies = ReplyServer("127.0.0.1")
        async with replies.listen(), aclosing(replies.read(relay)) as answer:
            yield await anext(answer)
            yield await anext(answer)
            num_left = float("inf") if cut is None else cut
            async for piece in answer:
                if len(piece) >= num_left:
                    yield piece[:num_left]
                    raise ReplicaLost
                num_left -= len(piece)
                yield piece
            if cut is not None:
                raise ReplicaLost

    async def survey(self):
        return [await replica.report() for replica in self.replicas.values()]

    def close(self):
        for replica in self.replicas.values():
            replica._service.queue.close()
            replica._service.thread.join(60)


def new_ingress(pool, **options):
    return Ingress(pool, max_body_bytes=options.pop("max_body_bytes", 2**20), **options)


class Answer:
    def __init__(self):
        self.status, self.headers, self.body, self.is_whole = 0, {}, b"", False

    async def send(self, message):
        if message["type"] == "http.response.start":
            assert not self.status, "the head came twice"
            self.status = message["status"]
            self.headers = {n.decode(): v.decode() for n, v in message["headers"]}
        else:
            assert not self.is_whole, "more after the end"
            self.body += message["body"]
            self.is_whole = not message["more_body"]

    @property
    def events(self):
        events = self.body.decode().split("\n\n")
        assert events.pop() == ""
        return [event for event in events if not event.startswith(":")]

    def json(self):
        return json.loads(self.body)


async def ask(ingress, path, content=None, answer=None, left=None, *, extensions=None, **headers):
    """One request to the ingress, and all that comes back. left: set when the client leaves."""
    body = b"" if content is None else json.dumps(content).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        await (left or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    named = {"host": "localhost", "content-type": "application/json", **headers}
    scope = {
        "type": "http",
        "method": "GET" if content is None else "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(n.replace("_", "-").encode(), v.encode()) for n, v in named.items()],
        "client": ("127.0.0.1", 1),
        "extensions": extensions or {},
    }
    answer = answer or Answer()
    await ingress(scope, receive, answer.send)
    return answer
