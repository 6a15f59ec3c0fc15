"""Measures the GPU kernels: matrix products by format, shape and tokens, and whole passes.

The shapes are those of a 27-billion-parameter model, whose matrices are what decoding waits for.
"""

import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version

import torch

from benchmarks.gpu_product import (
    LinearRecord,
    PassRecord,
    SamplePass,
    bench_linear,
    bench_pass,
    bench_prefill,
    bench_prepare,
    measure_read,
    sample_matrices,
)
from draftree.kernels.cuda.compile import gpu
from draftree.kernels.quant.formats import QuantType

TOKEN_COUNTS = (1, 2, 8, 16, 24, 32, 48, 64)
SHAPES = (
    (QuantType.Q4_K, 34816, 5120),
    (QuantType.Q4_K, 17408, 5120),
    (QuantType.Q4_K, 5120, 17408),
    (QuantType.Q4_K, 5120, 6144),
    (QuantType.Q4_K, 14336, 5120),
    (QuantType.Q5_K, 16480, 5120),
    (QuantType.Q6_K, 5120, 17408),
    (QuantType.Q6_K, 248320, 5120),
    (QuantType.Q8_0, 17408, 5120),
    (QuantType.Q4_0, 17408, 5120),
    (QuantType.Q4_1, 17408, 5120),
    (QuantType.Q5_0, 17408, 5120),
    (QuantType.BF16, 17408, 5120),
)
PREFILL_SHAPES = ((QuantType.Q4_K, 34816, 5120), (QuantType.Q4_K, 5120, 17408))
PREFILL_TOKENS = (128, 512, 2048)
PASS_LAYERS = 64
PREPARE_SHAPES = ((1, 5120), (24, 5120), (24, 17408))


@dataclass(frozen=True)
class PrepareRecord:
    num_tokens: int
    num_cols: int
    microseconds: float


@dataclass(frozen=True)
class Report:
    """All measurements of one run on one device."""

    timestamp: str
    device: str
    num_sms: int
    versions: dict[str, str]
    read_terabytes_per_s: float
    prepare: list[PrepareRecord]
    linear: list[LinearRecord]
    passes: list[PassRecord]


def measure_kernels() -> Report:
    device = gpu(0)
    read = measure_read(device)
    records = []
    for qtype, num_rows, num_cols in SHAPES:
        matrices = sample_matrices(qtype, num_rows, num_cols, device)
        records += bench_linear(matrices, qtype, TOKEN_COUNTS, device, read)
        if (qtype, num_rows, num_cols) in PREFILL_SHAPES:
            for num_tokens in PREFILL_TOKENS:
                records.append(bench_prefill(matrices, qtype, num_tokens, device, read))
        del matrices
    prepared = [
        PrepareRecord(tokens, cols, round(bench_prepare(tokens, cols, device), 2))
        for tokens, cols in PREPARE_SHAPES
    ]
    sample = SamplePass(PASS_LAYERS, device)
    passes = [bench_pass(sample, num_tokens, device) for num_tokens in TOKEN_COUNTS]
    versions = {name: version(name) for name in ("torch", "cuda-core", "cuda-bindings")}
    return Report(
        timestamp=datetime.now(UTC).isoformat(timespec="seconds"),
        device=torch.cuda.get_device_name(device.index),
        num_sms=device.num_sms,
        versions={"python": platform.python_version(), **versions},
        read_terabytes_per_s=round(read, 3),
        prepare=prepared,
        linear=records,
        passes=passes,
    )
