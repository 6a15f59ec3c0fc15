"""Bodies of requests are held within bounds, and their memory goes back to the system."""

import json
import re
import threading
from pathlib import Path

import httpx2
import pytest

from draftree.serve import memory
from draftree.serve.wire import ApiError
from tests.serve.conftest import wait_for
from tests.serve.test_connection import PATH, Raw, post_head
from tests.serve.test_openai import HELLO
from tests.serve.test_thread_killed import Process

MIB = 2**20


def test_bounds_of_all_and_of_each():
    bodies = memory.BodyMemory(100, 60)
    bodies.hold("a", 60)
    with pytest.raises(ApiError, match="Your requests hold") as caught:
        bodies.hold("a", 1)
    assert (caught.value.status, caught.value.retry_after) == (429, 5)
    bodies.hold("b", 40)
    with pytest.raises(ApiError, match="Requests hold") as caught:
        bodies.hold("c", 1)
    assert (caught.value.status, caught.value.retry_after) == (503, 5)
    bodies.release("a", 10)
    bodies.hold("c", 10)
    assert bodies.num_held == 100
    for client, num_bytes in (("a", 50), ("b", 40), ("c", 10)):
        bodies.release(client, num_bytes)
    assert bodies.num_held == 0


@pytest.fixture
def running(start):
    running = start(max_body_bytes=MIB)
    yield running
    wait_for(lambda: running.service.bodies.num_held == 0)
    assert httpx2.post(running.url + PATH, json=HELLO).is_success


def send_most(running, address):
    """A body of a MiB, all but its last byte."""
    raw = Raw(running, address=address)
    raw.send(post_head(MIB) + b" " * (MIB - 1))
    return raw


def test_bodies_on_their_way_are_bounded(running):
    held = running.service.bodies
    own = [send_most(running, "127.0.0.1") for _ in range(2)]
    wait_for(lambda: held.num_held == 2 * MIB - 2)
    refused = httpx2.post(running.url + PATH, json={**HELLO, "user": "x" * 500})
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
    assert refused.json()["error"]["message"] == "Your requests hold 2 MiB here already."
    assert httpx2.get(f"{running.url}/health").is_success
    others = [send_most(running, f"127.0.0.{host}") for host in (2, 2, 3, 3, 4, 4)]
    wait_for(lambda: held.num_held == 8 * MIB - 8)
    last = Raw(running, address="127.0.0.5")
    content = json.dumps(HELLO).encode()
    last.send(post_head(len(content)) + content)
    assert last.read_one() == 503
    for raw in (*own, *others[:-1]):
        raw.close()
    others[-1].send(b" ")
    assert others[-1].read_one() == 400
    last.send(post_head(len(content)) + content)
    assert last.read_one() == 200
    for raw in (others[-1], last):
        raw.close()


def test_a_body_counts_as_long_as_its_request(running, engine):
    is_over = threading.Event()
    engine.pieces = ["a", is_over.wait, "b"]
    body = {**HELLO, "stream": True}
    with httpx2.stream("POST", running.url + PATH, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert running.service.bodies.num_held == int(response.request.headers["content-length"])
        is_over.set()
        assert list(lines)
    engine.pieces = ["fine"]


def test_memory_of_many_bodies_is_given_back():
    """Three times as much as may be held at a time, sent at once."""
    process = Process('["fine"]', options=("--max-body", "8"))
    assert httpx2.post(process.url + PATH, json=HELLO).is_success
    before = memory_of(process, "VmRSS")
    start = b'{"model": "fake", "messages": [{"role": "user", "content": "'
    content = start + b"x" * (7 * MIB) + b'"}]}'
    raws = [Raw(process, address=f"127.0.0.{1 + number // 2}") for number in range(24)]
    senders = [
        threading.Thread(target=raw.send, args=(post_head(len(content)) + content[:-1],))
        for raw in raws
    ]
    for raw, sender in zip(raws, senders, strict=True):
        raw.socket.settimeout(60)
        sender.start()
    for sender in senders:
        sender.join()
    statuses = []
    for raw in raws:
        raw.send(b"}")
        statuses.append(raw.read_one())
        raw.close()
    assert set(statuses) == {400, 503}  # longer than the context, or not held
    assert memory_of(process, "VmHWM") - before < 140 * MIB
    wait_for(lambda: memory_of(process, "VmRSS") - before < 48 * MIB, 20)
    assert process.stop() == 0


def memory_of(process, name):
    """In bytes: what is resident, or was at most."""
    status = Path(f"/proc/{process.process.pid}/status").read_text()
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", status)[1])
