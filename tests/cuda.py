"""Targets and drafts on a GPU, real or emulated, for tests."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from draftree.drafts.dflash import BlockDrafter
from draftree.drafts.dflash_model import load_draft
from draftree.kernels.cuda.compile import Gpu
from draftree.kernels.cuda.ops import CudaOps
from draftree.kernels.cuda.store import WeightStore
from draftree.models.load import load_model
from draftree.models.target import Target
from draftree.weights.file import open_checkpoint
from tests.tiny import run_chain

MAX_CTX = 512
MAX_NODES = 41


class CudaPlace:
    """One device: what its targets and drafts share."""

    def __init__(
        self,
        gpu: Gpu,
        *,
        max_tokens: int = MAX_CTX,
        max_nodes: int = MAX_NODES,
        is_persistent: bool = False,
    ) -> None:
        self.gpu, self._sizes = gpu, {"max_tokens": max_tokens, "max_nodes": max_nodes}
        self._is_persistent = is_persistent
        self.store = WeightStore(gpu)

    def new_ops(self) -> CudaOps:
        return CudaOps(
            self.store, **self._sizes, max_ctx=MAX_CTX, is_persistent=self._is_persistent
        )

    def open_target(
        self, path: Path, feature_layers: tuple[int, ...] = (), window: int = 0
    ) -> Target:
        ops = self.new_ops()
        model = load_model(open_checkpoint(path), ops, window)
        return Target(model, ops, MAX_CTX, feature_layers)

    def open_drafter(self, path: Path, target: Target) -> BlockDrafter:
        ops = self.new_ops()
        return BlockDrafter(load_draft(open_checkpoint(path), ops), target.model, ops)


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def logits_of(target: Target, ids: Sequence[int], chunk_len: int) -> np.ndarray:
    target.state.reset()
    return run_chain(target, ids, chunk_len)
