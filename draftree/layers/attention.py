"""Grouped-query attention, with optional biases, per-head norms and an output gate."""

from dataclasses import dataclass

from draftree.kernels.ops import Array, KvState, Ops, Weight
from draftree.layers.rotary import Rotary


@dataclass(frozen=True, slots=True)
class Projection:
    """x @ weight.T + bias."""

    weight: Weight
    bias: Array | None = None

    def __call__(self, ops: Ops, x: Array, *, add_to: Array | None = None) -> Array:
        return ops.linear(x, self.weight, bias=self.bias, add_to=add_to)


def project(ops: Ops, x: Array, *parts: Projection) -> tuple[Array, ...]:
    """Projections of the same rows."""
    return ops.linears(x, [part.weight for part in parts], [part.bias for part in parts])


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norm of every head's query or key."""

    weight: Array
    eps: float

    def __call__(self, ops: Ops, x: Array) -> None:
        ops.head_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class Attention:
    """The keys and values of a pass go into the cache first; then every row attends to what it may
    see.
    """

    query: Projection
    key: Projection
    value: Projection
    output: Projection
    rotary: Rotary
    num_kv_heads: int
    head_dim: int
    query_norm: HeadNorm | None = None
    key_norm: HeadNorm | None = None
    gate: Projection | None = None
    window: int = 0
    bidirectional: bool = False

    def new_state(self, ops: Ops) -> KvState:
        return ops.new_kv(self.num_kv_heads, self.head_dim)

    def write_keys(self, ops: Ops, x: Array, cache: KvState) -> None:
        """Keys and values of x's rows, at the rows' positions."""
        k, v = project(ops, x, self.key, self.value)
        self._write(ops, k, v, cache)

    def __call__(self, ops: Ops, x: Array, cache: KvState, *, add_to: Array) -> None:
        gates = [self.gate] if self.gate else []
        if self.bidirectional:  # keys and values of the context are projected alone, too
            q, *gate = project(ops, x, self.query, *gates)
            k, v = project(ops, x, self.key, self.value)
        else:
            q, k, v, *gate = project(ops, x, self.query, self.key, self.value, *gates)
        if self.query_norm:
            self.query_norm(ops, q)
        self.rotary(ops, q)
        self._write(ops, k, v, cache)
        out = ops.attention(q, cache, window=self.window, bidirectional=self.bidirectional)
        if gate:
            out = ops.sigmoid_mul(out, *gate)
        self.output(ops, out, add_to=add_to)

    def _write(self, ops: Ops, k: Array, v: Array, cache: KvState) -> None:
        if self.key_norm:
            self.key_norm(ops, k)
        self.rotary(ops, k)
        ops.kv_write(k, v, cache)
