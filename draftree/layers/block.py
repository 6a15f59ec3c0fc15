"""One decoder block: mixer and feed-forward, each behind a norm and added to the residual
stream.
"""

from dataclasses import dataclass

from draftree.kernels.ops import Array, Columns, LayerStore, MatmulInput, Ops
from draftree.layers.attention import Attention, Projection, project
from draftree.layers.delta_net import DeltaNet


@dataclass(frozen=True, slots=True)
class FeedForward:
    """down(silu(gate x) * up x)."""

    gate: Projection
    up: Projection
    down: Projection

    def __call__(self, ops: Ops, x: MatmulInput, *, add_to: Array | None = None) -> Array:
        gate, up = project(ops, x, self.gate, self.up)
        return self.down(ops, ops.silu_mul(gate, up), add_to=add_to)


@dataclass(frozen=True, slots=True)
class Block:
    mixer_norm: Array
    mixer: Attention | DeltaNet
    ffn_norm: Array
    ffn: FeedForward
    eps: float

    def __call__(
        self, ops: Ops, x: Array, state: LayerStore, *, copy_to: Columns | None = None
    ) -> None:
        """Updates x, the residual stream, in place. copy_to: gets x as it was before."""
        with ops.scope():
            normed = ops.rms_norm(x, self.mixer_norm, self.eps, copy_to=copy_to)
            self.mixer(ops, normed, state, add_to=x)
        with ops.scope():
            self.ffn(ops, ops.rms_norm(x, self.ffn_norm, self.eps), add_to=x)
