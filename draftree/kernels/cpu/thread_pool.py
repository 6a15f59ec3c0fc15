"""A pool of threads that run a recorded program together, one operation after the other.

Threads are Python threads that spend their lives in compiled code without the interpreter lock.
They spin for about a millisecond after a run, since the next token is usually near, and then
sleep.
"""

import math
import threading

import numpy as np

from draftree.kernels.cpu.arena import lazy_zeros
from draftree.kernels.cpu.atomic import atomic_load, atomic_store, barrier, call_operation, pause
from draftree.kernels.cpu.form import LINE_BYTES
from draftree.kernels.cpu.jit import njit
from draftree.kernels.cpu.kernel import native
from draftree.kernels.cpu.simd import load_i64, store_i64

RECORD_WORDS = 40  # function, needs a barrier before it, then the arguments
FIRST_ARG = 2
_WORD = 8
RECORD_BYTES = RECORD_WORDS * _WORD
_LINE_WORDS = LINE_BYTES // _WORD
_GENERATION, _PROGRAM, _NUM_OPS, _TICKETS, _STOP, _COUNT, _BARRIER = (
    i * LINE_BYTES for i in range(7)
)
_ASLEEP = 7 * LINE_BYTES
_IDLE_SPINS = 10_000


def new_tickets(num_ops: int, num_threads: int) -> np.ndarray:
    """Counters, one for each operation and thread; a line holds those of one thread."""
    shape = -(-num_ops // _LINE_WORDS), num_threads, _LINE_WORDS
    return lazy_zeros(_WORD * math.prod(shape)).view(np.int64).reshape(shape)


@njit
def _walk(control: int, thread: int, pool: int) -> None:
    """Run the published program."""
    program = load_i64(control + _PROGRAM)
    tickets = load_i64(control + _TICKETS)
    for i in range(load_i64(control + _NUM_OPS)):
        record = program + i * RECORD_BYTES
        if load_i64(record + _WORD) != 0:
            barrier(control + _COUNT, control + _BARRIER, pool)
        args = record + FIRST_ARG * _WORD
        ticket = tickets + i // _LINE_WORDS * pool * LINE_BYTES + i % _LINE_WORDS * _WORD
        call_operation(load_i64(record), args, ticket, thread, pool)
    barrier(control + _COUNT, control + _BARRIER, pool)


@native("int int int")
def _run(control: int, thread: int, pool: int) -> None:
    _walk(control, thread, pool)


@native("int int int int -> int")
def _serve(control: int, thread: int, pool: int, seen: int) -> int:
    """Run programs as they are published; return after a while without one."""
    idle = 0
    while idle < _IDLE_SPINS:
        generation = atomic_load(control + _GENERATION)
        if generation == seen:
            idle += 1
            pause()
            continue
        seen = generation
        if atomic_load(control + _STOP) != 0:
            break
        idle = 0
        _walk(control, thread, pool)
    return seen


@native("int int int int int int -> int")
def _publish(
    control: int, program: int, num_ops: int, tickets: int, num_tickets: int, pool: int
) -> int:
    """Returns how many threads are asleep."""
    for i in range(num_tickets):
        store_i64(tickets + i * _WORD, 0)
    atomic_store(control + _PROGRAM, program)
    atomic_store(control + _NUM_OPS, num_ops)
    atomic_store(control + _TICKETS, tickets)
    atomic_store(control + _GENERATION, atomic_load(control + _GENERATION) + 1)
    num_asleep = 0
    for thread in range(1, pool):
        num_asleep += atomic_load(control + _ASLEEP + thread * LINE_BYTES)
    return num_asleep


@native("int int")
def _set_word(address: int, value: int) -> None:
    atomic_store(address, value)


@native("int -> int")
def _get_word(address: int) -> int:
    return atomic_load(address)


class ThreadPool:
    """num_threads threads, the caller being one of them. `run` returns when all are done."""

    def __init__(self, num_threads: int) -> None:
        assert num_threads >= 1
        self.num_threads = num_threads
        words = (7 + num_threads) * _LINE_WORDS
        self._control = np.zeros(words + _LINE_WORDS, dtype=np.int64)
        start = self._control.ctypes.data
        self._address = start + (-start) % LINE_BYTES
        self._lock = threading.Lock()
        self._wake = [threading.Semaphore(0) for _ in range(num_threads)]
        for thread in range(1, num_threads):
            name = f"draftree-{thread}"
            threading.Thread(target=self._work, args=(thread,), name=name, daemon=True).start()

    def run(self, program: int, num_ops: int, tickets: int, num_tickets: int) -> None:
        """Addresses of records [num_ops, RECORD_WORDS] and of `new_tickets`, set to zero here."""
        with self._lock:
            if _get_word(self._address + _STOP):
                raise RuntimeError("the threads have ended")
            if _publish(self._address, program, num_ops, tickets, num_tickets, self.num_threads):
                for thread in range(1, self.num_threads):
                    if _get_word(self._address + _ASLEEP + thread * LINE_BYTES):
                        self._wake[thread].release()
            _run(self._address, 0, self.num_threads)

    def close(self) -> None:
        with self._lock:
            _set_word(self._address + _STOP, 1)
            _publish(self._address, 0, 0, 0, 0, self.num_threads)
            for semaphore in self._wake:
                semaphore.release()

    def _work(self, thread: int) -> None:
        seen = 0
        asleep = self._address + _ASLEEP + thread * LINE_BYTES
        while True:
            seen = _serve(self._address, thread, self.num_threads, seen)
            if _get_word(self._address + _STOP):
                return
            _set_word(asleep, 1)
            if _get_word(self._address + _GENERATION) == seen:
                self._wake[thread].acquire()
            _set_word(asleep, 0)
