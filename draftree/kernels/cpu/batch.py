"""Operations over a row of each of several sequences: products and norms take all rows together,
attention, convolution and delta rule each row with what its own sequence remembers.

A row has the bits of a pass of its own, whatever the other rows are.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from draftree.kernels import ops
from draftree.kernels.cpu import attention as attend
from draftree.kernels.cpu import conv, gated_delta
from draftree.kernels.cpu.conv import ConvState
from draftree.kernels.cpu.gated_delta import DeltaState
from draftree.kernels.cpu.kv_cache import KvCache
from draftree.kernels.cpu.ops import CpuOps
from draftree.kernels.cpu.thread_pool import ThreadPool
from draftree.kernels.ops import BatchedKv, BatchedStores, Heads, KvState, LayerStore, Rope, narrow


class CpuBatchOps(CpuOps):
    """members: operations of each sequence alone, whose stores these work on."""

    def __init__(self, members: Sequence[CpuOps], pool: ThreadPool, **options: Any) -> None:
        """options: those of the members, but for numbers of rows."""
        num_rows = len(members)
        super().__init__(pool, max_tokens=num_rows, max_nodes=num_rows, **options)
        self._members = members
        self._logits: np.ndarray | None = None

    def set_batch(self, tokens: ops.Integers, positions: ops.Integers) -> None:
        self.step.set_batch(tokens, positions)

    def rope_and_store_kv(
        self, q: Heads | None, k: Heads, v: np.ndarray, cache: KvState, rope: Rope
    ) -> None:
        caches = narrow(cache, BatchedKv).of(KvCache)
        self._turn_heads(q, k, v, caches[0], rope)
        for row, own in enumerate(caches):
            own.rope = rope
            rows = k.x[row : row + 1], v[row : row + 1]
            attend.record_kv_write(self._recording, self._members[row].step, *rows, own)

    def attention(
        self, q: np.ndarray, cache: KvState, *, window: int = 0, bidirectional: bool = False
    ) -> np.ndarray:
        caches = narrow(cache, BatchedKv).of(KvCache)
        head_dim, out = caches[0].head_dim, self._take(q.shape[1])
        heads, num_threads = q.shape[1] // head_dim, self.pool.num_threads
        length = attend.attention_scratch_len(self._members[0].step, caches[0], heads, num_threads)
        scratch = self._take(length, len(caches))
        rows = [
            attend.AttentionRows(
                *(member.step, q[row : row + 1], own, out[row : row + 1], scratch[row])
            )
            for row, (member, own) in enumerate(zip(self._members, caches, strict=False))
        ]
        attend.record_attention(
            *(self._recording, rows, heads, head_dim**-0.5),
            window=window,
            bidirectional=bidirectional,
        )
        return out

    def conv_gated_delta(
        self,
        qkv: np.ndarray,
        conv_weight: np.ndarray,
        conv_state: LayerStore,
        alpha: np.ndarray,
        beta: np.ndarray,
        decay: np.ndarray,
        decay_bias: np.ndarray,
        delta_state: LayerStore,
    ) -> np.ndarray:
        windows = narrow(conv_state, BatchedStores).of(ConvState)
        states = narrow(delta_state, BatchedStores).of(DeltaState)
        convolved, first = self._take(qkv.shape[1]), states[0]
        out = self._take(first.value_heads * first.head_dim)
        for row, window in enumerate(windows):
            own = slice(row, row + 1)
            step = self._members[row].step
            conv.record_conv(self._recording, step, qkv[own], conv_weight, window, convolved[own])
        shape = first.key_heads, first.value_heads, first.head_dim, self.pool.num_threads
        length = gated_delta.delta_scratch_len(self._members[0].step, *shape)
        scratch = self._take(length, len(states))
        for row, state in enumerate(states):
            own = slice(row, row + 1)
            gates = alpha[own], beta[own], decay, decay_bias
            recorded = self._recording, self._members[row].step, convolved[own]
            gated_delta.record_gated_delta(*recorded, *gates, state, out[own], scratch[row])
        return out

    def keep_heads(self, q: Heads, k: Heads, rope: Rope, store: ops.HeadStore) -> None:
        raise AssertionError("scores are those of one text")

    def _new_logits(self, num_rows: int, vocab_size: int) -> np.ndarray:
        """One array for passes of any number of rows."""
        if self._logits is None:
            self._logits = super()._new_logits(num_rows, vocab_size)
        return self._logits
