"""Jobs between two threads, and a queue that is fair and bounded."""

import asyncio
import threading
import time

import pytest

from draftree.core import FinishReason, Usage
from draftree.serve.queue import FairQueue, Job
from draftree.serve.wire import ApiError
from tests.serve.fake import Delta, Score

TEXT, MORE = Delta("text"), Delta("more")


def job(client="a"):
    return Job(client, lambda engine: None, None)


def names(queue, count):
    return "".join(queue.take().client for _ in range(count))


def test_clients_take_turns():
    queue = FairQueue(100, 100)
    for client in "aaaabbc":
        queue.put(job(client))
    assert names(queue, 3) == "abc"
    queue.put(job("d"))
    assert names(queue, 5) == "abdaa"


def test_places_are_those_of_the_turns_to_come():
    queue = FairQueue(100, 100)
    jobs = [job(client) for client in "aabbbc"]
    for each in jobs:
        queue.put(each)
    places = {each: queue.place_of(each) for each in jobs}
    assert [queue.place_of(job("a")), *sorted(places.values())] == [0, 1, 2, 3, 4, 5, 6]
    assert [places[queue.take()] for _ in jobs] == [1, 2, 3, 4, 5, 6]


def test_jobs_that_may_not_begin_yet_are_passed_over():
    queue = FairQueue(100, 100)
    group = object()
    jobs = [Job("a", lambda engine: None, None, group=group) for _ in range(2)]
    other = job("a")
    for each in (*jobs, other):
        queue.put(each)

    def is_ready(job):
        return job.group is not group

    assert queue.take() is jobs[0]
    assert queue.has_ready(is_ready) and queue.take_ready(is_ready) is other
    assert not queue.has_ready(is_ready) and queue.take_ready(is_ready) is None
    assert queue.has_ready(lambda job: True) and queue.take() is jobs[1]


def test_a_job_begins_again_unless_its_reader_has_some_of_it():
    for is_stream in (True, False):
        reply = Job("a", lambda engine: None, None, is_stream=is_stream)
        assert reply.restart()
        reply.push(TEXT)
        assert reply.restart() is not is_stream


def test_a_client_keeps_its_own_order():
    queue = FairQueue(10, 10)
    jobs = [job() for _ in range(4)]
    for each in jobs:
        queue.put(each)
    assert [queue.take() for _ in jobs] == jobs


def test_own_share_is_429_and_the_whole_queue_503():
    queue = FairQueue(max_jobs=4, max_per_client=3)
    queue.admit("a", 2)
    with pytest.raises(ApiError) as own:
        queue.admit("a", 2)
    queue.admit("a", 1)
    with pytest.raises(ApiError) as whole:
        queue.admit("b", 2)
    assert (own.value.status, whole.value.status) == (429, 503)
    assert own.value.retry_after >= 1 and whole.value.retry_after >= 1
    queue.release("a")
    queue.admit("b", 2)
    assert queue.num_admitted == 4


def test_retry_after_grows_with_what_requests_take():
    queue = FairQueue(10, 10)
    for _ in range(50):
        queue.note_duration(8.0)
    queue.admit("a", 10)
    with pytest.raises(ApiError) as caught:
        queue.admit("b", 1)
    assert 30 <= caught.value.retry_after <= 60


def test_the_wait_grows_with_the_place_and_what_requests_take():
    queue = FairQueue(10, 10)
    assert queue.expect_wait(3) is None  # nothing has run yet
    queue.note_duration(4.0)
    assert [queue.expect_wait(place) for place in (0, 1, 2)] == [0, 2, 6]
    queue.note_duration(9.0)
    assert queue.expect_wait(1) == 2.5


def test_dropped_jobs_are_not_taken():
    queue = FairQueue(10, 10)
    first, second = job(), job()
    queue.put(first)
    queue.put(second)
    assert queue.drop(first)
    assert not queue.drop(first)
    assert queue.take() is second
    assert queue.num_waiting == 0


def test_closing_wakes_who_waits_and_returns_what_waited():
    queue = FairQueue(10, 10)
    taken = []
    thread = threading.Thread(target=lambda: taken.append(queue.take()))
    thread.start()
    assert queue.close() == []
    thread.join(120)
    assert taken == [None]
    assert not queue.put(job())
    full = FairQueue(10, 10)
    waiting = job()
    full.put(waiting)
    assert full.close() == [waiting]


def read_all(write):
    """What a reader gets while write(job) runs in another thread."""

    async def run():
        reply = Job("a", lambda engine: None, asyncio.get_running_loop())
        thread = threading.Thread(target=write, args=(reply,))
        thread.start()
        batches = []
        while batch := await asyncio.wait_for(reply.read(), 120):
            batches.append(batch)
        thread.join()
        return batches

    return asyncio.run(run())


def test_nothing_is_lost_between_threads():
    def write(reply):
        for number in range(20_000):
            reply.push(Delta(number))
            reply.flush()
        reply.finish(Usage(), FinishReason.STOP)

    batches = read_all(write)
    assert [delta.text for batch in batches for delta in batch] == list(range(20_000))


def test_the_tokens_of_a_round_come_together():
    def write(reply):
        for _ in range(10):
            for number in range(8):
                reply.push(Delta(number))
                time.sleep(0.001)
            reply.flush()
            time.sleep(0.03)
        reply.finish(Usage(), FinishReason.STOP)

    assert len(read_all(write)) <= 11  # the first may be seen half written


