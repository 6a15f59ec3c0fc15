"""Random histories of a queue: the wait that it expects beside the wait that comes."""

from hypothesis import given
from hypothesis import strategies as st

from draftree.serve.queue import FairQueue, Job
from tests.examples import examples

LEAST_S, MOST_S = 1.0, 9.0
CLIENTS = st.sampled_from("abc")
PUTS = st.tuples(st.just("put"), CLIENTS)
STEPS = st.one_of(
    *(PUTS, PUTS, PUTS),  # so that many wait
    st.tuples(st.just("drop"), st.integers(0, 30)),
    st.tuples(st.just("pass"), st.floats(0.0, MOST_S)),
)
HISTORIES = st.lists(STEPS, max_size=40)
DURATIONS = st.lists(st.floats(LEAST_S, MOST_S), min_size=1, max_size=20)


class Engine:
    """Runs one job after the other, by a clock of its own. durations_s: repeated as needed."""

    def __init__(self, queue, durations_s):
        self.queue, self.now_s, self.begun_s = queue, 0.0, {}
        self._durations_s, self._end_s, self._running_s = durations_s, 0.0, None

    @property
    def is_busy(self):
        return self._running_s is not None

    def run_until(self, end_s):
        while True:
            if self.is_busy:
                if self._end_s > end_s:
                    break
                self.queue.note_duration(self._running_s)
                self.now_s, self._running_s = self._end_s, None
            job = self.queue.take_ready(lambda job: True)
            if job is None:
                break
            self.begun_s[job] = self.now_s
            self._running_s = self._durations_s[len(self.begun_s) % len(self._durations_s)]
            self._end_s = self.now_s + self._running_s
        self.now_s = max(self.now_s, end_s) if end_s != float("inf") else self.now_s


def play(history, durations_s):
    """A queue and its engine after that history, and the jobs that wait, as they came."""
    queue = FairQueue(1000, 1000)
    engine, jobs = Engine(queue, durations_s), []
    for kind, value in history:
        if kind == "put":
            jobs.append(Job(value, lambda engine: None, None))
            assert queue.put(jobs[-1])
            if not engine.is_busy:
                engine.run_until(engine.now_s)
        elif kind == "drop" and jobs:
            queue.drop(jobs[value % len(jobs)])
        elif kind == "pass":
            engine.run_until(engine.now_s + value)
    return engine, [job for job in jobs if queue.place_of(job)]


def expect(queue, jobs):
    return [queue.expect_wait(queue.place_of(job)) for job in jobs]


@examples(150)
@given(HISTORIES, DURATIONS)
def test_jobs_begin_in_the_order_of_their_places(history, durations_s):
    engine, waiting = play(history, durations_s)
    places = {job: engine.queue.place_of(job) for job in waiting}
    engine.run_until(float("inf"))
    begun = sorted(waiting, key=engine.begun_s.__getitem__)
    assert [places[job] for job in begun] == list(range(1, len(waiting) + 1))


@examples(150)
@given(HISTORIES, st.floats(LEAST_S, MOST_S))
def test_equal_jobs_wait_as_expected_but_for_half_of_one(history, duration_s):
    engine, waiting = play(history, [duration_s])
    engine.queue.note_duration(duration_s)  # one is known
    expected, now_s = expect(engine.queue, waiting), engine.now_s
    engine.run_until(float("inf"))
    for job, wait_s in zip(waiting, expected, strict=True):
        assert abs(engine.begun_s[job] - now_s - wait_s) <= duration_s / 2 + 1e-6


@examples(150)
@given(HISTORIES, DURATIONS)
def test_what_is_expected_lies_between_the_shortest_and_the_longest_job(history, durations_s):
    engine, waiting = play(history, durations_s)
    is_known = len(engine.begun_s) > engine.is_busy  # one has ended
    for job, wait_s in zip(waiting, expect(engine.queue, waiting), strict=True):
        assert (wait_s is not None) is is_known
        if wait_s is not None:
            mean_s = wait_s / (engine.queue.place_of(job) - 0.5)
            assert min(durations_s) - 1e-6 <= mean_s <= max(durations_s) + 1e-6


@examples(150)
@given(HISTORIES, DURATIONS, st.integers(0, 30), CLIENTS)
def test_nobody_waits_longer_for_who_leaves_or_for_a_later_job_of_ones_own(
    history, durations_s, number, client
):
    engine, waiting = play(history, durations_s)
    queue = engine.queue
    queue.note_duration(durations_s[0])
    before = dict(zip(waiting, expect(queue, waiting), strict=True))
    assert queue.put(Job(client, lambda engine: None, None))
    own = [job for job in waiting if job.client == client]
    assert expect(queue, own) == [before[job] for job in own]
    for leaving in waiting[number : number + 1]:
        before = dict(zip(waiting, expect(queue, waiting), strict=True))
        assert queue.drop(leaving)
        others = [job for job in waiting if job is not leaving]
        after = zip(others, expect(queue, others), strict=True)
        assert all(wait_s <= before[job] for job, wait_s in after)
