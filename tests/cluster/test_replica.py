"""A replica: the application without a socket, and what of it the ingress can see."""

import asyncio
import json
import os
import subprocess
import sys
from contextlib import aclosing, asynccontextmanager

import pytest

from draftree.cluster import connection
from draftree.cluster.connection import ReplyAddress, ReplyServer
from draftree.cluster.message import Relayed, ReplicaLost
from draftree.cluster.replica import Replica, after_the_first
from draftree.errors import ModelError
from draftree.serve.identity import Identity
from draftree.serve.service import ServeOptions
from tests.serve import fake
from tests.serve.conftest import wait_for


@pytest.fixture
def engine():
    return fake.Engine()


@pytest.fixture
def replica(engine):
    replica = Replica("one", engine.open, ServeOptions("fake"))
    yield replica
    replica._service.queue.close()
    replica._service.thread.join(60)


def relayed(path="/v1/chat/completions", *, method="POST", **members):
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hello"}], **members}
    return Relayed(
        method,
        path,
        path.encode(),
        b"",
        ((b"host", b"localhost"), (b"content-type", b"application/json")),
        json.dumps(body).encode(),
        ("127.0.0.1", 1),
        Identity("0" * 32, 3, 4, is_repeatable=True),
    )


@asynccontextmanager
async def relay(replica, request, calls=None):
    """What the replica answers. calls: gets the call, which lasts as long as it is running."""

    async def call(address):
        if calls is not None:
            calls.append(asyncio.current_task())
        await replica.relay(request, address)

    replies = ReplyServer("127.0.0.1")
    async with replies.listen(), aclosing(replies.read(call)) as answer:
        yield answer


async def read(replica, request):
    async with relay(replica, request) as answer:
        name, head, *pieces = [piece async for piece in answer]
    return name, head, b"".join(pieces)


def test_an_answer_is_name_head_and_body(replica):
    name, (status, headers), body = asyncio.run(read(replica, relayed()))
    assert (name, status) == ("one", 200)
    assert (b"request-id", b"req_" + b"0" * 32) in headers
    reply = json.loads(body)
    assert (reply["id"], reply["created"]) == ("chatcmpl-" + "0" * 32, 3)


def test_a_stream_has_one_event_a_piece_however_it_comes(replica, engine):
    engine.pieces = ["a", "b", "c"]
    _, _, together = asyncio.run(read(replica, relayed(stream=True)))
    engine.round_s = 0.1
    _, _, apart = asyncio.run(read(replica, relayed(stream=True)))
    assert apart == together and together.count(b'"content":"b"') == 1
    assert engine.calls[0]["sampling"].seed == engine.calls[1]["sampling"].seed == 4


def test_a_request_counts_as_running_until_its_reply_is_over(replica, engine):
    engine.pieces, engine.round_s = ["word "] * 20, 0.01

    async def run():
        async with relay(replica, relayed(stream=True), calls) as answer:
            async for _ in answer:
                assert engine.ended or not calls[0].done()
            await calls[0]

    calls = []
    asyncio.run(run())


def test_after_its_first_piece_a_stream_comes_in_longer_frames(replica, engine, monkeypatch):
    """Every piece passes through three processes."""
    monkeypatch.setattr("draftree.serve.reply.RELAYED_FRAME_S", 3600.0)
    engine.pieces, engine.round_s = ["word "] * 40, 0.01
    written = []

    class Recorded(connection.ReplyConnection):
        def write(self, data):
            written.append(data)
            super().write(data)

    monkeypatch.setattr(connection, "ReplyConnection", Recorded)
    asyncio.run(read(replica, relayed(stream=True)))
    assert b"".join(written).count(b"word ") == 40
    assert sum(b"word" in piece for piece in written) == 2


def test_closing_is_the_clients_leaving(replica, engine):
    engine.pieces, engine.round_s = ["word "] * 2000, 0.01

    async def run():
        async with relay(replica, relayed(stream=True), calls) as answer:
            for _ in range(3):
                await anext(answer)
        await asyncio.to_thread(wait_for, lambda: bool(engine.ended))
        assert calls[0].cancelled()  # where Serve counts it

    calls = []
    asyncio.run(run())
    assert engine.ended[0].usage.completion_tokens < 2000


@pytest.mark.parametrize("is_stream", [True, False])
def test_what_is_cut_off_by_the_end_is_prefetched_elsewhere(engine, is_stream):
    """A stream ends without its last event, other replies with 503."""
    replica = Replica("one", engine.open, ServeOptions("fake", grace_s=0.0))
    engine.pieces, engine.round_s = ["word "] * 2000, 0.01

    async def run():
        async with relay(replica, relayed(stream=is_stream)) as answer:
            await anext(answer)
            reading = asyncio.create_task(anext(answer))
            await asyncio.to_thread(wait_for, lambda: bool(engine.started))
            if is_stream:
                await reading
            replica._service.begin_stop()
            status, _ = await reading
            rest = b"".join([piece async for piece in answer])
            return status, rest

    if is_stream:
        with pytest.raises(ReplicaLost):
            asyncio.run(run())
    else:
        status, rest = asyncio.run(run())
        assert status == 503 and b"shutting down" in rest
    replica._service.thread.join(60)


