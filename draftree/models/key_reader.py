"""A model's first layers bound to a sequence of their own: they read a text for the queries and
keys of its attention, before these are rotated, and no further.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from draftree.kernels.heads import QUERY_LEN
from draftree.kernels.ops import Array, Heads, HeadStore, KvState, Ops, Rope, narrow
from draftree.layers.attention import Attention
from draftree.layers.delta_net import RecurrentState
from draftree.models.model import Model


class _KeepingOps:
    """A device's operations, which also keep what every attention layer asks and offers."""

    def __init__(self, ops: Ops, store: HeadStore) -> None:
        self._ops, self._store = ops, store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def rope_and_store_kv(
        self, q: Heads | None, k: Heads, v: Array, cache: KvState, rope: Rope
    ) -> None:
        assert q is not None
        self._ops.keep_heads(q, k, rope, self._store)
        self._ops.rope_and_store_kv(q, k, v, cache, rope)


class KeyReader:
    """Of the last layer nothing but queries and keys is computed."""

    def __init__(
        self, model: Model, ops: Ops, max_ctx: int, chunk_len: int, num_layers: int = 0
    ) -> None:
        """num_layers: the last of them attends; 0: all up to the last one that does."""
        assert chunk_len >= QUERY_LEN
        self.max_ctx = max_ctx
        self._ops, self._chunk_len = ops, chunk_len
        *blocks, last = model.blocks[: num_layers or model.attention_layers[-1] + 1]
        states = [block.mixer.new_state(ops) for block in blocks]
        own = [state for state in states if isinstance(state, RecurrentState)]
        self._recurrent = [store for state in own for store in (state.conv, state.delta)]
        self.heads = ops.new_heads()
        with ops.scope(), ops.capture() as self._body:
            x = model.embedding(ops)
            keeping = cast(Ops, _KeepingOps(ops, self.heads))
            for block, state in zip(blocks, states, strict=True):
                block(keeping, x, state)
            attention = narrow(last.mixer, Attention)
            q, k, *_ = attention.project_heads(ops, ops.rms_norm(x, last.mixer_norm, last.eps))
            ops.keep_heads(q, k, attention.rope, self.heads)

    def read(self, ids: Sequence[int]) -> None:
        """From the first position on. The last pass is long enough for all queries."""
        assert QUERY_LEN <= len(ids) <= self.max_ctx
        for store in self._recurrent:
            self._ops.restore(store, ())
        tokens, step = np.asarray(ids), self._chunk_len
        first, end = 0, len(ids) % step or step
        while first < len(ids):
            self._ops.step.set_chain(tokens[first:end], first)
            self._body.run()
            self.heads.collect(first, end - first)
            first, end = end, end + step
