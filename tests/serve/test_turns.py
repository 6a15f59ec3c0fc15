"""Who runs next and for how long, on a clock that stands still."""

from draftree.serve.queue import Job
from draftree.serve.turns import SLICE_S, Turns


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def job(name):
    return Job(name, lambda engine: None, None)


def run(turns, count, is_finished=lambda name: False):
    names = ""
    for _ in range(count):
        name = turns.begin().client
        names += name
        turns.end(is_finished=is_finished(name))
    return names


def test_everyone_has_a_turn():
    turns = Turns()
    for name in "abc":
        turns.add(job(name))
    assert sorted(run(turns, 3)) == ["a", "b", "c"]
    later = run(turns, 9)
    assert later == later[:3] * 3 and set(later) == set("abc")


def test_a_newcomer_is_next():
    turns = Turns()
    turns.add(job("a"))
    assert run(turns, 1) == "a"
    turns.add(job("b"))
    assert run(turns, 4) == "baba"


def test_newcomers_starve_nobody():
    turns, names = Turns(), ""
    for name in "AB":
        turns.add(job(name))
    run(turns, 2)
    for _ in range(20):
        for _ in range(3):
            turns.add(job("x"))
        names += run(turns, 1, is_finished="x".__eq__)
    assert names == ("xxxAxxxB" * 3)[1:21]


def test_a_slice_ends_with_its_time_and_grows_with_what_a_change_takes():
    clock = Clock()
    turns = Turns(clock=clock)
    turns.add(job("a"))
    turns.begin()
    assert not turns.is_over(0.0)
    clock.now_s = SLICE_S
    assert turns.is_over(0.0) and turns.is_over(0.01) and not turns.is_over(0.1)
    clock.now_s = 2.0
    assert turns.is_over(0.1)
    assert turns.end(is_finished=False) == 2.0


def test_a_newcomer_waits_for_a_short_slice():
    clock = Clock()
    turns = Turns(clock=clock)
    turns.add(job("a"))
    turns.begin()
    assert not turns.has_fresh and not turns.is_over(0.0, is_awaited=True)
    turns.add(job("b"))
    clock.now_s = SLICE_S / 5
    assert turns.has_fresh and turns.is_over(0.0, is_awaited=True) and not turns.is_over(0.0)
    assert not turns.is_over(0.02, is_awaited=True), "changing would take too large a share"


def test_what_was_cancelled_goes_first():
    turns = Turns()
    jobs = [job(name) for name in "abc"]
    for each in jobs:
        turns.add(each)
    run(turns, 3)
    jobs[2].is_cancelled = True
    assert turns.begin() is jobs[2]
    turns.end(is_finished=True)
    assert turns.jobs == turns.preempted and len(turns.preempted) == 2


def test_what_is_live_is_told():
    turns = Turns()
    assert turns.jobs == [] and not turns.has_others
    jobs = [job(name) for name in "abc"]
    for each in jobs[:2]:
        turns.add(each)
    assert turns.begin() is jobs[0] and turns.has_others
    assert (turns.running, turns.jobs, turns.preempted) == (jobs[0], jobs[:2], [])
    turns.end(is_finished=False)
    turns.add(jobs[2])
    assert (turns.running, turns.preempted) == (None, [jobs[0]])
    assert {*turns.clear()} == {*jobs} and turns.jobs == []
