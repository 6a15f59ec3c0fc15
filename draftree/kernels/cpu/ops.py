"""The CPU's side of `Ops`: records numba kernels into programs and hands out the arrays they
work on.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from draftree.kernels.cpu import attention as attend
from draftree.kernels.cpu import conv, elementwise, gated_delta, norm, rope
from draftree.kernels.cpu.conv import ConvState
from draftree.kernels.cpu.embed import record_embed
from draftree.kernels.cpu.gated_delta import DeltaState
from draftree.kernels.cpu.kv_cache import KvCache
from draftree.kernels.cpu.linear import record_linear
from draftree.kernels.cpu.pack import Weight, pack
from draftree.kernels.cpu.program import Program
from draftree.kernels.cpu.quantize import QuantizedRows, quantized_bytes, record_quantize
from draftree.kernels.cpu.room import Room, new_floats
from draftree.kernels.cpu.step import NUM_ROWS, NUM_TOKENS, Step
from draftree.kernels.cpu.team import Team
from draftree.kernels.quant.formats import QuantType

Store = KvCache | ConvState | DeltaState


class CpuOps:
    """Operations for passes of at most max_tokens rows (trees: max_nodes) over max_ctx
    positions.
    """

    def __init__(
        self,
        team: Team,
        *,
        max_tokens: int,
        max_nodes: int,
        max_ctx: int,
        exact: bool = False,
        kv_dtype: type[np.number] = np.float32,
        room: Room | None = None,
    ) -> None:
        """room: shared with others whose passes come before or after these."""
        self.team = team
        self.step = Step(max_tokens, max_nodes)
        self.max_ctx = max_ctx
        self._exact = exact
        self._kv_dtype = kv_dtype
        self._room = room or Room()
        self._program: Program | None = None
        self._quantized: dict[int, QuantizedRows] = {}  # by address of the rows they were made from

    @contextmanager
    def capture(self) -> Iterator[Program]:
        """Operations called inside are recorded into the program that this yields."""
        assert self._program is None, "captures do not nest"
        self._program, self._quantized = Program(self.team), {}
        try:
            yield self._program
        finally:
            self._program = None

    @contextmanager
    def scope(self) -> Iterator[None]:
        with self._room.scratch.scope():
            yield
        self._quantized = {}  # their memory may be taken again

    def pack(self, raw: np.ndarray, qtype: QuantType) -> Weight:
        return pack(raw, qtype, exact=self._exact, team=self.team, arena=self._room.weights)

    def constant(self, values: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(values, dtype=np.float32)

    def rope_table(self, inv_freq: np.ndarray) -> np.ndarray:
        return self._room.rope_table(inv_freq, self.max_ctx + self.step.max_tokens)

    def new_kv(self, num_kv_heads: int, head_dim: int) -> KvCache:
        capacity = self.max_ctx + self.step.max_tokens
        return KvCache(num_kv_heads, head_dim, capacity, self._kv_dtype)

    def new_conv(self, channels: int, kernel_len: int) -> ConvState:
        return ConvState(channels, kernel_len, self.step.max_nodes)

    def new_delta(self, key_heads: int, value_heads: int, head_dim: int) -> DeltaState:
        return DeltaState(key_heads, value_heads, head_dim, self.step.max_nodes)

    def new_rows(self, width: int, num_rows: int = 0) -> np.ndarray:
        return self._room.new_rows(num_rows or self.step.max_tokens, width)

    def read(self, x: np.ndarray, num_rows: int) -> np.ndarray:
        return x[:num_rows]

    def embed(self, raw: np.ndarray, qtype: QuantType) -> np.ndarray:
        width = raw.shape[1] // qtype.block_bytes * qtype.block_len
        out = self._take(width)
        record_embed(self._recording, self.step, raw, qtype, self.step.tokens, out)
        return out

    def linear(
        self,
        x: np.ndarray,
        weight: Weight,
        *,
        bias: np.ndarray | None = None,
        add_to: np.ndarray | None = None,
    ) -> np.ndarray:
        out = self._take(weight.rows) if add_to is None else add_to
        rows = x if weight.form.is_float else self._quantize(x, NUM_TOKENS)
        record_linear(
            self._recording, self.step, rows, weight, out, bias=bias, accumulate=add_to is not None
        )
        self._written(out)
        return out

    def linears(
        self, x: np.ndarray, weights: Sequence[Weight], biases: Sequence[np.ndarray | None]
    ) -> tuple[np.ndarray, ...]:
        pairs = zip(weights, biases, strict=True)
        return tuple(self.linear(x, weight, bias=bias) for weight, bias in pairs)

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        out = self._take(x.shape[1])
        norm.record_rms_norm(self._recording, self.step, x, weight, eps, out)
        return out

    def head_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> None:
        head_dim = len(weight)
        heads = x.shape[1] // head_dim
        norm.record_head_norm(self._recording, self.step, x, heads, head_dim, weight, eps)
        self._written(x)

    def rope(self, x: np.ndarray, head_dim: int, table: np.ndarray, *, interleaved: bool) -> None:
        heads, rotary_dim = x.shape[1] // head_dim, 2 * table.shape[2]
        rope.record_rope(
            self._recording, self.step, x, heads, head_dim, rotary_dim, table, interleaved
        )
        self._written(x)

    def kv_write(self, k: np.ndarray, v: np.ndarray, cache: KvCache) -> None:
        attend.record_kv_write(self._recording, self.step, k, v, cache)

    def attention(
        self, q: np.ndarray, cache: KvCache, *, window: int = 0, bidirectional: bool = False
    ) -> np.ndarray:
        heads = q.shape[1] // cache.head_dim
        out = self._take(q.shape[1])
        length = attend.attention_scratch_len(self.step, cache, heads, self.team.num_threads)
        attend.record_attention(
            self._recording,
            self.step,
            q,
            cache,
            heads,
            cache.head_dim**-0.5,
            out,
            self._take(length, 1)[0],
            window=window,
            bidirectional=bidirectional,
        )
        return out

    def silu_mul(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        elementwise.record_silu_mul(self._recording, self.step, gate, up, gate)
        self._written(gate)
        return gate

    def sigmoid_mul(self, x: np.ndarray, gate: np.ndarray) -> np.ndarray:
        elementwise.record_sigmoid_mul(self._recording, self.step, x, gate)
        self._written(x)
        return x

    def conv(self, x: np.ndarray, weight: np.ndarray, state: ConvState) -> np.ndarray:
        out = self._take(x.shape[1])
        conv.record_conv(self._recording, self.step, x, weight, state, out)
        return out

    def gated_delta(
        self,
        qkv: np.ndarray,
        alpha: np.ndarray,
        beta: np.ndarray,
        decay: np.ndarray,
        decay_bias: np.ndarray,
        state: DeltaState,
    ) -> np.ndarray:
        out = self._take(state.value_heads * state.head_dim)
        length = gated_delta.delta_scratch_len(
            self.step, state.key_heads, state.value_heads, state.head_dim, self.team.num_threads
        )
        gated_delta.record_gated_delta(
            self._recording,
            self.step,
            *(qkv, alpha, beta, decay, decay_bias, state, out),
            self._take(length, 1)[0],
        )
        return out

    def gated_norm(
        self, x: np.ndarray, z: np.ndarray, weight: np.ndarray, eps: float
    ) -> np.ndarray:
        head_dim = len(weight)
        heads = x.shape[1] // head_dim
        out = self._take(x.shape[1])
        norm.record_gated_norm(self._recording, self.step, x, z, weight, eps, heads, head_dim, out)
        return out

    def head(
        self, x: np.ndarray, norm_weight: np.ndarray, eps: float, weight: Weight
    ) -> np.ndarray:
        rows = self.step.max_nodes
        gathered = self._take(x.shape[1], rows)
        elementwise.record_gather_rows(self._recording, self.step, x, self.step.rows, gathered)
        norm.record_rms_norm(
            self._recording, self.step, gathered, norm_weight, eps, gathered, NUM_ROWS
        )
        logits = new_floats(rows * weight.rows).reshape(rows, weight.rows)
        source = gathered if weight.form.is_float else self._quantize(gathered, NUM_ROWS)
        record_linear(self._recording, self.step, source, weight, logits, rows_word=NUM_ROWS)
        return logits

    def copy_columns(self, x: np.ndarray, into: np.ndarray, column: int) -> None:
        elementwise.record_copy_columns(self._recording, self.step, x, into, column)

    def commit(self, store: Store) -> None:
        if isinstance(store, KvCache):
            attend.record_kv_commit(self._recording, self.step, store)
        elif isinstance(store, ConvState):
            conv.record_conv_commit(self._recording, self.step, store)
        else:
            gated_delta.record_delta_commit(self._recording, self.step, store)

    def snapshot(self, store: Store, start: int, end: int) -> tuple[np.ndarray, ...]:
        if isinstance(store, KvCache):
            return store.copy(start, end)
        return (store.window.copy(),) if isinstance(store, ConvState) else (store.state.copy(),)

    def restore(
        self, store: Store, parts: tuple[np.ndarray, ...], start: int = 0, end: int = 0
    ) -> None:
        if isinstance(store, KvCache):
            if parts:
                store.put(parts, start, end)
            return
        array = store.window if isinstance(store, ConvState) else store.state
        array[...] = parts[0] if parts else 0.0

    def _quantize(self, x: np.ndarray, rows_word: int) -> QuantizedRows:
        """Projections of the same rows share one quantised copy."""
        known = self._quantized.get(x.ctypes.data)
        if known is None or known.source.shape != x.shape:
            num_floats = -(-quantized_bytes(*x.shape) // 4)
            buffer = self._take(num_floats, 1)[0].view(np.uint8)
            known = record_quantize(
                self._recording, self.step, x, buffer=buffer, rows_word=rows_word
            )
            self._quantized[x.ctypes.data] = known
        return known

    def _take(self, width: int, num_rows: int = 0) -> np.ndarray:
        """Until the scope ends; 0: as many rows as a pass may have."""
        return self._room.scratch.take(num_rows or self.step.max_tokens, width)

    def _written(self, x: np.ndarray) -> None:
        self._quantized.pop(x.ctypes.data, None)

    @property
    def _recording(self) -> Program:
        assert self._program is not None, "operations are called inside capture()"
        return self._program
