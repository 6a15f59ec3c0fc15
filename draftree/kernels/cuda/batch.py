"""Operations over a row of each of several sequences, on a GPU: products and norms take all rows
together; attention, convolution and delta rule are launched for each row, over what its own
sequence remembers.

A row has the bits of a pass of its own, whatever the other rows are.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from draftree.kernels import ops
from draftree.kernels.cuda.conv import Convolution, CudaConv
from draftree.kernels.cuda.gated_delta import CudaDelta, gated_delta
from draftree.kernels.cuda.kv_cache import CudaKv
from draftree.kernels.cuda.ops import CudaOps
from draftree.kernels.cuda.program import Program
from draftree.kernels.cuda.store import WeightStore
from draftree.kernels.ops import Heads, KvState, LayerStore, Rope, narrow


@dataclass(slots=True)
class BatchedKv(KvState):
    """Keys and values of one layer, a cache for each row of a pass."""

    caches: tuple[CudaKv, ...]


@dataclass(slots=True)
class BatchedStores(LayerStore):
    """What a recurrent layer remembers, for each row of a pass."""

    stores: tuple[LayerStore, ...]


class CudaBatchOps(CudaOps):
    """members: operations of each sequence alone, of one row; theirs are recorded with the others.
    They share scratch, since they follow each other.
    """

    def __init__(self, members: Sequence[CudaOps], store: WeightStore, **options: Any) -> None:
        num_rows = len(members)
        super().__init__(store, max_tokens=num_rows, max_nodes=num_rows, **options)
        self._members = members
        self._logits: torch.Tensor | None = None
        self._host: dict[int, torch.Tensor] = {}  # by columns

    @contextmanager
    def capture(self) -> Iterator[Program]:
        with super().capture() as program:
            for member in self._members:
                member._program = program
            try:
                yield program
            finally:
                for member in self._members:
                    member._program = None

    def join(self, stores: Sequence[LayerStore]) -> LayerStore:
        if isinstance(stores[0], CudaKv):
            return BatchedKv(tuple(narrow(store, CudaKv) for store in stores))
        return BatchedStores(tuple(stores))

    def set_batch(self, tokens: ops.Integers, positions: ops.Integers) -> None:
        self.step.set_batch(tokens, positions)

    def read(self, x: torch.Tensor, num_rows: int) -> np.ndarray:
        """Into pinned memory, which is several times faster, and the same for rows as long."""
        width = x.shape[1]
        if width not in self._host:
            shape = self.step.max_nodes, width
            self._host[width] = torch.zeros(shape, pin_memory=self.gpu.is_real)
        return self._host[width][:num_rows].copy_(x[:num_rows]).numpy()

    def rope_and_store_kv(
        self, q: Heads | None, k: Heads, v: torch.Tensor, cache: KvState, rope: Rope
    ) -> None:
        for row, own in enumerate(narrow(cache, BatchedKv).caches):
            queries = None if q is None else _one_row(q, row)
            keys, values = _one_row(k, row), v[row : row + 1]
            self._members[row].rope_and_store_kv(queries, keys, values, own, rope)

    def attention(
        self, q: torch.Tensor, cache: KvState, *, window: int = 0, bidirectional: bool = False
    ) -> torch.Tensor:
        caches, out = narrow(cache, BatchedKv).caches, self._scratch.rows(q.shape[1])
        first = self._members[0]
        workspace = first._attention_workspace(q.shape[1] // caches[0].head_dim, caches[0])
        for row, own in enumerate(caches):
            member, rows = self._members[row], slice(row, row + 1)
            member._attention = workspace
            member._attend(q[rows], own, out[rows], window=window, bidirectional=bidirectional)
        return out

    def conv_gated_delta(
        self,
        qkv: torch.Tensor,
        conv_weight: torch.Tensor,
        conv_state: LayerStore,
        alpha: torch.Tensor,
        beta: torch.Tensor,
        decay: torch.Tensor,
        decay_bias: torch.Tensor,
        delta_state: LayerStore,
    ) -> torch.Tensor:
        windows = [narrow(one, CudaConv) for one in narrow(conv_state, BatchedStores).stores]
        states = [narrow(one, CudaDelta) for one in narrow(delta_state, BatchedStores).stores]
        out = self._scratch.rows(states[0].value_heads * states[0].head_dim)

        def launch(n: int) -> None:
            for row, (window, state) in enumerate(zip(windows, states, strict=True)):
                rows, step = slice(row, row + 1), self._members[row].step
                raw = Convolution(qkv[rows], conv_weight, window)
                gates = alpha[rows], beta[rows], decay, decay_bias
                gated_delta(raw, *gates, state, step, out[rows], self.gpu)

        self._recording.add(launch)
        return out

    def _new_logits(self, width: int) -> torch.Tensor:
        """One array for passes of any number of rows."""
        if self._logits is None:
            self._logits = super()._new_logits(width)
        return self._logits


def _one_row(heads: Heads, row: int) -> Heads:
    return heads._replace(x=heads.x[row : row + 1])
