"""The GPU's side of `Ops`: records kernel launches into programs and hands out their arrays.

Activations are float32 tensors, often column views of wider ones; inputs of matrix products are
kept in the products' own form, 16 or 8 bits. Passes of up to 64 rows run batch-invariant kernels;
longer ones (prefill) run cuBLAS and SDPA.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from draftree.kernels import ops
from draftree.kernels.cuda import attention as attend
from draftree.kernels.cuda import prepare
from draftree.kernels.cuda.attention_prefill import prefill_attention
from draftree.kernels.cuda.conv import ConvArena, Convolution, CudaConv, conv, conv_commit
from draftree.kernels.cuda.copies import DeviceCopies
from draftree.kernels.cuda.embed import embed
from draftree.kernels.cuda.gated_delta import CudaDelta, DeltaArena, delta_commit, gated_delta
from draftree.kernels.cuda.gated_delta_prefill import gated_delta_prefill
from draftree.kernels.cuda.heads import CudaHeads
from draftree.kernels.cuda.kv_cache import CudaKv, KeyAngles, KvArena, key_angles, kv_commit
from draftree.kernels.cuda.kv_centre import measure_centre
from draftree.kernels.cuda.layout import PackedMatrix, stacked_format
from draftree.kernels.cuda.pass_args import NUM_ROWS, NUM_TOKENS, CudaPassArgs
from draftree.kernels.cuda.prefill import prefill_linear
from draftree.kernels.cuda.product import make_input, multiply
from draftree.kernels.cuda.program import MOST_ROWS, Launch, Program
from draftree.kernels.cuda.rotary import RopeArgs, rope_and_store_kv, rope_table
from draftree.kernels.cuda.rows import block_conv, copy_columns, norm_rows
from draftree.kernels.cuda.scratch import CudaMatmulInput, Scratch
from draftree.kernels.cuda.store import LazyMatrix, WeightStore
from draftree.kernels.ops import Columns, Heads, LayerStore, MatmulInput, Rope, narrow
from draftree.kernels.quant.formats import QuantType
from draftree.kernels.quant.kv_format import KEY_FORMATS, VALUE_FORMATS, KvFormat


class CudaOps:
    """For passes of at most max_tokens rows (trees: max_nodes) over max_ctx positions."""

    def __init__(
        self,
        store: WeightStore,
        *,
        max_tokens: int,
        max_nodes: int,
        max_ctx: int,
        key_format: KvFormat = KEY_FORMATS["f16"],
        value_format: KvFormat = VALUE_FORMATS["f16"],
        ring_len: int = 0,
        is_persistent: bool = False,
        copies: DeviceCopies | None = None,
    ) -> None:
        """ring_len: caches hold so many of the last positions; 0: all. copies: where copies of
        what layers remember lie; None: in main memory. is_persistent: short passes are one kernel
        each.
        """
        self.is_persistent = is_persistent
        self.gpu = store.gpu.without_warpgroups() if is_persistent else store.gpu
        self.max_ctx, self.ring_len = max_ctx, ring_len
        self.step = CudaPassArgs(max_tokens, max_nodes, store.gpu)
        self.weights = store
        self._copies = copies or DeviceCopies(0, store.gpu)
        self._scratch = Scratch(max_tokens, store.gpu)
        self._program: Program | None = None
        self._key_format = key_format
        self._kv = KvArena(max_ctx + max_nodes, store.gpu, key_format, value_format, ring_len)
        self._conv, self._delta = ConvArena(max_nodes, store.gpu), DeltaArena(max_nodes, store.gpu)
        self._attention: attend.AttentionWorkspace | None = None
        self._angles: KeyAngles | None = None

    @contextmanager
    def capture(self) -> Iterator[Program]:
        """Operations called inside are recorded into the program that this yields."""
        assert self._program is None, "captures do not nest"
        self._program = Program(self.step, self.gpu, is_persistent=self.is_persistent)
        try:
            yield self._program
        finally:
            self._program = None

    @contextmanager
    def scope(self) -> Iterator[None]:
        with self._scratch.scope():
            yield

    def pack(self, raw: np.ndarray, qtype: QuantType) -> LazyMatrix:
        return LazyMatrix(raw, qtype)

    def constant(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(values, dtype=np.float32)).to(self.gpu.place)

    def rope_table(self, inv_freq: np.ndarray) -> torch.Tensor:
        return rope_table(inv_freq, self.max_ctx + self.step.max_tokens, self.gpu)

    def new_kv(
        self, num_kv_heads: int, head_dim: int, centre: torch.Tensor | None = None
    ) -> CudaKv:
        if not self._key_format.is_centred(head_dim, has_bias=centre is not None):
            return self._kv.new(num_kv_heads, head_dim)
        zeros = self.constant(np.zeros(num_kv_heads * head_dim))
        return self._kv.new(num_kv_heads, head_dim, zeros if centre is None else centre)

    def centre_keys(self, store: ops.KvState, first: int, end: int) -> None:
        measure_centre(narrow(store, CudaKv), first, end, self.gpu)

    def new_conv(self, channels: int, kernel_len: int) -> CudaConv:
        return self._conv.new(channels, kernel_len)

    def new_delta(self, key_heads: int, value_heads: int, head_dim: int) -> CudaDelta:
        return self._delta.new(key_heads, value_heads, head_dim)

    def new_rows(self, width: int, num_rows: int = 0) -> torch.Tensor:
        return torch.zeros((num_rows or self.step.max_tokens, width), device=self.gpu.place)

    def read(self, x: torch.Tensor, num_rows: int) -> np.ndarray:
        return x[:num_rows].cpu().numpy()

    def embed(self, raw: np.ndarray, qtype: QuantType) -> torch.Tensor:
        table, tokens = self.weights.table(raw, qtype), self.step.tokens
        out = self._scratch.rows(table.width)
        self._recording.add(lambda n: embed(table, tokens[:n], out[:n], self._live, self.gpu))
        return out

    def matmul_input(self, x: torch.Tensor) -> CudaMatmulInput:
        return self._prepare(x, lambda n: prepare.plain(x[:n]))

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, copy_to: Columns | None = None
    ) -> CudaMatmulInput:
        def source(n: int) -> prepare.RowSource:
            copy = None
            if copy_to is not None:
                copy = copy_to.array[:n, copy_to.first : copy_to.first + x.shape[1]]
            return prepare.norm(x[:n], weight, eps, copy=copy)

        return self._prepare(x, source)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = self._scratch.rows(x.shape[1])
        self._recording.add(
            lambda n: norm_rows(x[:n], weight, eps, out[:n], self.gpu, live=self._live)
        )
        return out

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> CudaMatmulInput:
        return self._prepare(gate, lambda n: prepare.silu_mul(gate[:n], up[:n]))

    def sigmoid_mul(self, x: torch.Tensor, gate: torch.Tensor) -> CudaMatmulInput:
        return self._prepare(x, lambda n: prepare.sigmoid_mul(x[:n], gate[:n]))

    def gated_norm(
        self, x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> CudaMatmulInput:
        return self._prepare(x, lambda n: prepare.gated_norm(x[:n], z[:n], weight, eps))

    def linear(
        self,
        x: MatmulInput,
        weight: ops.Weight,
        *,
        bias: torch.Tensor | None = None,
        add_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        lazy = narrow(weight, LazyMatrix)
        out = self._scratch.rows(lazy.num_rows) if add_to is None else add_to
        self._multiply(x, self.weights.matrix(lazy), out, bias=bias, add_to=add_to is not None)
        return out

    def linears(
        self, x: MatmulInput, weights: Sequence[ops.Weight], biases: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor, ...]:
        lazy = [narrow(weight, LazyMatrix) for weight in weights]
        outs: dict[int, torch.Tensor] = {}
        for group in _stackable(lazy):
            parts = [lazy[i] for i in group]
            bias = self.weights.bias(parts, [biases[i] for i in group])
            wide = self._scratch.rows(sum(part.num_rows for part in parts))
            self._multiply(x, self.weights.matrix(*parts), wide, bias=bias)
            columns = wide.split([part.num_rows for part in parts], dim=1)
            outs.update(zip(group, columns, strict=True))
        return tuple(outs[i] for i in range(len(weights)))

    def rope_and_store_kv(
        self, q: Heads | None, k: Heads, v: torch.Tensor, cache: ops.KvState, rope: Rope
    ) -> None:
        queries = None if q is None else _rope_args(q, rope)
        keys, own = _rope_args(k, rope), narrow(cache, CudaKv)
        if q is not None and own.shape.is_centred:
            own.angles = self._key_angles(rope, q.x.shape[1] // rope.head_dim)

        def launch(n: int) -> None:
            first = None if queries is None else queries.first(n)
            rope_and_store_kv(first, keys.first(n), v[:n], own, self.step, self.gpu)

        self._recording.add(launch)

    def _key_angles(self, rope: Rope, num_heads: int) -> KeyAngles:
        """One for all layers."""
        if self._angles is None:
            args = rope.interleaved, rope.head_dim, self.step.max_tokens, num_heads
            self._angles = key_angles(rope.table, *args)
        return self._angles

    def new_heads(self) -> CudaHeads:
        return CudaHeads(self.max_ctx, self.gpu)

    def keep_heads(self, q: Heads, k: Heads, rope: Rope, store: ops.HeadStore) -> None:
        layer = narrow(store, CudaHeads).add_layer(_rope_args(q, rope), _rope_args(k, rope))
        self._recording.add(lambda n: layer.keep(n, self.step, self.gpu))

    def attention(
        self, q: torch.Tensor, cache: ops.KvState, *, window: int = 0, bidirectional: bool = False
    ) -> torch.Tensor:
        own = narrow(cache, CudaKv)
        out = self._scratch.rows(q.shape[1])
        heads = q.shape[1] // own.head_dim
        if self._attention is None:
            rows = min(self.step.max_tokens, MOST_ROWS)
            sizes = rows, heads, own.shape, min(self.max_ctx, self.ring_len or self.max_ctx)
            self._attention = attend.new_attention_workspace(*sizes, self.gpu, self.ring_len > 0)
        workspace = self._attention

        def launch(n: int) -> None:
            if n <= MOST_ROWS:
                args = q[:n], own, self.step, out[:n], workspace, self.gpu
                attend.attention(*args, window=window, bidirectional=bidirectional)
            else:
                prefill_attention(q[:n], own, self.step, out[:n], self.gpu, window=window)

        self._recording.add(launch, is_host_sized=True)
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
        window, state = narrow(conv_state, CudaConv), narrow(delta_state, CudaDelta)
        out = self._scratch.rows(state.value_heads * state.head_dim)
        convolved = self._scratch.rows(qkv.shape[1])

        def launch(n: int) -> None:
            raw = Convolution(qkv[:n], conv_weight, window)
            others = alpha[:n], beta[:n], decay, decay_bias, state
            if n <= MOST_ROWS:
                gated_delta(raw, *others, self.step, out[:n], self.gpu)
            else:
                rows = conv(raw, self.step, convolved[:n], self.gpu)
                gated_delta_prefill(rows, *others, self.step, out[:n], self.gpu)

        self._recording.add(launch)
        return out

    def block_conv(
        self,
        x: torch.Tensor,
        own: torch.Tensor,
        base: torch.Tensor,
        *,
        add_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        is_added = add_to is not None
        out = self._scratch.rows(x.shape[1]) if add_to is None else add_to

        def launch(n: int) -> None:
            rows = x[:n], own[:n], base, out[:n]
            block_conv(*rows, self.gpu, live=self._live, is_added=is_added)

        self._recording.add(launch)
        return out

    def head(
        self, x: torch.Tensor, norm: torch.Tensor, eps: float, weight: ops.Weight
    ) -> torch.Tensor:
        live, rows = self.step.word(NUM_ROWS), self.step.rows
        matrix = self.weights.matrix(narrow(weight, LazyMatrix))
        width = -(-matrix.num_rows // 4) * 4  # rows start at multiples of 16 bytes
        logits = torch.zeros((self.step.max_nodes, width), device=self.gpu.place)
        logits = logits[:, : matrix.num_rows]
        source = self._scratch.matmul_input(
            x.shape[1], lambda n: prepare.norm(x, norm, eps, rows=rows[:n])
        )

        def launch(n: int) -> None:
            n = min(n, self.step.max_nodes)
            make_input(source, n, self.gpu, live)
            multiply(source, matrix, logits[:n], self.weights.workspace, self.gpu, live=live)

        self._recording.by_rows = True
        self._recording.add(launch)
        return logits

    def copy_columns(self, x: torch.Tensor, into: Columns) -> None:
        self._recording.add(
            lambda n: copy_columns(x[:n], into.array, into.first, self.gpu, live=self._live)
        )

    def commit(self, stores: Sequence[LayerStore]) -> None:
        """One launch for all layers of a kind."""
        launches: dict[type[LayerStore], Launch] = {
            CudaKv: lambda n: kv_commit(self._kv, self.step, self.gpu),
            CudaConv: lambda n: conv_commit(self._conv, self.step, self.gpu),
            CudaDelta: lambda n: delta_commit(self._delta, self.step, self.gpu),
        }
        for kind in dict.fromkeys(type(store) for store in stores):
            self._recording.add(launches[kind])

    def snapshot(self, store: LayerStore, start: int, end: int) -> tuple[ops.HeldArray, ...]:
        if isinstance(store, CudaKv):  # which is worth less: keys and values are mostly at hand
            keep = partial(self._copies.keep, moves_others=False)
            return tuple(map(keep, store.rows(start, end)))
        return tuple(map(self._copies.keep, _recurrent(store).snapshot(end)))

    def restore(
        self,
        store: LayerStore,
        parts: tuple[ops.HeldArray, ...],
        start: int = 0,
        end: int = 0,
        first: int = 0,
    ) -> None:
        arrays = tuple(map(self._copies.read, parts))
        if not isinstance(store, CudaKv):
            _recurrent(store).restore(arrays)
        elif arrays:
            first, end = max(start, first), end or start + arrays[0].shape[1]
            store.put(tuple(array[:, first - start : end - start] for array in arrays), first)

    def _multiply(
        self,
        x: MatmulInput,
        matrix: PackedMatrix,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        add_to: bool = False,
    ) -> None:
        workspace, gpu, rows = self.weights.workspace, self.gpu, narrow(x, CudaMatmulInput)

        def launch(n: int) -> None:
            to, live = out[:n], self._live
            if n <= MOST_ROWS:
                multiply(rows, matrix, to, workspace, gpu, live=live, bias=bias, add_to=add_to)
            else:
                prefill_linear(matrix, rows.halves, to, gpu, bias=bias, add_to=add_to)

        self._recording.add(launch)

    def _prepare(
        self, x: torch.Tensor, source: Callable[[int], prepare.RowSource]
    ) -> CudaMatmulInput:
        into = self._scratch.matmul_input(x.shape[1], source)
        self._recording.add(lambda n: make_input(into, n, self.gpu, self._live))
        return into

    @property
    def _live(self) -> torch.Tensor:
        return self.step.word(NUM_TOKENS)

    @property
    def _recording(self) -> Program:
        assert self._program is not None, "operations are called inside capture()"
        return self._program


def _rope_args(heads: Heads, rope: Rope) -> RopeArgs:
    weight, eps = heads.norm or (None, 0.0)
    return RopeArgs(heads.x, weight, eps, rope.head_dim, rope.table, rope.interleaved)


def _recurrent(store: LayerStore) -> CudaConv | CudaDelta:
    return store if isinstance(store, CudaConv) else narrow(store, CudaDelta)


def _stackable(weights: Sequence[LazyMatrix]) -> list[list[int]]:
    """Indices of matrices that can be one, their results side by side in aligned columns."""
    groups: list[list[int]] = []
    for i, weight in enumerate(weights):
        for group in groups:
            members = [weights[j] for j in group] + [weight]
            is_aligned = all(member.num_rows % 4 == 0 for member in members)
            if is_aligned and stacked_format(member.qtype for member in members):
                group.append(i)
                break
        else:
            groups.append([i])
    return groups
