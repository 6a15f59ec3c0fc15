"""A program: operations recorded once and run for every token, as a CUDA graph is on a GPU.

Recording notes what each operation reads and writes, and puts a barrier only where a later
operation depends on an earlier one. Sizes that change from step to step (number of tokens,
committed length) are read from a control array at run time, so one program serves them all.
"""

import struct

import numpy as np

from draftree.kernels.cpu.kernel import Kernel
from draftree.kernels.cpu.thread_pool import RECORD_WORDS, ThreadPool, new_tickets

Argument = int | float | np.ndarray
_Span = tuple[int, int]


def _span(array: np.ndarray) -> _Span:
    """First and one past the last byte that the array can touch."""
    low, high = np.lib.array_utils.byte_bounds(array)
    return low, high


def _overlap(spans: list[_Span], others: list[_Span]) -> bool:
    return any(a < d and c < b for a, b in spans for c, d in others)


class Program:
    """Operations for one pool. Arrays given as arguments are kept alive and must not move."""

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool
        self._rows: list[list[int] | np.ndarray] = []
        self._names: list[str] = []
        self._alive: list[np.ndarray] = []
        self._reads: list[_Span] = []
        self._writes: list[_Span] = []
        self._frozen: tuple[int, ...] | None = None  # what the pool is given
        self._last_reader: tuple[int, int] | None = None  # its row, and where words are free

    def add(
        self,
        kernel: Kernel,
        *args: Argument,
        reads: tuple[np.ndarray, ...] = (),
        writes: tuple[np.ndarray, ...] = (),
        weights: np.ndarray | None = None,
    ) -> None:
        """Record one operation. Integers go as they are, floats as the bits of a float64, arrays
        as addresses.

        weights: strips that it reads. The operation before that has some gets three more words:
        where these are, bytes of a strip, number of strips.
        """
        words = [kernel.address, int(self._needs_barrier(reads, writes))]
        for arg in args:
            if isinstance(arg, np.ndarray):
                self._alive.append(arg)
                words.append(arg.ctypes.data)
            elif isinstance(arg, float):
                words.append(struct.unpack("<q", struct.pack("<d", arg))[0])
            else:
                words.append(int(arg))
        assert len(words) <= RECORD_WORDS, f"{kernel.name} has too many arguments"
        row = words + [0] * (RECORD_WORDS - len(words))
        if weights is not None:
            if self._last_reader is not None:
                before, place = self._last_reader
                num_strips, strip_bytes = weights.shape
                self._rows[before][place : place + 3] = weights.ctypes.data, strip_bytes, num_strips
            self._last_reader = len(self._rows), len(words)
        self._rows.append(row)
        self._names.append(kernel.name)
        self._frozen = None

    def run(self) -> None:
        self._pool.run(*(self._frozen or self._freeze()))

    def _freeze(self) -> tuple[int, ...]:
        records = np.array(self._rows, dtype=np.int64).reshape(-1, RECORD_WORDS)
        self._rows = list(records)  # numbers take less memory there than as objects
        tickets = new_tickets(len(records), self._pool.num_threads)
        self._arrays = records, tickets
        self._frozen = records.ctypes.data, len(records), tickets.ctypes.data, tickets.size
        return self._frozen

    def _needs_barrier(self, reads: tuple[np.ndarray, ...], writes: tuple[np.ndarray, ...]) -> bool:
        read_spans, write_spans = [_span(a) for a in reads], [_span(a) for a in writes]
        hazard = _overlap(read_spans + write_spans, self._writes) or _overlap(
            write_spans, self._reads
        )
        if hazard:
            self._reads, self._writes = [], []
        self._reads += read_spans
        self._writes += write_spans
        return hazard
