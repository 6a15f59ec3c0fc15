"""Times of the matrix products, as records: microseconds a call, bytes a second, share of reading.

Every call of a timed graph reads another copy of the weights, so that no cache answers instead of
the memory. `bench_pass` times all products of a pass with the small kernels between them, which is
what decoding waits for.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.random_raw import random_raw
from draftree.kernels.cuda import layout, prepare
from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.linear import LinearPlan, linear, new_workspace
from draftree.kernels.cuda.pack import repack
from draftree.kernels.cuda.prefill import prefill_linear, prepare_rows
from draftree.kernels.quant.formats import QuantType

_ROTATED_BYTES = 512 * 1024 * 1024  # several times any cache
_MOST_COPIES = 64
_MOST_TOKENS = 64  # activations have room for this many, as in the engine


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


def sample_matrices(
    qtype: QuantType, num_rows: int, num_cols: int, gpu: Gpu, num_copies: int = 0
) -> list[layout.PackedMatrix]:
    """As many synthetic matrices of one shape as defeat the caches, or num_copies."""
    generator = torch.Generator(gpu.place).manual_seed(0)
    raw = random_raw(qtype, num_rows, num_cols, generator)
    first = layout.new_matrix(layout.unit_format(qtype), num_rows, num_cols, gpu)
    repack(raw, qtype, first, 0, gpu)
    if not num_copies:
        num_copies = min(_MOST_COPIES, max(2, -(-_ROTATED_BYTES // first.num_bytes)))
    copies = [replace(first, units=first.units.clone()) for _ in range(num_copies - 1)]
    torch.cuda.synchronize(gpu.index)
    return [first, *copies]


def bench_linear(
    matrices: Sequence[layout.PackedMatrix],
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
    workspace = new_workspace(max(token_counts), gpu)
    records = []
    for num_tokens in token_counts:
        x = torch.randn((num_tokens, num_cols), device=place)
        out = torch.empty((num_tokens, num_rows), device=place)
        halves = prepare.prepare(
            prepare.plain(x), layout.new_activations(_MOST_TOKENS, num_cols, gpu), gpu
        )
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
    into = layout.new_activations(_MOST_TOKENS, num_cols, gpu)
    return time_graph([partial(prepare.prepare, prepare.plain(x), into, gpu)] * 50)


def bench_prefill(
    matrices: Sequence[layout.PackedMatrix],
    qtype: QuantType,
    num_tokens: int,
    gpu: Gpu,
    read_terabytes_per_s: float,
) -> LinearRecord:
    """Rows are prepared beforehand."""
    matrix = matrices[0]
    rows = prepare_rows(torch.randn((num_tokens, matrix.num_cols), device=gpu.place), gpu)
    out = torch.empty((num_tokens, matrix.num_rows), device=gpu.place)
    micro = time_graph([partial(prefill_linear, matrix, rows, out, gpu)] * 4)
    return _record("prefill", matrix, qtype, num_tokens, micro, read_terabytes_per_s)


@dataclass(frozen=True)
class PassRecord:
    """All products of a pass over layers of a hybrid 27-billion-parameter model, and its head."""

    num_layers: int
    num_tokens: int
    milliseconds: float
    small_milliseconds: float  # the small kernels between the products, without those
    gigabytes: float


class SamplePass:
    """Synthetic weights for a pass: per layer stacked inputs, an output, a gated pair, a way down.

    What mixes tokens, between a layer's first two products, is left out.
    """

    def __init__(self, num_layers: int, gpu: Gpu) -> None:
        def made(
            qtype: QuantType, num_rows: int, num_cols: int, every: int = 1, first: int = 0
        ) -> Iterator[layout.PackedMatrix]:
            count = len(range(first, num_layers, every))
            return iter(sample_matrices(qtype, num_rows, num_cols, gpu, count) if count else [])

        q4, q5, q6 = QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K
        delta, attention = made(q5, 16480, 5120), made(q4, 14336, 5120, 4, 3)
        outs, gates = made(q4, 5120, 6144), made(q4, 34816, 5120)
        downs = made(q4, 5120, 17408, 2), made(q6, 5120, 17408, 2, 1)
        self.layers = [
            (next(attention if i % 4 == 3 else delta), next(outs), next(gates), next(downs[i % 2]))
            for i in range(num_layers)
        ]
        self.head = sample_matrices(q6, 248320, 5120, gpu, 1)[0]

    @property
    def matrices(self) -> list[layout.PackedMatrix]:
        return [*(matrix for layer in self.layers for matrix in layer), self.head]


def bench_pass(sample: SamplePass, num_tokens: int, gpu: Gpu) -> PassRecord:
    workspace = new_workspace(num_tokens, gpu)
    wide, mixed, narrow = (
        layout.new_activations(_MOST_TOKENS, n, gpu) for n in (5120, 6144, 17408)
    )
    widths = (5120, 6144, 16480, 34816, 248320)
    rows = [torch.randn((num_tokens, n), device=gpu.place) for n in widths]
    residual, mix, inputs, gate, logits = rows
    norm, head_norm = torch.ones(5120, device=gpu.place), torch.ones(128, device=gpu.place)

    def run(*, use_products: bool) -> None:
        def multiply(
            matrix: layout.PackedMatrix,
            x: layout.Activations,
            out: torch.Tensor,
            add_to: bool = False,
        ) -> None:
            if use_products:
                linear(matrix, x, out, workspace, gpu, add_to=add_to)

        for first, out, pair, down in sample.layers:
            prepare.prepare(prepare.norm(residual, norm, 1e-6), wide, gpu)
            multiply(first, wide, inputs[:, : first.num_rows])
            prepare.prepare(prepare.gated_norm(mix, inputs[:, :6144], head_norm, 1e-6), mixed, gpu)
            multiply(out, mixed, residual, add_to=True)
            prepare.prepare(prepare.norm(residual, norm, 1e-6), wide, gpu)
            multiply(pair, wide, gate)
            prepare.prepare(prepare.silu_mul(gate[:, :17408], gate[:, 17408:]), narrow, gpu)
            multiply(down, narrow, residual, add_to=True)
        prepare.prepare(prepare.norm(residual, norm, 1e-6), wide, gpu)
        multiply(sample.head, wide, logits)

    whole, small = (time_graph([partial(run, use_products=use)] * 2) for use in (True, False))
    num_bytes = sum(matrix.num_bytes for matrix in sample.matrices)
    shape = len(sample.layers), num_tokens
    return PassRecord(
        *shape, round(whole / 1000, 3), round(small / 1000, 3), round(num_bytes / 1e9, 3)
    )


def _record(
    operation: str,
    matrix: layout.PackedMatrix,
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
