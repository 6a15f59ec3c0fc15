"""Launches that were captured once as a CUDA graph and are replayed, and the time between them.

Where there is no real GPU, launches just run, and no time is known.
"""

import gc
from collections.abc import Callable

import torch

from draftree.kernels.cuda.compile import Gpu
from draftree.kernels.cuda.persistent import collect


class LaunchGraph:
    """A run over nothing, which the caller has prepared for, loads the kernels first."""

    def __init__(
        self, launch: Callable[[], None], gpu: Gpu, *, is_persistent: bool = False
    ) -> None:
        """is_persistent: the launches become one kernel."""
        one = collect(launch, gpu) if is_persistent else None
        launch = launch if one is None else one.launch
        self.run = launch
        if gpu.is_real:
            launch()
            # Kept alone: with the launches, which know their owner, it would wait for the garbage
            # collector, and a graph that is freed while another one is captured breaks the capture.
            self.run = capture(launch).replay


def capture(
    launch: Callable[[], None], before: torch.cuda.CUDAGraph | None = None
) -> torch.cuda.CUDAGraph:
    """The launches as a graph; nothing runs yet. before: a graph of the same owner, whose memory
    for what launches need while they run can be used again. Other threads may use the GPU.
    """
    graph = torch.cuda.CUDAGraph()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        pool = before.pool() if before else None
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            launch()
    finally:
        if was_enabled:
            gc.enable()
    return graph


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
