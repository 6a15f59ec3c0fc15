"""The CPU's side of `Ops`: records numba kernels into programs and hands out the arrays they
work on.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from draftree.kernels import ops
from draftree.kernels.cpu import attention as attend
from draftree.kernels.cpu import conv, elementwise, gated_delta, norm
from draftree.kernels.cpu.block_conv import record_block_conv
from draftree.kernels.cpu.conv import ConvState
from draftree.kernels.cpu.embed import record_embed
from draftree.kernels.cpu.gated_delta import DeltaState
from draftree.kernels.cpu.heads import CpuHeads
from draftree.kernels.cpu.kv_cache import KvCache
from draftree.kernels.cpu.kv_round import record_kv_round, record_shift
from draftree.kernels.cpu.linear import record_linear
from draftree.kernels.cpu.pack import Weight, pack
from draftree.kernels.cpu.pass_args import NUM_ROWS, NUM_TOKENS, PassArgs
from draftree.kernels.cpu.program import Program
from draftree.kernels.cpu.quantize import QuantizedRows, quantized_bytes, record_quantize
from draftree.kernels.cpu.rope import record_rope
from draftree.kernels.cpu.thread_pool import ThreadPool
from draftree.kernels.cpu.workspace import Workspace, new_floats
from draftree.kernels.ops import (
    Columns,
    Heads,
    HeadStore,
    HeldArray,
    LayerStore,
    MatmulInput,
    Rope,
    narrow,
)
from draftree.kernels.quant.formats import QuantType
from draftree.kernels.quant.kv_centre import mean_key
from draftree.kernels.quant.kv_format import KvFormat


@dataclass(slots=True)
class CpuMatmulInput(MatmulInput):
    """Rows, and the quantised copy that all products with quantised weights share."""

    rows: np.ndarray
    buffer: np.ndarray  # float32, where the copy will be
    quantized: QuantizedRows | None = None  # once a product has asked for it


class CpuOps:
    """For passes of at most max_tokens rows (trees: max_nodes) over max_ctx positions. Keys and
    values are kept of the last ring_len positions, a multiple of 256; 0: of all.
    """

    def __init__(
        self,
        pool: ThreadPool,
        *,
        max_tokens: int,
        max_nodes: int,
        max_ctx: int,
        ring_len: int = 0,
        exact: bool = False,
        kv_dtype: type[np.number] = np.float32,
        key_format: KvFormat | None = None,
        value_format: KvFormat | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        """key_format, value_format: what keys and values are rounded to before they are written.
        workspace: shared with others whose passes come before or after these.
        """
        self.pool = pool
        self.step = PassArgs(max_tokens, max_nodes)
        self.max_ctx, self.ring_len = max_ctx, ring_len
        self._exact = exact
        self._kv_dtype, self._kv_formats = kv_dtype, (key_format, value_format)
        self._workspace = workspace or Workspace()
        self._program: Program | None = None

    @contextmanager
    def capture(self) -> Iterator[Program]:
        """Operations called inside are recorded into the program that this yields."""
        assert self._program is None, "captures do not nest"
        self._program = Program(self.pool)
        try:
            yield self._program
        finally:
            self._program = None

    @contextmanager
    def scope(self) -> Iterator[None]:
        with self._workspace.scratch.scope():
            yield

    def pack(self, raw: np.ndarray, qtype: QuantType) -> Weight:
        return pack(raw, qtype, exact=self._exact, pool=self.pool, arena=self._workspace.weights)

    def constant(self, values: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(values, dtype=np.float32)

    def rope_table(self, inv_freq: np.ndarray) -> np.ndarray:
        return self._workspace.rope_table(inv_freq, self.max_ctx + self.step.max_tokens)

    def new_kv(self, num_kv_heads: int, head_dim: int, centre: np.ndarray | None = None) -> KvCache:
        capacity = self.max_ctx + self.step.max_tokens
        cache = KvCache(num_kv_heads, head_dim, capacity, self._kv_dtype, self.ring_len)
        form = self._kv_formats[0]
        if form is not None and form.is_centred(head_dim, has_bias=centre is not None):
            zeros = np.zeros(num_kv_heads * head_dim, np.float32)
            cache.centre = zeros if centre is None else centre.copy()
        return cache

    def centre_keys(self, store: ops.KvState, first: int, end: int) -> None:
        cache = narrow(store, KvCache)
        assert cache.centre is not None and cache.rope is not None, "keys are not centred"
        cosines, sines = (cache.rope.table[first:end, i] for i in range(2))
        keys = cache.read_keys(end)[:, first:]
        cache.centre[:] = mean_key(keys, cosines, sines, interleaved=cache.rope.interleaved)

    def new_conv(self, channels: int, kernel_len: int) -> ConvState:
        return ConvState(channels, kernel_len, self.step.max_nodes)

    def new_delta(self, key_heads: int, value_heads: int, head_dim: int) -> DeltaState:
        return DeltaState(key_heads, value_heads, head_dim, self.step.max_nodes)

    def new_rows(self, width: int, num_rows: int = 0) -> np.ndarray:
        return self._workspace.new_rows(num_rows or self.step.max_tokens, width)

    def read(self, x: np.ndarray, num_rows: int) -> np.ndarray:
        return x[:num_rows]

    def embed(self, raw: np.ndarray, qtype: QuantType) -> np.ndarray:
        width = raw.shape[1] // qtype.block_bytes * qtype.block_len
        out = self._take(width)
        record_embed(self._recording, self.step, raw, qtype, self.step.tokens, out)
        return out

    def matmul_input(self, x: np.ndarray) -> CpuMatmulInput:
        num_floats = -(-quantized_bytes(*x.shape) // 4)
        return CpuMatmulInput(x, self._take(num_floats, 1)[0])

    def rms_norm(
        self, x: np.ndarray, weight: np.ndarray, eps: float, *, copy_to: Columns | None = None
    ) -> CpuMatmulInput:
        if copy_to is not None:
            self.copy_columns(x, copy_to)
        return self.matmul_input(self.norm(x, weight, eps))

    def norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        out = self._take(x.shape[1])
        norm.record_rms_norm(self._recording, self.step, x, weight, eps, out)
        return out

    def silu_mul(self, gate: np.ndarray, up: np.ndarray) -> CpuMatmulInput:
        elementwise.record_silu_mul(self._recording, self.step, gate, up, gate)
        return self.matmul_input(gate)

    def sigmoid_mul(self, x: np.ndarray, gate: np.ndarray) -> CpuMatmulInput:
        elementwise.record_sigmoid_mul(self._recording, self.step, x, gate)
        return self.matmul_input(x)

    def gated_norm(
        self, x: np.ndarray, z: np.ndarray, weight: np.ndarray, eps: float
    ) -> CpuMatmulInput:
        head_dim = len(weight)
        heads = x.shape[1] // head_dim
        out = self._take(x.shape[1])
        norm.record_gated_norm(self._recording, self.step, x, z, weight, eps, heads, head_dim, out)
        return self.matmul_input(out)

    def linear(
        self,
        x: MatmulInput,
        weight: ops.Weight,
        *,
        bias: np.ndarray | None = None,
        add_to: np.ndarray | None = None,
    ) -> np.ndarray:
        matrix, is_added = narrow(weight, Weight), add_to is not None
        out = self._take(matrix.rows) if add_to is None else add_to
        self._multiply(narrow(x, CpuMatmulInput), matrix, out, bias=bias, accumulate=is_added)
        return out

    def linears(
        self, x: MatmulInput, weights: Sequence[ops.Weight], biases: Sequence[np.ndarray | None]
    ) -> tuple[np.ndarray, ...]:
        pairs = zip(weights, biases, strict=True)
        return tuple(self.linear(x, weight, bias=bias) for weight, bias in pairs)

    def rope_and_store_kv(
        self, q: Heads | None, k: Heads, v: np.ndarray, cache: ops.KvState, rope: Rope
    ) -> None:
        own = narrow(cache, KvCache)
        self._turn_heads(q, k, v, own, rope)
        attend.record_kv_write(self._recording, self.step, k.x, v, own)

    def _turn_heads(
        self, q: Heads | None, k: Heads, v: np.ndarray, own: KvCache, rope: Rope
    ) -> None:
        """Norms, rotation, and keys and values rounded as a cache's format has them."""

        def turn(x: np.ndarray, num_heads: int) -> None:
            dims = rope.head_dim, 2 * rope.table.shape[2]
            recorded = self._recording, self.step, x, num_heads
            record_rope(*recorded, *dims, rope.table, rope.interleaved)

        recorded = self._recording, self.step
        own.rope = rope
        for heads in (k,) if q is None else (q, k):
            args = self._recording, self.step, heads.x, heads.x.shape[1] // rope.head_dim
            if heads.norm is not None:
                norm.record_head_norm(*args, rope.head_dim, *heads.norm)
            turn(heads.x, args[-1])
        for x, form in zip((k.x, v), self._kv_formats, strict=True):
            if form is None:
                continue
            centre = None
            if own.centre is not None and x is k.x:
                centre = self._take(x.shape[1])
                record_shift(*recorded, centre, own.centre, 0)
                turn(centre, own.kv_heads)
                record_shift(*recorded, x, centre, -1)
            record_kv_round(*recorded, x, own.kv_heads, form)
            if centre is not None:
                record_shift(*recorded, x, centre, 1)

    def new_heads(self) -> CpuHeads:
        return CpuHeads(self.max_ctx)

    def keep_heads(self, q: Heads, k: Heads, rope: Rope, store: HeadStore) -> None:
        copies = [Heads(self.new_rows(heads.x.shape[1]), heads.norm) for heads in (q, k)]
        for heads, copy in zip((q, k), copies, strict=True):
            self.copy_columns(heads.x, Columns(copy.x, 0))
        narrow(store, CpuHeads).add_layer(copies[0], copies[1], rope.head_dim)

    def attention(
        self, q: np.ndarray, cache: ops.KvState, *, window: int = 0, bidirectional: bool = False
    ) -> np.ndarray:
        cache = narrow(cache, KvCache)
        heads = q.shape[1] // cache.head_dim
        out = self._take(q.shape[1])
        length = attend.attention_scratch_len(self.step, cache, heads, self.pool.num_threads)
        rows = attend.AttentionRows(self.step, q, cache, out, self._take(length, 1)[0])
        attend.record_attention(
            *(self._recording, [rows], heads, cache.head_dim**-0.5),
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
        window, state = narrow(conv_state, ConvState), narrow(delta_state, DeltaState)
        convolved = self._take(qkv.shape[1])
        conv.record_conv(self._recording, self.step, qkv, conv_weight, window, convolved)
        out = self._take(state.value_heads * state.head_dim)
        shape = state.key_heads, state.value_heads, state.head_dim, self.pool.num_threads
        length = gated_delta.delta_scratch_len(self.step, *shape)
        args = convolved, alpha, beta, decay, decay_bias, state, out, self._take(length, 1)[0]
        gated_delta.record_gated_delta(self._recording, self.step, *args)
        return out

    def block_conv(
        self, x: np.ndarray, own: np.ndarray, base: np.ndarray, *, add_to: np.ndarray | None = None
    ) -> np.ndarray:
        out = self._take(x.shape[1]) if add_to is None else add_to
        args = self._recording, self.step, x, own, base, out
        record_block_conv(*args, is_added=add_to is not None)
        return out

    def head(
        self, x: np.ndarray, norm_weight: np.ndarray, eps: float, weight: ops.Weight
    ) -> np.ndarray:
        rows, matrix = self.step.max_nodes, narrow(weight, Weight)
        gathered = self._take(x.shape[1], rows)
        elementwise.record_gather_rows(self._recording, self.step, x, gathered)
        args = gathered, norm_weight, eps, gathered, NUM_ROWS
        norm.record_rms_norm(self._recording, self.step, *args)
        logits = self._new_logits(rows, matrix.rows)
        self._multiply(self.matmul_input(gathered), matrix, logits, rows_word=NUM_ROWS)
        return logits

    def _new_logits(self, num_rows: int, vocab_size: int) -> np.ndarray:
        return new_floats(num_rows * vocab_size).reshape(num_rows, vocab_size)

    def copy_columns(self, x: np.ndarray, into: Columns) -> None:
        elementwise.record_copy_columns(self._recording, self.step, x, into.array, into.first)

    def commit(self, stores: Sequence[LayerStore]) -> None:
        program = self._recording
        for store in stores:
            if isinstance(store, KvCache):
                attend.record_kv_commit(program, self.step, store)
            elif isinstance(store, ConvState):
                conv.record_conv_commit(program, self.step, store)
            else:
                gated_delta.record_delta_commit(program, self.step, narrow(store, DeltaState))

    def snapshot(self, store: LayerStore, start: int, end: int) -> tuple[np.ndarray, ...]:
        if isinstance(store, KvCache):
            return store.copy(start, end)
        return (_recurrent(store).copy(),)

    def restore(
        self,
        store: LayerStore,
        parts: tuple[HeldArray, ...],
        start: int = 0,
        end: int = 0,
        first: int = 0,
    ) -> None:
        if isinstance(store, KvCache):
            if parts:
                store.put(tuple(map(np.asarray, parts)), start, end, first)
            return
        _recurrent(store)[...] = np.asarray(parts[0]) if parts else 0.0

    def _multiply(
        self,
        x: CpuMatmulInput,
        weight: Weight,
        out: np.ndarray,
        *,
        bias: np.ndarray | None = None,
        accumulate: bool = False,
        rows_word: int = NUM_TOKENS,
    ) -> None:
        program, rows = self._recording, x.rows if weight.form.is_float else x.quantized
        if rows is None:
            buffer = x.buffer.view(np.uint8)
            rows = record_quantize(program, self.step, x.rows, buffer=buffer, rows_word=rows_word)
            x.quantized = rows
        operands = program, self.step, rows, weight, out
        record_linear(*operands, bias=bias, accumulate=accumulate, rows_word=rows_word)

    def _take(self, width: int, num_rows: int = 0) -> np.ndarray:
        """Until the scope ends; 0: as many rows as a pass may have."""
        return self._workspace.scratch.take(num_rows or self.step.max_tokens, width)

    @property
    def _recording(self) -> Program:
        assert self._program is not None, "operations are called inside capture()"
        return self._program


def _recurrent(store: LayerStore) -> np.ndarray:
    return store.window if isinstance(store, ConvState) else narrow(store, DeltaState).state
