"""Recorded launches, replayed as CUDA graphs.

A launch is a function of the number of rows that the grid must cover. Passes of few rows are
rounded up to a bucket, and each bucket becomes a graph at its first use; how many rows are live is
read on the device. Longer passes (prefill) are launched one by one, with their exact number.
"""

from collections.abc import Callable, Sequence

import torch

from draftree.kernels.cuda.compile import Gpu
from draftree.kernels.cuda.pass_args import CudaPassArgs

BUCKETS = (8, 16, 24, 32, 48, 64)
MOST_ROWS = BUCKETS[-1]  # passes of more rows than this are prefill
Launch = Callable[[int], None]


def bucket(num_rows: int) -> int:
    """The smallest bucket that holds the rows; beyond the largest, the number itself."""
    return next((size for size in BUCKETS if size >= num_rows), num_rows)


class Program:
    """Launches in order; by_rows: sized by the rows whose logits are wanted, not by the tokens."""

    def __init__(self, step: CudaPassArgs, gpu: Gpu) -> None:
        self.by_rows = False
        self._step, self._gpu = step, gpu
        self._launches: list[Launch] = []
        self._graphs: dict[int, Graph] = {}

    def add(self, launch: Launch) -> None:
        self._launches.append(launch)

    def launch(self, size: int) -> None:
        """All launches for `size` rows, on the current stream."""
        for launch in self._launches:
            launch(size)

    def run(self) -> None:
        """One pass over what the step holds."""
        size = bucket(self._step.num_rows if self.by_rows else self._step.num_tokens)
        if size > MOST_ROWS or not self._gpu.is_real:
            self.launch(size)
            return
        if size not in self._graphs:
            self._graphs[size] = Graph((self,), size)
        self._graphs[size].replay()


class Graph:
    """Programs one after the other as a single CUDA graph, each for its number of rows."""

    def __init__(self, programs: "Sequence[Program]", *sizes: int) -> None:
        self._graph = torch.cuda.CUDAGraph()
        sizes = sizes * len(programs) if len(sizes) == 1 else sizes
        with torch.cuda.graph(self._graph):
            for program, size in zip(programs, sizes, strict=True):
                program.launch(size)

    def replay(self) -> None:
        self._graph.replay()
