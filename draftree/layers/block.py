"""One decoder block: mixer and feed-forward, each behind a norm and added to the residual
stream.
"""

from dataclasses import dataclass

from draftree.kernels.ops import Array, KvState, Ops
from draftree.layers.attention import Attention, Projection, project
from draftree.layers.delta_net import DeltaNet, RecurrentState

LayerState = KvState | RecurrentState  # of an attention or a delta net layer


@dataclass(frozen=True, slots=True)
class FeedForward:
    """down(silu(gate x) * up x)."""

    gate: Projection
    up: Projection
    down: Projection

    def __call__(self, ops: Ops, x: Array, *, add_to: Array) -> None:
        self.down(ops, ops.silu_mul(*project(ops, x, self.gate, self.up)), add_to=add_to)


@dataclass(frozen=True, slots=True)
class Block:
    mixer_norm: Array
    mixer: Attention | DeltaNet
    ffn_norm: Array
    ffn: FeedForward
    eps: float

    def __call__(self, ops: Ops, x: Array, state: LayerState) -> None:
        """Updates x, the residual stream, in place."""
        with ops.scope():
            self.mixer(ops, ops.rms_norm(x, self.mixer_norm, self.eps), state, add_to=x)
        with ops.scope():
            self.ffn(ops, ops.rms_norm(x, self.ffn_norm, self.eps), add_to=x)
