"""Grouped-query attention, with optional biases, per-head norms and an output gate."""

from dataclasses import dataclass

from draftree.kernels.ops import (
    Array,
    HeadNorm,
    Heads,
    KvState,
    LayerStore,
    MatmulInput,
    Ops,
    Rope,
    Weight,
    narrow,
)


@dataclass(frozen=True, slots=True)
class Projection:
    """x @ weight.T + bias."""

    weight: Weight
    bias: Array | None = None

    def __call__(self, ops: Ops, x: MatmulInput, *, add_to: Array | None = None) -> Array:
        return ops.linear(x, self.weight, bias=self.bias, add_to=add_to)


def project(ops: Ops, x: MatmulInput, *parts: Projection) -> tuple[Array, ...]:
    """Projections of the same rows."""
    return ops.linears(x, [part.weight for part in parts], [part.bias for part in parts])


@dataclass(frozen=True, slots=True)
class Attention:
    """The keys and values of a pass go into the cache first; then every row attends to what it may
    see.
    """

    query: Projection
    key: Projection
    value: Projection
    output: Projection
    rope: Rope
    num_kv_heads: int
    head_dim: int
    query_norm: HeadNorm | None = None
    key_norm: HeadNorm | None = None
    gate: Projection | None = None
    window: int = 0
    bidirectional: bool = False

    def new_state(self, ops: Ops) -> KvState:
        centre = None if self.key_norm else self.key.bias
        return ops.new_kv(self.num_kv_heads, self.head_dim, centre)

    def write_keys(self, ops: Ops, x: MatmulInput, cache: KvState) -> None:
        """Keys and values of x's rows, at the rows' positions."""
        k, v = project(ops, x, self.key, self.value)
        ops.rope_and_store_kv(None, Heads(k, self.key_norm), v, cache, self.rope)

    def project_heads(self, ops: Ops, x: MatmulInput) -> tuple[Heads, Heads, Array, list[Array]]:
        """Queries and keys before they are rotated, values, and the gate, where there is one."""
        gates = [self.gate] if self.gate else []
        if self.bidirectional:  # keys and values of the context are projected alone, too
            q, *gate = project(ops, x, self.query, *gates)
            k, v = project(ops, x, self.key, self.value)
        else:
            q, k, v, *gate = project(ops, x, self.query, self.key, self.value, *gates)
        return Heads(q, self.query_norm), Heads(k, self.key_norm), v, gate

    def __call__(
        self, ops: Ops, x: MatmulInput, state: LayerStore, *, add_to: Array | None = None
    ) -> Array:
        cache = narrow(state, KvState)
        q, k, v, gate = self.project_heads(ops, x)
        ops.rope_and_store_kv(q, k, v, cache, self.rope)
        out = ops.attention(q.x, cache, window=self.window, bidirectional=self.bidirectional)
        gated = ops.sigmoid_mul(out, *gate) if gate else ops.matmul_input(out)
        return self.output(ops, gated, add_to=add_to)
