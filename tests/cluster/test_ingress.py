"""The ingress over replicas in this process: routing, repeats, sums, and what goes wrong."""

import asyncio
import contextlib
import os
from functools import partial

import pytest

from draftree.chat import Engine
from draftree.cluster import connection
from draftree.cluster import ingress as module
from draftree.serve import reply
from draftree.serve.identity import Identity
from draftree.serve.queue import Job
from draftree.serve.wire import OUTLET
from tests.cluster.local import Answer, LocalPool, ask, new_ingress
from tests.serve import fake
from tests.serve.conftest import wait_for
from tests.tiny import tiny_path

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"name": "add", "parameters": {"type": "object"}}
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
STREAMS = {
    "chat": (CHAT, {"messages": HELLO}),
    "chat with usage": (CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}}),
    "chat with tools": (
        CHAT,
        {"messages": HELLO, "tools": [{"type": "function", "function": TOOL}]},
    ),
    "several": ("/v1/completions", {"prompt": ["one", "two"], "n": 2}),
    "messages": (MESSAGES, {"messages": HELLO, "max_tokens": 9}),
    "responses": ("/v1/responses", {"input": "Hello"}),
}


@pytest.fixture
def fixed(monkeypatch):
    """Every request has the same identity, so that replies can be compared to the letter."""
    same = Identity("t" * 32, 1_700_000_000, 5, is_repeatable=True)
    monkeypatch.setattr(module.Identity, "new", lambda **_: same)
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)


@contextlib.contextmanager
def run_pool(*engines, **options):
    pool = LocalPool(*(engine.open for engine in engines), **options)
    try:
        yield pool, new_ingress(pool)
    finally:
        pool.close()


