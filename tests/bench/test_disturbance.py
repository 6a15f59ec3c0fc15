"""What others took of the machine's time."""

import time

import pytest

from draftree.bench.disturbance import Look, foreign_share, look


def test_time_of_others_is_what_is_neither_ours_nor_idle():
    before, after = Look(10.0, 100.0, 5.0), Look(20.0, 116.0, 13.0)
    assert foreign_share(before, after, num_cores=2) == pytest.approx(0.4)


def test_rounding_of_the_counters_is_never_below_nothing():
    assert foreign_share(Look(0.0, 0.0, 0.0), Look(1.0, 0.5, 0.6), 2) == 0.0


def test_no_counters_no_answer():
    assert foreign_share(None, Look(1.0, 0.0, 0.0), 2) is None


def test_looks_move_on():
    before = look()
    if before is None:
        pytest.skip("system: it has no counters of busy time")
    end = time.process_time() + 0.1  # of our own, however little others leave
    while time.process_time() < end:
        pass
    after = look()
    assert after.own - before.own >= 0.05
    assert after.busy >= before.busy
