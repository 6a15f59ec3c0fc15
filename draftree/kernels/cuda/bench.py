"""Times of the matrix products, as records: microseconds a call, bytes a second, share of reading.

Every call of a timed graph reads another copy of the weights, so that no cache answers instead of
the memory.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.layout import PackedMatrix, new_matrix, unit_format
from draftree.kernels.cuda.linear import (
    LinearPlan,
    linear,
    new_activations,
    new_workspace,
    prepare,
)
from draftree.kernels.cuda.pack import repack
from draftree.kernels.cuda.prefill import prefill_linear
from draftree.kernels.cuda.sample import random_raw
from draftree.kernels.quant.formats import QuantType

_ROTATED_BYTES = 512 * 1024 * 1024  # several times any cache
_MOST_COPIES = 64


@dataclass(frozen=True)
class LinearRecord:
    """One product; terabytes_per_s counts the weights' bytes on the device."""

    operation: str
    qtype: str
    num_rows: int
    num_cols: int
    num_tokens: int
    microseconds: float
    terabytes_per_s: float
    share_of_read: float


def time_graph(calls: Sequence[Callable[[], object]], num_replays: int = 15) -> float:
    """Microseconds a call, median over replays of a CUDA graph that holds all of them in a row."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for _ in range(num_replays + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:]) * 1000 / len(calls)


def measure_read(gpu: Gpu, num_bytes: int = 4 * 1024**3) -> float:
    """Terabytes a second when memory is read and nothing else is done."""
    place = gpu.place
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=place).view(torch.int64)
    out = torch.zeros(1, dtype=torch.int32, device=place)
    kernel = load_kernel(KernelSource("read_kernel", ("bits", "read")), gpu)
    half = data.numel() // 2
    parts = data[:half], data[half:]

    blocks, num_vectors = (gpu.num_sms * 8,), half // 2
    micro = time_graph(
        [partial(kernel.launch, blocks, 512, part, out, num_vectors) for part in parts]
    )
    return half * 8 / micro / 1e6


def sample_matrices(qtype: QuantType, num_rows: int, num_cols: int, gpu: Gpu) -> list[PackedMatrix]:
    """As many made-up matrices of one shape as defeat the caches."""
    place = gpu.place
    generator = torch.Generator(place).manual_seed(0)
    raw = random_raw(qtype, num_rows, num_cols, generator)
    first = new_matrix(unit_format(qtype), num_rows, num_cols, gpu)
    repack(raw, qtype, first, 0, gpu)
    num_copies = min(_MOST_COPIES, max(2, -(-_ROTATED_BYTES // first.num_bytes)))
    copies = [first]
    for _ in range(num_copies - 1):
        units, row_scale = first.units.clone(), first.row_scale.clone()
        copies.append(
            PackedMatrix(first.format, num_rows, num_cols, units, row_scale, first.num_blocks)
        )
    torch.cuda.synchronize(gpu.index)
    return copies


def bench_linear(
    matrices: Sequence[PackedMatrix],
    qtype: QuantType,
    token_counts: Sequence[int],
    gpu: Gpu,
    read_terabytes_per_s: float,
    *,
    plan: LinearPlan | None = None,
    is_chained: bool = True,
) -> list[LinearRecord]:
    """One record for each number of tokens; activations are prepared beforehand."""
    num_rows, num_cols = matrices[0].num_rows, matrices[0].num_cols
    place = gpu.place
    workspace = new_workspace(num_rows, max(token_counts), gpu)
    records = []
    for num_tokens in token_counts:
        x = torch.randn((num_tokens, num_cols), device=place)
        out = torch.empty((num_tokens, num_rows), device=place)
        halves = prepare(x, new_activations(num_tokens, num_cols, gpu), gpu)

        calls = [
            partial(linear, matrix, halves, out, workspace, gpu, plan=plan, is_chained=is_chained)
            for matrix in matrices
        ]
        micro = time_graph(calls)
        records.append(
            _record("linear", matrices[0], qtype, num_tokens, micro, read_terabytes_per_s)
        )
    return records


def bench_prepare(num_tokens: int, num_cols: int, gpu: Gpu) -> float:
    """Microseconds to prepare activations."""
    x = torch.randn((num_tokens, num_cols), device=gpu.place)
    into = new_activations(num_tokens, num_cols, gpu)
    return time_graph([partial(prepare, x, into, gpu)] * 50)


def bench_prefill(
    matrices: Sequence[PackedMatrix],
    qtype: QuantType,
    num_tokens: int,
    gpu: Gpu,
    read_terabytes_per_s: float,
) -> LinearRecord:
    matrix = matrices[0]
    place = gpu.place
    x = torch.randn((num_tokens, matrix.num_cols), device=place)
    out = torch.empty((num_tokens, matrix.num_rows), device=place)
    micro = time_graph([partial(prefill_linear, matrix, x, out, gpu)] * 4)
    return _record("prefill", matrix, qtype, num_tokens, micro, read_terabytes_per_s)


def _record(
    operation: str,
    matrix: PackedMatrix,
    qtype: QuantType,
    num_tokens: int,
    micro: float,
    read: float,
) -> LinearRecord:
    speed = matrix.num_bytes / micro / 1e6
    shape = matrix.num_rows, matrix.num_cols, num_tokens
    return LinearRecord(
        operation, qtype.name, *shape, round(micro, 2), round(speed, 3), round(speed / read, 3)
    )
