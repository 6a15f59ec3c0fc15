"""A model bound to the arrays of one sequence: what a pass computes is recorded once and run many
times.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftree.kernels.ops import Array, Ops
from draftree.layers.delta_net import RecurrentState
from draftree.models.model import Model
from draftree.state.sequence import SequenceState


@dataclass(frozen=True, slots=True)
class Verified:
    """Views that the next pass overwrites."""

    logits: np.ndarray  # [num_rows, vocab_size], for the rows that were asked for
    features: Array | None  # on the device: [num_nodes, num_feature_layers * hidden_size]


class Target:
    """Runs the pass that its state has begun."""

    def __init__(
        self, model: Model, ops: Ops, max_ctx: int, feature_layers: tuple[int, ...] = ()
    ) -> None:
        self.model = model
        self._ops = ops
        layers = model.new_state(ops)
        stores = []
        for layer in layers:
            is_recurrent = isinstance(layer, RecurrentState)
            stores += [layer.conv, layer.delta] if is_recurrent else [layer]
        self.state = SequenceState(ops, tuple(stores), max_ctx)
        self.num_forwards = 0
        width = len(feature_layers) * model.hidden_size
        self._features = ops.new_rows(width) if feature_layers else None
        with ops.scope():
            with ops.capture() as self._body:
                hidden = model.record_body(ops, layers, feature_layers, self._features)
            with ops.capture() as self._head:
                self._logits = model.record_head(ops, hidden)

    def forward(self, rows: Sequence[int]) -> Verified:
        """One pass over what state.begin() was given; logits for those of its nodes that rows
        names.
        """
        self._body.run()
        self.num_forwards += 1
        if rows:
            self._ops.step.set_rows(np.asarray(rows, dtype=np.int64))
            self._head.run()
        return Verified(self._ops.read(self._logits, len(rows)), self._features)
