"""The GPU's side of `Ops`: records kernel launches into programs and hands out their arrays.

Activations are float32 tensors, often column views of wider ones; inputs of matrix products are
kept in the products' own 16-bit form. Passes of up to 64 rows run the kernels whose bits do not
depend on company; longer ones (prefill) run the vendor's matmul and attention.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from draftree.kernels.cuda.attention import (
    AttentionWorkspace,
    attention,
    new_attention_workspace,
)
from draftree.kernels.cuda.attention_prefill import prefill_attention
from draftree.kernels.cuda.conv import ConvArena, Convolution, CudaConv, conv, conv_commit
from draftree.kernels.cuda.embed import embed
from draftree.kernels.cuda.gated_delta import CudaDelta, DeltaArena, delta_commit, gated_delta
from draftree.kernels.cuda.gated_delta_prefill import gated_delta_prefill
from draftree.kernels.cuda.kv_cache import CudaKv, KvArena, kv_commit
from draftree.kernels.cuda.layout import PackedMatrix, stacked_format
from draftree.kernels.cuda.linear import Activations, linear
from draftree.kernels.cuda.prefill import prefill_linear
from draftree.kernels.cuda.prepare import (
    HalfRows,
    gated_norm_prepare,
    norm_prepare,
    prepare_plain,
    sigmoid_mul_prepare,
    silu_mul_prepare,
)
from draftree.kernels.cuda.program import MOST_ROWS, Launch, Program
from draftree.kernels.cuda.rotary import Turn, rope_table, turn_and_write
from draftree.kernels.cuda.rows import copy_columns
from draftree.kernels.cuda.scratch import MatmulInput, Scratch
from draftree.kernels.cuda.step import NUM_ROWS, NUM_TOKENS, CudaStep
from draftree.kernels.cuda.store import LazyMatrix, WeightStore
from draftree.kernels.quant.formats import QuantType

Store = CudaKv | CudaConv | CudaDelta


class CudaOps:
    """Operations for passes of at most max_tokens rows (trees: max_nodes) over max_ctx
    positions.
    """

    def __init__(
        self, store: WeightStore, *, max_tokens: int, max_nodes: int, max_ctx: int
    ) -> None:
        self.gpu, self.max_ctx = store.gpu, max_ctx
        self.step = CudaStep(max_tokens, max_nodes, store.gpu)
        self._weights = store
        self._scratch = Scratch(max_tokens, store.gpu)
        self._program: Program | None = None
        self._inputs: dict[int, MatmulInput] = {}  # by address of the rows they were made from
        self._norms: dict[int, tuple[torch.Tensor, float]] = {}  # of heads that are turned next
        self._turns: list[Turn] = []  # of queries and keys that are written next
        self._copy: tuple[torch.Tensor, torch.Tensor, int] | None = None  # rows, and where to
        self._kv = KvArena(max_ctx + max_nodes, store.gpu)
        self._conv = ConvArena(max_nodes, store.gpu)
        self._delta = DeltaArena(max_nodes, store.gpu)
        self._attention: AttentionWorkspace | None = None
        self._committed: set[type] = set()  # kinds of state that the program commits already

    @contextmanager
    def capture(self) -> Iterator[Program]:
        """Operations called inside are recorded into the program that this yields."""
        assert self._program is None, "captures do not nest"
        self._program, self._inputs, self._committed = Program(self.step, self.gpu), {}, set()
        try:
            yield self._program
            self._add_copy()
        finally:
            self._program = self._copy = None

    @contextmanager
    def scope(self) -> Iterator[None]:
        with self._scratch.scope():
            yield
        self._inputs = {}  # their memory may be taken again

    def pack(self, raw: np.ndarray, qtype: QuantType) -> LazyMatrix:
        return LazyMatrix(raw, qtype)

    def constant(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(values, dtype=np.float32)).to(self.gpu.place)

    def rope_table(self, inv_freq: np.ndarray) -> torch.Tensor:
        return rope_table(inv_freq, self.max_ctx + self.step.max_tokens, self.gpu)

    def new_kv(self, num_kv_heads: int, head_dim: int) -> CudaKv:
        return self._kv.new(num_kv_heads, head_dim)

    def new_conv(self, channels: int, kernel_len: int) -> CudaConv:
        return self._conv.new(channels, kernel_len)

    def new_delta(self, key_heads: int, value_heads: int, head_dim: int) -> CudaDelta:
        return self._delta.new(key_heads, value_heads, head_dim)

    def new_rows(self, width: int, num_rows: int = 0) -> torch.Tensor:
        return torch.zeros((num_rows or self.step.max_tokens, width), device=self.gpu.place)

    def read(self, x: torch.Tensor, num_rows: int) -> np.ndarray:
        return x[:num_rows].cpu().numpy()

    def embed(self, raw: np.ndarray, qtype: QuantType) -> torch.Tensor:
        table, tokens = self._weights.table(raw, qtype), self.step.tokens
        out = self._scratch.rows(table.width)
        self._add(lambda n: embed(table, tokens[:n], out[:n], self._live, self.gpu))
        return out

    def linear(
        self,
        x: torch.Tensor | MatmulInput,
        weight: LazyMatrix,
        *,
        bias: torch.Tensor | None = None,
        add_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = self._scratch.rows(weight.num_rows) if add_to is None else add_to
        matrix = self._weights.matrix(weight)
        self._multiply(self._input(x), matrix, out, bias=bias, add_to=add_to is not None)
        return out

    def linears(
        self,
        x: torch.Tensor | MatmulInput,
        weights: Sequence[LazyMatrix],
        biases: Sequence[torch.Tensor | None],
    ) -> tuple[torch.Tensor, ...]:
        source = self._input(x)
        outs: dict[int, torch.Tensor] = {}
        for group in _stackable(weights):
            parts = [weights[i] for i in group]
            bias = self._weights.bias(parts, [biases[i] for i in group])
            wide = self._scratch.rows(sum(part.num_rows for part in parts))
            self._multiply(source, self._weights.matrix(*parts), wide, bias=bias)
            columns = wide.split([part.num_rows for part in parts], dim=1)
            outs.update(zip(group, columns, strict=True))
        return tuple(outs[i] for i in range(len(weights)))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> MatmulInput:
        copy = None  # a copy of the same rows is made on the way
        if self._copy is not None and self._copy[0] is x:
            (_, into, column), self._copy = self._copy, None
            copy = into[:, column : column + x.shape[1]]

        def fill(n: int, to: Activations | HalfRows) -> None:
            part = None if copy is None else copy[:n]
            norm_prepare(x[:n], weight, eps, to, self.gpu, live=self._live, copy=part)

        return self._prepare(x.shape[1], fill)

    def head_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        self._norms[x.data_ptr()] = (weight, eps)  # done together with the turn that follows

    def rope(
        self, x: torch.Tensor, head_dim: int, table: torch.Tensor, *, interleaved: bool
    ) -> None:
        """Queries and keys wait for the values: one launch turns both and writes the cache."""
        norm = self._norms.pop(x.data_ptr(), (None, 0.0))
        self._turns.append(Turn(x, *norm, head_dim, table, interleaved))

    def kv_write(self, k: torch.Tensor, v: torch.Tensor, cache: CudaKv) -> None:
        turns, self._turns = self._turns, []
        *queries, keys = turns or [Turn(k, None, 0.0, cache.head_dim, None, False)]
        assert len(queries) <= 1 and keys.x is k, "keys are turned after queries, then written"

        def launch(n: int) -> None:
            q = queries[0].first(n) if queries else None
            turn_and_write(q, keys.first(n), v[:n], cache, self.step, self.gpu)

        self._add(launch)

    def attention(
        self, q: torch.Tensor, cache: CudaKv, *, window: int = 0, bidirectional: bool = False
    ) -> torch.Tensor:
        assert not self._norms and not self._turns, "heads were not turned before they are read"
        out = self._scratch.rows(q.shape[1])
        heads = q.shape[1] // cache.head_dim
        if self._attention is None:
            rows = min(self.step.max_tokens, MOST_ROWS)
            self._attention = new_attention_workspace(
                rows, heads, cache.head_dim, self.max_ctx, self.gpu
            )
        workspace = self._attention

        def launch(n: int) -> None:
            if n <= MOST_ROWS:
                attention(
                    q[:n],
                    cache,
                    self.step,
                    out[:n],
                    workspace,
                    self.gpu,
                    window=window,
                    bidirectional=bidirectional,
                )
            else:
                prefill_attention(q[:n], cache, self.step, out[:n], window=window)

        self._add(launch)
        return out

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> MatmulInput:
        return self._prepare(
            gate.shape[1],
            lambda n, to: silu_mul_prepare(gate[:n], up[:n], to, self.gpu, live=self._live),
        )

    def sigmoid_mul(self, x: torch.Tensor, gate: torch.Tensor) -> MatmulInput:
        return self._prepare(
            x.shape[1],
            lambda n, to: sigmoid_mul_prepare(x[:n], gate[:n], to, self.gpu, live=self._live),
        )

    def conv(self, x: torch.Tensor, weight: torch.Tensor, state: CudaConv) -> Convolution:
        """Done by the delta rule, which alone can read it."""
        return Convolution(x, weight, state)

    def gated_delta(
        self,
        qkv: Convolution,
        alpha: torch.Tensor,
        beta: torch.Tensor,
        decay: torch.Tensor,
        decay_bias: torch.Tensor,
        state: CudaDelta,
    ) -> torch.Tensor:
        out = self._scratch.rows(state.value_heads * state.head_dim)
        convolved = self._scratch.rows(qkv.x.shape[1])

        def launch(n: int) -> None:
            raw, others = qkv._replace(x=qkv.x[:n]), (alpha[:n], beta[:n], decay, decay_bias, state)
            if n <= MOST_ROWS:
                gated_delta(raw, *others, self.step, out[:n], self.gpu)
            else:
                rows = conv(raw, self.step, convolved[:n], self.gpu)
                gated_delta_prefill(rows, *others, self.step, out[:n], self.gpu)

        self._add(launch)
        return out

    def gated_norm(
        self, x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> MatmulInput:
        return self._prepare(
            x.shape[1],
            lambda n, to: gated_norm_prepare(
                x[:n], z[:n], weight, eps, to, self.gpu, live=self._live
            ),
        )

    def head(
        self, x: torch.Tensor, norm: torch.Tensor, eps: float, weight: LazyMatrix
    ) -> torch.Tensor:
        live, rows = self.step.word(NUM_ROWS), self.step.rows
        matrix, source = self._weights.matrix(weight), self._scratch.matmul_input(x.shape[1])
        width = -(-weight.num_rows // 4) * 4  # rows start at multiples of 16 bytes
        logits = torch.zeros((self.step.max_nodes, width), device=self.gpu.place)
        logits = logits[:, : weight.num_rows]

        def launch(n: int) -> None:
            n = min(n, self.step.max_nodes)
            norm_prepare(x, norm, eps, source.tiles, self.gpu, live=live, rows=rows[:n])
            workspace = self._weights.workspace
            linear(matrix, source.tiles, logits[:n], workspace, self.gpu, live=live)

        self._recording.by_rows = True
        self._add(launch)
        return logits

    def copy_columns(self, x: torch.Tensor, into: torch.Tensor, column: int) -> None:
        """Waits for the next operation, which may do it on the way."""
        self._add_copy()
        self._copy = x, into, column

    def commit(self, store: Store) -> None:
        """One launch for all layers of a kind: only the first of them records it."""
        if type(store) in self._committed:
            return
        self._committed.add(type(store))
        if isinstance(store, CudaKv):
            self._add(lambda n: kv_commit(self._kv, self.step, self.gpu))
        elif isinstance(store, CudaConv):
            self._add(lambda n: conv_commit(self._conv, self.step, self.gpu))
        else:
            self._add(lambda n: delta_commit(self._delta, self.step, self.gpu))

    def snapshot(self, store: Store, start: int, end: int) -> tuple[np.ndarray, ...]:
        return store.snapshot(end, start) if isinstance(store, CudaKv) else store.snapshot(end)

    def restore(
        self, store: Store, parts: tuple[np.ndarray, ...], start: int = 0, end: int = 0
    ) -> None:
        if isinstance(store, CudaKv):
            store.restore(parts, start, end)
        else:
            store.restore(parts)

    def _multiply(
        self,
        x: MatmulInput,
        matrix: PackedMatrix,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        add_to: bool = False,
    ) -> None:
        workspace = self._weights.workspace

        def launch(n: int) -> None:
            to = out[:n]
            if n <= MOST_ROWS:
                options: Any = {"bias": bias, "add_to": add_to, "live": self._live}
                linear(matrix, x.tiles, to, workspace, self.gpu, **options)
            else:
                prefill_linear(matrix, x.halves, to, self.gpu, bias=bias, add_to=add_to)

        self._add(launch)
        self._inputs.pop(out.data_ptr(), None)

    def _prepare(
        self, num_cols: int, fill: Callable[[int, Activations | HalfRows], None]
    ) -> MatmulInput:
        into = self._scratch.matmul_input(num_cols)
        self._add(lambda n: fill(n, into.form(n)))
        return into

    def _input(self, x: torch.Tensor | MatmulInput) -> MatmulInput:
        """Products of the same rows share one prepared copy."""
        if isinstance(x, MatmulInput):
            return x
        known = self._inputs.get(x.data_ptr())
        if known is None or known.tiles.num_cols != x.shape[1]:
            known = self._prepare(
                x.shape[1], lambda n, to: prepare_plain(x[:n], to, self.gpu, live=self._live)
            )
            self._inputs[x.data_ptr()] = known
        return known

    def _add(self, launch: Launch) -> None:
        self._add_copy()
        self._recording.add(launch)

    def _add_copy(self) -> None:
        """The copy that waits, if one does."""
        if self._copy is not None:
            (x, into, column), self._copy = self._copy, None
            self._recording.add(
                lambda n: copy_columns(x[:n], into, column, self.gpu, live=self._live)
            )

    @property
    def _live(self) -> torch.Tensor:
        return self.step.word(NUM_TOKENS)

    @property
    def _recording(self) -> Program:
        assert self._program is not None, "operations are called inside capture()"
        return self._program


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
