"""The real thing: `draftree cluster` with Ray, replicas of a tiny model, and one that is killed."""

import asyncio
import os
import signal
import socket
import threading
from contextlib import aclosing, closing, suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.chaos import Chaos, prepare_questions, read_health, read_metrics
from benchmarks.cluster import ClusterOptions, measure_chaos, run_cluster
from draftree.bench.http import Endpoint, ask, read_events
from draftree.chat import Engine
from draftree.core import SamplingParams
from draftree.errors import BenchError
from tests.needs import needs_package
from tests.serve.conftest import wait_for
from tests.tiny import tiny_path

PROMPT, NUM_REPLIES, NUM_TOKENS, SEED = "Once upon a time", 6, 400, 7


def expected_texts(path):
    engine = Engine.open(str(path), threads=1)
    samplings = [SamplingParams(temperature=1.0, seed=SEED + n) for n in range(NUM_REPLIES)]
    replies = [engine.complete(PROMPT, max_tokens=NUM_TOKENS, sampling=s) for s in samplings]
    texts = ["".join(delta.text for delta in reply) for reply in replies]
    engine.close()
    return texts


def read_texts(endpoint, after_first):
    """The texts of a stream of several replies; after_first: called when the first piece came."""
    body = {"model": endpoint.find_model(), "prompt": PROMPT, "n": NUM_REPLIES, "seed": SEED}
    body |= {"max_tokens": NUM_TOKENS, "temperature": 1.0, "stream": True}
    texts = [""] * NUM_REPLIES
    with closing(endpoint.request("POST", "completions", body)) as response:
        for event in read_events(response):
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
            after_first()
            after_first = int  # nothing
    return texts


class Left(Exception):
    """A client that leaves."""


def leave():
    raise Left


@needs_package("ray")
def test_a_reply_outlives_its_replica():
    """A client that leaves frees its replica. Both replicas write what one engine writes; so does
    the one that takes over.
    """
    path = tiny_path("llama")
    expected = expected_texts(path)
    with run_cluster(path, 2) as endpoint:

        def kill():
            busy = [replica for replica in read_health(endpoint)["replicas"] if replica["running"]]
            for replica in busy[:1]:
                os.kill(replica["pid"], signal.SIGKILL)

        replicas = [replica["pid"] for replica in read_health(endpoint)["replicas"]]
        niceness = [os.getpriority(os.PRIO_PROCESS, pid) for pid in (os.getpid(), *replicas)]
        assert len(set(niceness)) == 1 and len(replicas) == 2
        assert read_texts(endpoint, int) == expected
        with pytest.raises(BenchError, match="maximum context length"):  # it got there, 6 MiB long
            ask(endpoint, endpoint.find_model(), "Hi " * 2**21, 1)
        while not read_metrics(endpoint)["draftree_cancelled_total"]:  # it may have been too late
            with suppress(Left):
                read_texts(endpoint, leave)
        first = {replica["name"] for replica in read_health(endpoint)["replicas"]}
        while not read_metrics(endpoint)["draftree_repeats_total"]:  # it may have been too late
            assert read_texts(endpoint, kill) == expected
        wait_for(lambda: len(read_health(endpoint)["replicas"]) == 2)
        assert {replica["name"] for replica in read_health(endpoint)["replicas"]} != first


@needs_package("ray")
def test_a_ray_that_was_too_slow_is_started_again(monkeypatch):
    from draftree.cluster import deploy

    tried = []

    def init(**options):
        tried.append(options)
        if len(tried) < 3:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(deploy.ray, "init", init)
    monkeypatch.setattr(deploy.ray, "shutdown", lambda: tried.append("ended"))
    monkeypatch.setattr(deploy.ray, "cluster_resources", lambda: {"CPU": 2.0})
    assert deploy.connect(None, 2) == {"CPU": 2.0}
    assert tried[0] == tried[2] and tried[1] == "ended" and len(tried) == 3
    tried.clear()
    with pytest.raises(Exception, match="timed out"):  # a cluster of the user's is asked once
        deploy.connect("auto", 2)
    assert len(tried) == 2


