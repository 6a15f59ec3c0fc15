"""Log-probabilities of what a round wrote, for the accepted path only, left in pinned memory.

They are those of decode/sampler.py, taken of the logits after bias, penalties and grammar; the sum
that they are normalised with is added up in another order than on the CPU.
"""

import numpy as np
import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.pass_args import CudaPassArgs
from draftree.kernels.cuda.request import MAX_TOP_K, RequestParams
from draftree.kernels.cuda.sampling import (
    FILES,
    MACROS,
    THREADS,
    WORKSPACE_BYTES,
    SamplingWorkspace,
    check_logits,
)
from draftree.kernels.cuda.tree import MAX_NODES

_ROW_LEN = 1 + 2 * MAX_TOP_K  # of the token, then tokens and log-probabilities of the best
_MACROS = (*MACROS, ("MAX_NODES", MAX_NODES), ("ROW_LEN", _ROW_LEN))


class ScoreRing:
    """The scores of the latest rounds, by the number of their record."""

    def __init__(self, num_records: int, gpu: Gpu) -> None:
        shape = (num_records, MAX_NODES, _ROW_LEN)
        self.records = torch.zeros(shape, dtype=torch.int32, pin_memory=gpu.is_real)
        self._rows: np.ndarray = self.records.numpy()

    def read(
        self, number: int, path_len: int, count: int
    ) -> list[tuple[float, list[tuple[int, float]]]]:
        """The log-probability of each token that a finished round wrote, and the `count` best."""
        rows = self._rows[(number - 1) % len(self._rows), :path_len]
        values = rows.view(np.float32)
        ids, best = rows[:, 1 : 1 + count], values[:, 1 + MAX_TOP_K : 1 + MAX_TOP_K + count]
        tops = zip(ids.tolist(), best.tolist(), strict=True)
        found = zip(values[:, 0].tolist(), tops, strict=True)
        return [(own, list(zip(*top, strict=True))) for own, top in found]


def score_source() -> KernelSource:
    return KernelSource("score_kernel", (*FILES, "score"), _MACROS)


def score(
    logits: torch.Tensor,  # float32 [rows, vocab_size]
    step: CudaPassArgs,
    params: RequestParams,
    ring: ScoreRing,
    workspace: SamplingWorkspace,
    gpu: Gpu,
) -> None:
    """Launched after `accept`, whose path and record it goes by."""
    check_logits(logits, workspace)
    load_kernel(score_source(), gpu).launch(
        (workspace.num_slices, logits.shape[0]),
        THREADS,
        *(logits, step.control, step.tokens, step.path, params.device),
        *(workspace.slices, workspace.weights, workspace.arrived),
        *(ring.records, len(ring.records), logits.stride(0), logits.shape[1]),
        shared_bytes=WORKSPACE_BYTES,
        is_chained=True,
    )
