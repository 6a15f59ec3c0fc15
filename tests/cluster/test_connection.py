"""Replies on connections of their own: who may connect, what ends one, and what waits where."""

import asyncio
import secrets
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from draftree.cluster import connection as module
from draftree.cluster.connection import ReplyServer, connect
from draftree.cluster.message import ReplicaLost, Unavailable

HERE = "127.0.0.1"
HEAD = (200, [(b"content-type", b"text/plain"), (b"x-name", "Zoë".encode("latin-1"))])
BIG = 2**23


@asynccontextmanager
async def run(call):
    """What comes of a call."""
    replies = ReplyServer(HERE)
    async with replies.listen(), aclosing(replies.read(call)) as answer:
        yield answer


async def write(address, *pieces, is_whole=True):
    async with connect(address, "one") as connection:
        connection.write_head(HEAD)
        for piece in (*pieces, *[b""] * is_whole):
            connection.write(piece)
        await connection.drain()


async def read(call):
    async with run(call) as answer:
        return [piece async for piece in answer]


def test_a_reply_is_name_head_and_body():
    pieces = [b"a", b"\n\n" * 5, b"\0" * BIG]
    assert asyncio.run(read(lambda address: write(address, *pieces))) == ["one", HEAD, *pieces]
    assert asyncio.run(read(write)) == ["one", HEAD]


def test_replies_do_not_mix():
    async def go():
        replies = ReplyServer(HERE)

        async def take(number):
            piece = b"%d" % number * 1000
            return [p async for p in replies.read(lambda address: write(address, piece, piece))]

        async with replies.listen():
            return await asyncio.gather(*map(take, range(50)))

    for number, found in enumerate(asyncio.run(go())):
        assert found == ["one", HEAD] + [b"%d" % number * 1000] * 2


def test_only_who_knows_the_secret_is_heard():
    """Others are cut off, and the reply comes all the same."""
    cut_off = []

    async def intrude(address):
        async with connect(address, "another") as connection:
            await connection.left.wait()
            cut_off.append(address)

    async def call(address):
        await intrude(replace(address, secret=secrets.token_bytes(32)))
        await intrude(replace(address, number=address.number + 1))
        await write(address, b"a")
        await intrude(address)  # a second time

    async def go():
        async with run(call) as answer:
            for expected in ("one", HEAD, b"a"):
                assert await anext(answer) == expected
            while len(cut_off) < 3:
                await asyncio.sleep(0)

    asyncio.run(go())


def test_who_says_nothing_is_cut_off(monkeypatch):
    monkeypatch.setattr(module, "_GREETING_S", 0.01)

    async def call(address):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"half of a")
        assert await reader.read() == b""
        writer.close()
        await write(address, b"a")

    assert asyncio.run(read(call)) == ["one", HEAD, b"a"]


def test_it_listens_on_one_address():
    async def go():
        replies = ReplyServer(HERE)
        async with replies.listen(), aclosing(replies.read(write)) as answer:
            await anext(answer)
            with pytest.raises(OSError):
                await asyncio.open_connection("127.0.0.2", replies._port)

    asyncio.run(go())


def test_secrets_are_not_shown():
    async def call(address):
        shown.append(repr(address))
        await write(address)

    shown = []
    asyncio.run(read(call))
    assert "number=0" in shown[0] and "secret" not in shown[0]


@pytest.mark.parametrize("pieces", [(), (b"a", b"b")])
def test_a_reply_without_its_end_is_lost(pieces):
    async def go():
        found = []
        with pytest.raises(ReplicaLost):
            async with run(lambda address: write(address, *pieces, is_whole=False)) as answer:
                async for piece in answer:
                    found.append(piece)
        assert found == ["one", HEAD, *pieces]

    asyncio.run(go())


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_call_that_fails_ends_the_reply(has_begun):
    """Even if its connection stays as it was: a machine may vanish."""

    async def call(address):
        if has_begun:
            connecting = connect(address, "one")
            await connecting.__aenter__()
            held.append(connecting)
        raise Unavailable

    async def go():
        with pytest.raises(Unavailable):
            await read(call)
        for connecting in held:
            await connecting.__aexit__(None, None, None)

    held = []
    asyncio.run(go())


def test_closing_ends_connection_and_call():
    ended = asyncio.Event()

    async def call(address):
        async with connect(address, "one") as connection:
            connection.write_head(HEAD)
            try:
                await asyncio.Event().wait()
            finally:
                await connection.left.wait()
                ended.set()

    async def go():
        async with run(call) as answer:
            await anext(answer)
        await ended.wait()

    asyncio.run(go())


def test_a_call_that_nobody_took_is_ended():
    async def call(address):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(address)

    async def go():
        with pytest.raises(TimeoutError):
            async with run(call) as answer, asyncio.timeout(0.01):
                await anext(answer)
        await asyncio.sleep(0)

    ended = []
    asyncio.run(go())
    assert len(ended) == 1


def test_what_is_not_read_is_not_written():
    """It waits with who writes, and comes when it is asked for."""
    piece, num_written = bytes(2**16), 0

    async def call(address):
        nonlocal num_written
        async with connect(address, "one") as connection:
            connection.write_head(HEAD)
            while not is_read.is_set():
                connection.write(piece)
                num_written += 1
                if not connection.is_free:
                    is_full.set()
                await connection.drain()
            connection.write(b"")

    async def go():
        async with run(call) as answer:
            assert [await anext(answer) for _ in range(2)] == ["one", HEAD]
            await is_full.wait()
            count = 0
            while count < num_written:
                assert num_written < 1000
                count = num_written
                for _ in range(100):  # in which it could write more
                    await asyncio.sleep(0)
            is_read.set()
            assert len([piece async for piece in answer]) == count == num_written

    is_full, is_read = asyncio.Event(), asyncio.Event()
    asyncio.run(go())
