"""Gated delta net: a short convolution, then one recurrent matrix per head instead of keys and
values.
"""

from dataclasses import dataclass

from draftree.kernels.ops import Array, LayerStore, MatmulInput, Ops, narrow
from draftree.layers.attention import Projection, project


@dataclass(frozen=True, slots=True)
class RecurrentState(LayerStore):
    """What one delta net layer remembers."""

    conv: LayerStore
    delta: LayerStore


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """qkv holds all queries, then all keys, then all values; value head j uses key head j %
    key_heads.
    """

    qkv: Projection
    gate: Projection
    alpha: Projection
    beta: Projection
    output: Projection
    conv_weight: Array  # [channels, kernel_len]
    decay: Array  # [value_heads], negative
    decay_bias: Array  # [value_heads]
    norm: Array  # [head_dim]
    eps: float
    key_heads: int
    value_heads: int
    head_dim: int
    kernel_len: int

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * self.head_dim

    def new_state(self, ops: Ops) -> RecurrentState:
        return RecurrentState(
            ops.new_conv(self.channels, self.kernel_len),
            ops.new_delta(self.key_heads, self.value_heads, self.head_dim),
        )

    def __call__(self, ops: Ops, x: MatmulInput, state: LayerStore, *, add_to: Array) -> None:
        own = narrow(state, RecurrentState)
        qkv, z, alpha, beta = project(ops, x, self.qkv, self.gate, self.alpha, self.beta)
        gates = alpha, beta, self.decay, self.decay_bias
        mixed = ops.conv_gated_delta(qkv, self.conv_weight, own.conv, *gates, own.delta)
        self.output(ops, ops.gated_norm(mixed, z, self.norm, self.eps), add_to=add_to)