def request(body):
    return {"model": "fake", "stream": True, **body}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_goes_on_where_a_dead_replica_broke_off(name, fixed):
    path, body = STREAMS[name]
    engines = [fake.Engine(pieces=fake.THINKING_AND_CALLS, thinks=True) for _ in range(2)]

    async def run():
        whole = await ask(ingress, path, request(body))
        assert whole.status == 200 and len(whole.events) > 6
        for cut in range(0, len(whole.body) + 1, max(len(whole.body) // 20, 1)):
            pool.asked.clear()
            pool.cuts[:] = [cut, cut // 2]
            answer = await ask(ingress, path, request(body))
            assert answer.is_whole and answer.events == whole.events
            names = [name for name, _ in pool.asked]
            assert len(names) == 3 and names[0] != names[1]

    with run_pool(*engines) as (pool, ingress):
        asyncio.run(run())


def test_a_connection_that_breaks_is_a_replica_that_is_lost(fixed, monkeypatch):
    """In the middle of an event, or between two."""

    class Breaking(connection.ReplyConnection):
        def write(self, data):
            at = data.find(b'"content":"b"')
            super().write(data if at < 0 or pool.asked[1:] else data[:at])
            if at >= 0 and not pool.asked[1:]:
                self._writer.transport.close()

    async def run():
        broken = await ask(ingress, CHAT, request({"messages": HELLO}))
        assert len(pool.asked) == 2
        return broken, await ask(ingress, CHAT, request({"messages": HELLO}))

    monkeypatch.setattr(connection, "ReplyConnection", Breaking)
    engines = [fake.Engine(pieces=["a", "b", "c"]) for _ in range(2)]
    with run_pool(*engines) as (pool, ingress):
        broken, whole = asyncio.run(run())
    assert broken.is_whole and broken.events == whole.events


def test_real_texts_go_on_to_the_letter(fixed):
    """Sampled, with log-probabilities, on two engines, of which one has a warm cache."""
    body = {"model": "fake", "prompt": "Once upon", "max_tokens": 24, "stream": True, "logprobs": 2}
    path = str(tiny_path("llama"))
    opener = partial(Engine.open, path, max_ctx=256, draft="none", threads=1, device="cpu")

    async def run():
        whole = await ask(ingress, "/v1/completions", body)
        assert len(whole.events) > 20
        for share in (0.1, 0.4, 0.9):
            pool.cuts[:] = [int(share * len(whole.body))]
            again = await ask(ingress, "/v1/completions", body)
            assert again.events == whole.events

    pool = LocalPool(opener, opener)
    ingress = new_ingress(pool)
    try:
        asyncio.run(run())
    finally:
        pool.close()


@pytest.fixture
def one_by_one(monkeypatch):
    """Deltas are sent one at a time, however many have come: what was sent before a cut does not
    depend on how busy the machine is.
    """
    take = Job.take

    def take_one(job):
        first, *others = take(job) or [None]
        job._deltas.extendleft(reversed(others))
        return [] if first is None else [first]

    monkeypatch.setattr(Job, "take", take_one)
    monkeypatch.setattr(reply, "RELAYED_FRAME_S", 0.0)


@pytest.mark.parametrize("name", ["completions", "chat", "messages"])
def test_a_reply_is_not_written_again_but_goes_on(name, fixed, one_by_one):
    """The tokens of a lost reply are read elsewhere, and the client sees none of that."""
    path, body = {
        "completions": ("/v1/completions", {"prompt": ["Once", "upon"], "max_tokens": 24}),
        "chat": (CHAT, {"messages": HELLO, "max_tokens": 24, "presence_penalty": 0.5}),
        "messages": (MESSAGES, {"messages": HELLO, "max_tokens": 24, "stop_sequences": ["qq"]}),
    }[name]
    options = {"max_ctx": 256, "draft": "none", "threads": 1, "device": "cpu"}
    opener = partial(Engine.open, str(tiny_path("llama")), **options)

    async def run():
        whole = await ask(ingress, path, request(body))
        assert b": tokens" not in whole.body and len(whole.events) > 10
        pool.asked.clear()
        pool.cuts[:] = [int(0.8 * len(whole.body)), int(0.9 * len(whole.body))]
        again = await ask(ingress, path, request(body))
        assert b": tokens" not in again.body
        texts = [[e for e in one.events if '"usage":{' not in e] for one in (whole, again)]
        assert texts[0] == texts[1]
        return [sum(map(len, asked.identity.begun)) for _, asked in pool.asked]

    pool = LocalPool(opener, opener)
    ingress = new_ingress(pool)
    try:
        counts = asyncio.run(run())
    finally:
        pool.close()
    assert counts[0] == 0 < counts[1] <= counts[2]


def test_a_reply_in_one_piece_is_prefetched_again(fixed):
    async def run():
        pool.cuts[:] = [10, 0]
        return await ask(ingress, CHAT, {"model": "fake", "messages": HELLO})

    with run_pool(fake.Engine(), fake.Engine()) as (pool, ingress):
        answer = asyncio.run(run())
    assert answer.json()["choices"][0]["message"]["content"] == "Hello there"
    assert len(pool.asked) == 3


def test_another_text_is_an_error_and_never_mixed(fixed):
    async def run():
        whole = await ask(ingress, CHAT, request({"messages": HELLO}))
        pool.cuts[:] = [whole.body.index(b'"content":"c"')]  # within the event after
        return await ask(ingress, CHAT, request({"messages": HELLO}))

    first = fake.Engine(pieces=["a", "b", "c", "d"])
    with run_pool(first, fake.Engine(pieces=["a", "x", "c", "d"])) as (pool, ingress):
        answer = asyncio.run(run())
    assert answer.is_whole and '"reply_changed"' in answer.events[-1]
    text = "".join(answer.events)
    assert not ('"content":"x"' in text and '"content":"b"' in text)


def test_a_request_that_kills_every_replica_ends(fixed):
    async def run(stream):
        pool.cuts[:] = [5] * 20
        return await ask(ingress, MESSAGES, {**request(STREAMS["messages"][1]), "stream": stream})

    with run_pool(fake.Engine(), fake.Engine()) as (pool, ingress):
        whole, stream = asyncio.run(run(False)), asyncio.run(run(True))
    assert whole.status == 500 and whole.json()["error"]["type"] == "api_error"
    assert stream.status == 200 and stream.events[-1].startswith("event: error\n")
    assert len(pool.asked) == 12


@pytest.mark.parametrize(("limit", "status"), [("_max_jobs", 503), ("max_per_client", 429)])
def test_a_replica_that_is_full_is_passed_over(fixed, limit, status):
    """The client hears of it when all are."""

    async def run():
        await ask(ingress, CHAT, {"model": "fake", "messages": HELLO})
        name = pool.asked[-1][0]
        setattr(pool.replicas[name]._service.queue, limit, 0)
        pool.asked.clear()
        answer = await ask(ingress, CHAT, request({"messages": HELLO}))
        assert answer.status == 200 and answer.events[-1] == "data: [DONE]"
        assert len(pool.asked) == 2 and pool.asked[0][0] == name
        for replica in pool.replicas.values():
            setattr(replica._service.queue, limit, 0)
        refused = await ask(ingress, MESSAGES, request(STREAMS["messages"][1]))
        assert refused.status == status and "retry-after" in refused.headers

    with run_pool(fake.Engine(), fake.Engine()) as (pool, ingress):
        for replica in pool.replicas.values():
            replica._service.check_count = lambda count: None
        asyncio.run(run())


@pytest.mark.parametrize("limit", ["_max_jobs", "max_per_client"])
def test_a_reply_that_has_begun_waits_for_a_replica_that_is_full(fixed, limit):
    """However often it is refused: 30 times are more than a request may lose replicas."""

    async def run():
        whole = await ask(ingress, CHAT, request({"messages": HELLO}))
        pool.asked.clear()
        pool.cuts[:] = [whole.body.index(b" there")]
        queues = [replica._service.queue for replica in pool.replicas.values()]
        room = getattr(queues[0], limit)

        def change(count):
            for queue in queues if count in (2, 30) else ():
                setattr(queue, limit, 0 if count == 2 else room)

        pool.on_ask = change
        again = await ask(ingress, CHAT, request({"messages": HELLO}))
        assert again.events == whole.events and len(pool.asked) == 30

    with run_pool(fake.Engine(), fake.Engine()) as (pool, ingress):
        for replica in pool.replicas.values():
            replica._service.check_count = lambda count: None
        asyncio.run(run())


def test_a_client_that_leaves_frees_the_engine():
    engine = fake.Engine(pieces=["word "] * 2000, round_s=0.01)

    async def run():
        answer = Answer()
        task = asyncio.create_task(ask(ingress, CHAT, request({"messages": HELLO}), answer))
        while not answer.body:
            await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.to_thread(wait_for, lambda: bool(engine.ended))

    with run_pool(engine) as (_, ingress):
        asyncio.run(run())
    assert 0 < engine.ended[0].usage.completion_tokens < 2000


def test_a_client_that_hangs_up_frees_the_engine():
    """Where no proxy of Serve's cancels the request."""
    engine = fake.Engine(pieces=["word "] * 2000, round_s=0.01)

    async def run():
        answer, left = Answer(), asyncio.Event()
        task = asyncio.create_task(ask(ingress, CHAT, request({"messages": HELLO}), answer, left))
        while not answer.body:
            await asyncio.sleep(0.01)
        left.set()
        await task
        assert not answer.is_whole
        await asyncio.to_thread(wait_for, lambda: bool(engine.ended))

    with run_pool(engine) as (_, ingress):
        asyncio.run(run())
    assert 0 < engine.ended[0].usage.completion_tokens < 2000


@pytest.mark.parametrize("is_free", [True, False])
def test_pieces_take_the_shorter_way_while_it_is_free(fixed, is_free):
    class Way:
        pieces, is_free = (), False

        def write_piece(self, data):
            self.pieces += (data,)
            answer.body += data

    async def run():
        await ask(ingress, CHAT, request({"messages": HELLO}), answer, extensions={OUTLET: way})
        return await ask(ingress, CHAT, request({"messages": HELLO}))

    way, answer = Way(), Answer()
    way.is_free = is_free
    with run_pool(fake.Engine(pieces=["a"] * 9, round_s=0.1)) as (_, ingress):
        usual = asyncio.run(run())
    assert answer.is_whole and answer.events == usual.events
    assert len(way.pieces) > 2 if is_free else not way.pieces


def test_turns_of_a_conversation_stay_on_one_replica(fixed):
    async def run():
        for number in range(8):
            turns = [{"role": "user", "content": f"c{number}"}]
            for _ in range(3):
                await ask(ingress, CHAT, {"model": "fake", "messages": turns})
                turns += [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "?"}]
        return await ask(ingress, "/metrics")

    with run_pool(fake.Engine(), fake.Engine(), fake.Engine()) as (pool, ingress):
        metrics = asyncio.run(run()).body.decode()
    places = [name for name, request in pool.asked if request.method == "POST"]
    assert all(len(set(places[start : start + 3])) == 1 for start in range(0, 24, 3))
    assert len(set(places)) > 1
    for line in ("draftree_known_total 16", "draftree_hits_total 16", "draftree_hit_rate 1"):
        assert f"\n{line}\n" in metrics


def test_sums_and_keys(fixed):
    body, key = {"model": "fake", "messages": HELLO}, {"authorization": "Bearer k"}

    async def run():
        for _ in range(6):
            assert (await ask(ingress, CHAT, body, **key)).status == 200
        assert (await ask(ingress, CHAT, body)).status == 401
        assert (await ask(ingress, "/metrics")).status == 401
        return await ask(ingress, "/metrics", **key), await ask(ingress, "/health")

    with run_pool(fake.Engine(), fake.Engine(), api_keys=("k",)) as (_, ingress):
        metrics, health = asyncio.run(run())
    text = metrics.body.decode()
    assert 'route="/v1/chat/completions",status="200"} 6\n' in text
    assert "draftree_completion_tokens_total 12\n" in text and "draftree_replicas 2\n" in text
    said = health.json()
    assert [replica.pop("name") for replica in said["replicas"]] == ["r0", "r1"]
    replicas = [{"pid": os.getpid(), "queue": 0, "running": 0}] * 2
    status = {"status": "ok", "model": "fake", "queue": 0, "running": 0}
    assert said == {**status, "replicas": replicas}
    assert health.headers["content-length"] == str(len(health.body))


def test_what_the_ingress_refuses_itself(fixed):
    async def run(path, **body):
        return await ask(ingress, path, {"model": "fake", **body})

    with run_pool(fake.Engine()) as (pool, ingress):
        long = asyncio.run(run(MESSAGES, messages="x" * 2**20))
        assert long.status == 413 and long.json()["type"] == "error"
        ingress = new_ingress(LocalPool())
        none = asyncio.run(run(CHAT, messages=HELLO))
        assert none.status == 503 and none.headers["retry-after"]
    assert not pool.asked


def test_a_replica_that_nobody_gives_is_not_waited_for_forever():
    class Never(LocalPool):
        async def ask(self, request):
            await asyncio.Event().wait()
            yield

    ingress = new_ingress(Never(), patience_s=0.01)
    answer = asyncio.run(ask(ingress, CHAT, {"messages": HELLO}))
    assert answer.status == 503


def test_a_body_that_does_not_come_is_not_waited_for():
    async def receive():
        await asyncio.Event().wait()

    answer = Answer()
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b""}
    asyncio.run(new_ingress(LocalPool(), read_s=0.01)(scope, receive, answer.send))
    assert answer.status == 408