def test_a_reply_in_one_piece_wakes_its_reader_once():
    def write(reply):
        reply.is_stream = False
        for number in range(8):
            reply.push(Delta(number))
            reply.flush()
            time.sleep(0.005)
        reply.finish(Usage(), FinishReason.STOP)

    assert len(read_all(write)) <= 2


def test_rounds_of_a_frame_wake_nobody():
    """Only the first round and the end do; all between is taken by a timer, whole."""

    async def run():
        loop, wakes = asyncio.get_running_loop(), []
        call = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *arguments: wakes.append(call(*arguments))
        reply, shown = Job("a", lambda engine: None, loop), []
        reading = asyncio.create_task(reply.read())
        await asyncio.sleep(0)
        reply.push(TEXT)
        reply.flush()
        assert (await reading, len(wakes)) == ([TEXT], 1)
        reading = asyncio.create_task(reply.read(lambda: shown.append(reply.take()) or True))
        await asyncio.sleep(0)
        for _ in range(10):
            reply.push(TEXT)
            reply.push(MORE)
            reply.flush()
        reply.push(TEXT)  # of a round that is not complete
        while not shown:
            await asyncio.sleep(0.005)
        assert (shown, len(wakes)) == ([[TEXT, MORE] * 10], 1)
        reply.finish(Usage(), FinishReason.STOP)
        assert (await reading, len(wakes)) == ([TEXT], 2)

    asyncio.run(run())


def test_a_reader_that_is_needed_is_woken():
    async def run(show):
        reply = Job("a", lambda engine: None, asyncio.get_running_loop())
        for delta in (TEXT, MORE):
            reply.push(delta)
            reply.flush()
            if delta is TEXT:
                assert await reply.read() == [TEXT]
        reading = asyncio.create_task(reply.read(show))
        return await asyncio.wait_for(reading, 120)

    assert asyncio.run(run(lambda: False)) == [MORE]
    assert asyncio.run(run(None)) == [MORE]
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run(lambda: 1 / 0))


@pytest.mark.parametrize("is_stream", [True, False])
def test_the_first_token_counts_when_it_is_sent(is_stream):
    """A stream sends it when it is taken, a reply in one piece with the last one."""

    async def run():
        reply = Job("a", lambda engine: None, asyncio.get_running_loop(), is_stream=is_stream)
        reply.push(Delta("a"))
        reply.flush()
        computed_s = time.perf_counter()
        assert reply.first_s is None
        if is_stream:
            await reply.read()
            assert reply.first_s >= computed_s
        reply.push(Delta("b"))
        ended_s = time.perf_counter()
        reply.finish(Usage(), FinishReason.STOP)
        await reply.read()
        assert (reply.first_s >= ended_s) is not is_stream

    asyncio.run(run())


def test_the_end_is_recorded_after_it_was_read():
    async def run():
        order = []
        loop = asyncio.get_running_loop()
        reply = Job("a", lambda engine: None, loop, lambda job: order.append("recorded"))

        async def read():
            order.append(await reply.read())

        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        reply.finish(Usage(), FinishReason.STOP)
        await reading
        await asyncio.sleep(0)
        assert order == [[], "recorded"]

    asyncio.run(run())


def test_error_comes_after_what_was_written():
    async def run():
        reply = Job("a", lambda engine: None, asyncio.get_running_loop())
        reply.push(TEXT)
        reply.fail(ApiError(500, "broken"))
        assert await reply.read() == [TEXT]
        with pytest.raises(ApiError, match="broken"):
            await reply.read()

    asyncio.run(run())


def test_a_reader_that_gives_up_waiting_loses_nothing():
    async def run():
        reply = Job("a", lambda engine: None, asyncio.get_running_loop())
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await reply.read()
        reply.push(TEXT)
        reply.flush()
        assert await asyncio.wait_for(reply.read(), 120) == [TEXT]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await reply.read()
        reply.push(MORE)
        reply.flush()
        assert await asyncio.wait_for(reply.read(), 120) == [MORE]

    asyncio.run(run())


def test_a_job_is_prepared_once_for_an_engine():
    prepared = []
    each = Job("a", lambda engine: prepared.append(engine) or engine, None)
    assert [each.prepare("x"), each.prepare("x"), each.prepare("y")] == ["x", "x", "y"]
    queue = FairQueue(1, 1)
    queue.put(each)
    queue.forget_engine()
    assert each.prepare("y") == "y"
    assert prepared == ["x", "y", "y"]


@pytest.mark.parametrize(
    ("delta", "most"),
    [(TEXT, 32_768), (Delta("a", logprobs=(Score(1, b"a", 0.0, (1, 2, 3)),)), 6_554)],
)
def test_a_reader_may_not_be_far_behind(delta, most):
    async def run():
        reply = Job("a", lambda engine: None, asyncio.get_running_loop())
        for _ in range(3):  # reading makes room
            for _ in range(5000):
                assert reply.push(delta)
            reply.flush()
            await reply.read()
        num_pushed = 1
        while reply.push(delta):
            num_pushed += 1
        reply.finish(Usage(), FinishReason.CANCELLED)
        assert num_pushed == len(await reply.read()) <= most + 1
        with pytest.raises(ApiError, match="not read as fast") as caught:
            await reply.read()
        assert caught.value.code == "reader_too_slow"

    asyncio.run(run())


def test_a_reply_in_one_piece_may_be_long():
    reply = Job("a", lambda engine: None, None, is_stream=False)
    assert all(reply.push(TEXT) for _ in range(40_000))
