"""A pool runs programs, whether its threads are awake or have gone to sleep."""

import time

import numpy as np
import pytest

from draftree.kernels.cpu.pass_args import PassArgs
from draftree.kernels.cpu.program import Program
from draftree.kernels.cpu.thread_pool import ThreadPool
from tests.kernels.passes import record_add


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_team_wakes_up(num_threads: int) -> None:
    pool, step = ThreadPool(num_threads), PassArgs(8, 1)
    step.set_chain(range(8), 0)
    total, one = np.zeros((8, 64), np.float32), np.ones((8, 64), np.float32)
    program = Program(pool)
    record_add(program, step, total, one)
    for pause_s in (0.0, 0.0, 0.1, 0.0, 0.1):
        time.sleep(pause_s)
        program.run()
    assert np.all(total == 5.0)
    pool.close()


def test_what_is_added_after_a_run_is_run_too() -> None:
    pool, step = ThreadPool(1), PassArgs(4, 1)
    step.set_chain((3, 1), 0)
    total, one = np.zeros((4, 16), np.float32), np.ones((4, 16), np.float32)
    program = Program(pool)
    record_add(program, step, total, one)
    program.run()
    record_add(program, step, total, one)
    program.run()
    assert np.all(total[:2] == 3.0) and np.all(total[2:] == 0.0)