def test_the_report(replica):
    asyncio.run(read(replica, relayed()))
    report = asyncio.run(replica.report())
    assert report.name == "one"
    assert report.health == {"name": "one", "pid": os.getpid(), "queue": 0, "running": 0}
    assert "draftree_completion_tokens_total 2\n" in report.metrics


def test_an_engine_that_cannot_be_opened_is_said_at_once(engine):
    engine.opening_error = ModelError("This model is not supported.")
    with pytest.raises(ModelError, match="not supported"):
        Replica("one", engine.open, ServeOptions("fake"))


def test_an_engine_that_is_beyond_help_is_unhealthy(replica, engine):
    engine.pieces = [fake.Broken("no memory")]
    replica.check_health()
    for _ in range(3):
        wait_for(lambda: replica._service.state == "ready")  # while it recovers, it refuses
        asyncio.run(read(replica, relayed()))
    wait_for(lambda: replica._service.thread.failure is not None)
    wait_for(lambda: replica._service.state == "failed")
    with pytest.raises(Exception, match="3 times in a row"):
        replica.check_health()


def test_only_the_first_process_goes_ahead_alone(tmp_path, monkeypatch):
    """Others wait for it, then go on together."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    code = (
        "import fcntl, sys; from draftree.cluster.replica import after_the_first\n"
        "def flock(lock, how, flock=fcntl.flock):\n"
        "    if how == fcntl.LOCK_SH: print('was not first', flush=True)\n"
        "    flock(lock, how)\n"
        "fcntl.flock = flock\n"
        "with after_the_first('model'): print('in', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with after_the_first("model"):
        others = [subprocess.Popen(command, **pipes) for _ in range(2)]
        assert [other.stdout.readline() for other in others] == ["was not first\n"] * 2
        assert all(other.poll() is None for other in others)
    assert [other.stdout.readline() for other in others] == ["in\n"] * 2  # both hold it
    for other in others:
        other.communicate()


def test_a_lost_connection_is_the_clients_leaving(replica, engine):
    """Nobody has to say so: the request is over when the engine is free."""
    engine.pieces, engine.round_s = ["word "] * 2000, 0.01

    async def run():
        async def accept(reader, writer):
            await reader.readexactly(2**10)
            writer.transport.abort()

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        await replica.relay(relayed(stream=True), ReplyAddress("127.0.0.1", port, 0, bytes(32)))
        await asyncio.to_thread(wait_for, lambda: bool(engine.ended))
        server.close()

    asyncio.run(run())
    assert engine.ended[0].usage.completion_tokens < 2000


def test_a_call_that_is_cancelled_is_the_clients_leaving(replica, engine):
    """Even while the connection stays open."""
    engine.pieces, engine.round_s = ["word "] * 2000, 0.01

    async def run():
        has_begun = asyncio.Event()

        async def accept(reader, writer):
            await reader.readexactly(2**10)
            has_begun.set()
            await reader.read()
            writer.close()

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        address = ReplyAddress("127.0.0.1", port, 0, bytes(32))
        call = asyncio.create_task(replica.relay(relayed(stream=True), address))
        await has_begun.wait()
        call.cancel()
        await asyncio.to_thread(wait_for, lambda: bool(engine.ended))
        server.close()

    asyncio.run(run())
    assert engine.ended[0].usage.completion_tokens < 2000


@pytest.mark.parametrize("num_bytes", [2**10, 2**23])
def test_a_reply_in_one_piece_has_any_size(replica, engine, num_bytes):
    engine.pieces = ["x" * num_bytes]
    _, _, body = asyncio.run(read(replica, relayed()))
    assert len(json.loads(body)["choices"][0]["message"]["content"]) == num_bytes


def test_a_stream_comes_whole_to_a_reader_that_comes_late(replica, engine):
    """What connections do not hold waits here, as with `draftree serve`."""
    engine.pieces = [f"{number}{'-' * 2**16}" for number in range(2**7)]

    async def run():
        async with relay(replica, relayed(stream=True)) as answer:
            await anext(answer)
            await asyncio.to_thread(wait_for, lambda: bool(engine.ended))
            pieces = [piece async for piece in answer][1:]
        return b"".join(pieces)

    body = asyncio.run(run())
    assert body.count(b'-"') == 2**7 and b"[DONE]" in body
