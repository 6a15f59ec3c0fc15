"""Launches that were captured once as a CUDA graph and are replayed, and the time between them.

Where there is no real GPU, launches just run, and no time is known.
"""

from collections.abc import Callable

import torch

from draftree.kernels.cuda.compile import Gpu


class LaunchGraph:
    """A run over nothing, which the caller has prepared for, loads the kernels first."""

    def __init__(self, launch: Callable[[], None], gpu: Gpu) -> None:
        self._launch = launch
        self._graph: torch.cuda.CUDAGraph | None = None
        if gpu.is_real:
            launch()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                launch()

    def run(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self._launch()


class Timestamp:
    """A moment on the stream."""

    def __init__(self, gpu: Gpu) -> None:
        self._event: torch.cuda.Event | None = None
        if gpu.is_real:
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def wait_since(self, earlier: "Timestamp") -> float:
        """Wait for it; milliseconds since an earlier one, 0 where no time is known."""
        if self._event is None or earlier._event is None:
            return 0.0
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event)
