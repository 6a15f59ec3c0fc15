"""Operations over a row of each of several sequences, on a GPU: products and norms take all rows
together; attention, convolution and delta rule are launched for each row, over what its own
sequence remembers.

A row has the bits of a pass of its own, whatever the other rows are.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from draftree.kernels import ops
from draftree.kernels.cuda import attention as attend
from draftree.kernels.cuda.compile import Gpu
from draftree.kernels.cuda.conv import Convolution, CudaConv
from draftree.kernels.cuda.gated_delta import CudaDelta, gated_delta
from draftree.kernels.cuda.kv_cache import CudaKv
from draftree.kernels.cuda.ops import CudaOps
from draftree.kernels.cuda.pass_args import NUM_ROWS, CudaPassArgs
from draftree.kernels.cuda.program import Program
from draftree.kernels.cuda.store import WeightStore
from draftree.kernels.ops import BatchedKv, BatchedStores, Heads, KvState, LayerStore, Rope, narrow


class BatchPassArgs(CudaPassArgs):
    """Of rows that belong to several sequences."""

    def set_batch(self, tokens: ops.Integers, positions: ops.Integers) -> None:
        """Each at a position of its own; all of their logits count."""
        count = len(tokens)
        assert 1 <= count <= self.max_nodes
        self._control[NUM_ROWS], self._rows[:count] = count, range(count)
        self._begin(tokens, np.asarray(positions), 0, is_tree=False)


class CudaBatchOps(CudaOps):
    """members: operations of each sequence alone, for passes of one row."""

    def __init__(
        self, members: Sequence[CudaOps], store: WeightStore, gpu: Gpu, **options: Any
    ) -> None:
        """options: those of the members, but for numbers of rows."""
        num_rows = len(members)
        super().__init__(store, max_tokens=num_rows, max_nodes=num_rows, **options)
        self.step = self._batch_step = BatchPassArgs(num_rows, num_rows, gpu)
        self._members = members
        self._host: dict[int, torch.Tensor] = {}  # by columns

    @contextmanager
    def capture(self) -> Iterator[Program]:
        """What the members record becomes part of it."""
        with super().capture() as program:
            for member in self._members:
                member._program = program
            try:
                yield program
            finally:
                for member in self._members:
                    member._program = None

    def set_batch(self, tokens: ops.Integers, positions: ops.Integers) -> None:
        self._batch_step.set_batch(tokens, positions)

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
        for row, own in enumerate(narrow(cache, BatchedKv).of(CudaKv)):
            queries = None if q is None else _one_row(q, row)
            keys, values = _one_row(k, row), v[row : row + 1]
            self._members[row].rope_and_store_kv(queries, keys, values, own, rope)

    def attention(
        self, q: torch.Tensor, cache: KvState, *, window: int = 0, bidirectional: bool = False
    ) -> torch.Tensor:
        caches, out = narrow(cache, BatchedKv).of(CudaKv), self._scratch.rows(q.shape[1])
        if self._attention is None:  # one for all, since they follow each other
            heads, shape = q.shape[1] // caches[0].head_dim, caches[0].shape
            self._attention = attend.new_attention_workspace(
                1, heads, shape, self.max_ctx, self.gpu
            )
        workspace = self._attention

        def launch(num_rows: int) -> None:
            for row, (member, own) in enumerate(zip(self._members, caches, strict=False)):
                rows = slice(row, row + 1)
                args = q[rows], own, member.step, out[rows], workspace, self.gpu
                attend.attention(*args, window=window, bidirectional=bidirectional)

        self._recording.add(launch)
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
        windows = narrow(conv_state, BatchedStores).of(CudaConv)
        states = narrow(delta_state, BatchedStores).of(CudaDelta)
        out = self._scratch.rows(states[0].value_heads * states[0].head_dim)

        def launch(num_rows: int) -> None:
            for row, (window, state) in enumerate(zip(windows, states, strict=True)):
                rows, step = slice(row, row + 1), self._members[row].step
                raw = Convolution(qkv[rows], conv_weight, window)
                gates = alpha[rows], beta[rows], decay, decay_bias
                gated_delta(raw, *gates, state, step, out[rows], self.gpu)

        self._recording.add(launch)
        return out


def _one_row(heads: Heads, row: int) -> Heads:
    return heads._replace(x=heads.x[row : row + 1])
