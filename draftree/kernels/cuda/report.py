"""Measures the GPU kernels and writes one JSON file: python -m draftree.kernels.cuda.report FILE.

The shapes are those of a 27-billion-parameter model, whose matrices are what decoding waits for.
"""

import json
import platform
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from draftree.kernels.cuda.bench import (
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
from draftree.kernels.cuda.compile import Gpu, gpu
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


def measure(device: Gpu) -> Report:
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


def main() -> None:
    path = Path(sys.argv[1])
    path.write_text(json.dumps(asdict(measure(gpu(0))), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
