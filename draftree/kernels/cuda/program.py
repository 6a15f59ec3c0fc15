"""Recorded launches, replayed as CUDA graphs.

A launch is a function of the number of rows that the grid must cover; how many rows are live is
read on the device. The rows of a pass are rounded up to one of few sizes. Each size becomes a
graph: one of few rows at its first use, a longer one (prefill) at its second.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch

from draftree.kernels.cuda.compile import Gpu
from draftree.kernels.cuda.graph import capture
from draftree.kernels.cuda.pass_args import CudaPassArgs
from draftree.kernels.cuda.persistent import PersistentPass, collect

_FEWEST = 4  # launches that are worth a kernel of their own
BUCKETS = (1, 8, 16, 24, 32, 48, 64)
MOST_ROWS = BUCKETS[-1]  # passes of more rows than this are prefill
LONG_SIZES = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
Launch = Callable[[int], None]


def bucket(num_rows: int) -> int:
    """The smallest size that holds the rows."""
    return next((size for size in (*BUCKETS, *LONG_SIZES) if size >= num_rows), num_rows)


@dataclass(frozen=True)
class _Recorded:
    launch: Launch
    is_host_sized: bool


class Program:
    """Launches in order; by_rows: sized by the rows whose logits are wanted, not by the tokens."""

    def __init__(self, step: CudaPassArgs, gpu: Gpu, *, is_persistent: bool = False) -> None:
        """is_persistent: short passes are one kernel each (persistent.py)."""
        self.by_rows = False
        self._step, self._gpu, self._is_persistent = step, gpu, is_persistent
        self._persistent: dict[int, PersistentPass | None] = {}
        self._recorded: list[_Recorded] = []
        self._graphs: dict[int, Callable[[], None]] = {}
        self._first_long: torch.cuda.CUDAGraph | None = None
        self._long: dict[tuple[int, bool], list[Callable[[], None]]] = {}
        self._first_uses: set[tuple[int, bool, int]] = set()

    def add(self, launch: Launch, *, is_host_sized: bool = False) -> None:
        """is_host_sized: in long passes that follow others, it is launched for numbers that the
        host knows, and cannot be part of a graph.
        """
        self._recorded.append(_Recorded(launch, is_host_sized))

    def launch(self, size: int) -> None:
        """All launches for `size` rows, on the current stream."""
        one = None if self._gpu.rehearsal.is_on else self._as_one(size)
        if one is not None:
            one.launch()
        else:
            self._launch_each(size)

    def _launch_each(self, size: int) -> None:
        for recorded in self._recorded:
            recorded.launch(size)

    def find_persistent(self, size: int) -> PersistentPass | None:
        """The pass of so many rows as one kernel, where it has run as one."""
        return self._persistent.get(size)

    def _as_one(self, size: int) -> PersistentPass | None:
        """The pass as one kernel, where it is to be one and can be."""
        if not self._is_persistent or size > MOST_ROWS or len(self._recorded) < _FEWEST:
            return None
        if size not in self._persistent:
            self._persistent[size] = collect(partial(self._launch_each, size), self._gpu)
        return self._persistent[size]

    def run(self) -> None:
        """One pass over what the step holds."""
        size = bucket(self._step.num_rows if self.by_rows else self._step.num_tokens)
        size = min(size, self._step.max_tokens)
        if not self._gpu.is_real or self._gpu.rehearsal.is_on:
            self.launch(size)
        elif size > MOST_ROWS:
            self._run_long(size)
        else:
            if size not in self._graphs:
                self._as_one(size)  # what it needs cannot be made while a graph is captured
                self._graphs[size] = capture(partial(self.launch, size)).replay
            self._graphs[size]()

    def _run_long(self, size: int) -> None:
        """The first pass of a size in a thread is launched one by one: libraries look for their
        best kernels then, and make what each thread has of its own, which they may not do while a
        graph is captured.
        """
        key = size, self._step.committed == 0 and not self._step.sinks  # which the host counts
        use = *key, threading.get_ident()
        if key in self._long:
            for run in self._long[key]:
                run()
        elif use in self._first_uses:
            self._long[key] = self._capture(size, is_whole=key[1])
            self._run_long(size)
        else:
            self.launch(size)
            self._first_uses.add(use)
            if self._gpu.rehearsal.is_warming:
                self._long[key] = self._capture(size, is_whole=key[1])

    def _capture(self, size: int, *, is_whole: bool) -> list[Callable[[], None]]:
        """Graphs, and what is launched between them."""
        runs: list[Callable[[], None]] = []
        for is_apart, group in groupby(self._recorded, lambda r: r.is_host_sized and not is_whole):
            launches = [partial(recorded.launch, size) for recorded in group]
            if is_apart:
                runs += launches
            else:
                # All long passes share one graph's memory: none leaves anything in it.
                graph = capture(partial(_run_all, launches), self._first_long)
                self._first_long = self._first_long or graph
                runs.append(graph.replay)
        return runs


def _run_all(launches: Sequence[Callable[[], None]]) -> None:
    for launch in launches:
        launch()