def ask_pool(answer, *, leaves=False):
    """What RayPool makes of a call that ends with `answer`; and whether the call was cancelled."""
    from draftree.cluster.connection import ReplyServer
    from draftree.cluster.deploy import RayPool

    cancelled = []

    class Response:
        cancel = staticmethod(lambda: cancelled.append(True))

        def __await__(self):
            return answer().__await__()

    async def run():
        handle = SimpleNamespace(relay=SimpleNamespace(remote=lambda *given: Response()))
        replies = ReplyServer("127.0.0.1")
        async with replies.listen(), aclosing(RayPool(handle, replies).ask(None)) as reply:
            async with asyncio.timeout(0.01 if leaves else None):
                await anext(reply)

    with suppress(TimeoutError):
        asyncio.run(run())
    return cancelled


@needs_package("ray")
def test_calls_that_fail_say_whether_another_replica_may_answer():
    from ray.exceptions import ActorDiedError
    from ray.serve.exceptions import BackPressureError

    from draftree.cluster.message import ReplicaLost, Unavailable

    def failing(error):
        async def answer():
            raise error

        return answer

    cases = {
        ReplicaLost: (ActorDiedError(), asyncio.CancelledError()),
        Unavailable: (BackPressureError(num_queued_requests=1, max_queued_requests=1),),
    }
    for expected, errors in cases.items():
        for error in errors:
            with pytest.raises(expected):
                ask_pool(failing(error))


@needs_package("ray")
def test_a_client_that_leaves_ends_the_call():
    assert ask_pool(asyncio.Event().wait, leaves=True) == [True]


@pytest.mark.long
@needs_package("ray")
def test_nothing_is_lost_while_replicas_die():
    options = ClusterOptions(num_streams=200, num_replicas=4, chaos_s=90.0, kill_s=20.0)
    measures = measure_chaos(tiny_path("llama"), options, print)
    assert measures.num_faults == 0, measures.faults
    assert measures.num_kills >= 3 and measures.num_repeats > 0
    assert measures.num_whole > 200 and measures.num_left > 50


@pytest.mark.long
@needs_package("ray")
def test_replicas_are_replaced_without_a_lost_reply():
    """Other settings for an application that runs: every replica is another one afterwards."""
    from draftree.cluster import deploy
    from draftree.cluster.scale import Scale

    path, scale = tiny_path("llama"), Scale(2, 2, 1)
    engine = Engine.open(str(path), threads=1)
    questions = prepare_questions(engine, "tiny", [f"{number}." for number in range(12)], 200)
    engine.close()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = ("127.0.0.1", port)
    options = deploy.ClusterOptions(str(path), {"threads": 1}, {"model_id": "tiny"})
    endpoint = Endpoint(f"http://127.0.0.1:{port}")
    deploy.connect(None, 4)
    try:
        deploy.start(options, scale, *address)
        before = {replica["name"] for replica in read_health(endpoint)["replicas"]}
        chaos = Chaos(endpoint, questions, 3600.0)
        streams = [threading.Thread(target=chaos.run_stream, args=(n,)) for n in range(10)]
        for stream in streams:
            stream.start()
        try:
            wait_for(lambda: chaos.counts["whole"] > 20)
            renamed = {"model_id": "tiny", "aliases": ["other"]}
            deploy.start(replace(options, server=renamed), scale, *address)
            count = chaos.counts["whole"]
            wait_for(lambda: chaos.counts["whole"] > count + 20)
        finally:
            chaos.end()
            for stream in streams:
                stream.join()
        after = {replica["name"] for replica in read_health(endpoint)["replicas"]}
        assert not chaos.faults, chaos.faults[:3]
        assert len(before) == len(after) == 2 and not before & after
    finally:
        deploy.stop()
