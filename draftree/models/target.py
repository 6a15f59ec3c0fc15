"""A model bound to the arrays of one sequence: what a pass computes is recorded once and run many
times.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from draftree.kernels.ops import Array, KvState, LayerStore, Ops, PassArgs, Runnable
from draftree.layers.delta_net import RecurrentState
from draftree.models.model import Model
from draftree.state.sequence import SequenceState


class ForwardOutput(NamedTuple):
    """Views that the next pass overwrites."""

    logits: np.ndarray  # [num_rows, vocab_size], for the rows that were asked for
    features: Array | None  # on the device: [num_nodes, num_feature_layers * hidden_size]


class TargetPrograms(NamedTuple):
    """What a pass is made of, and where its results are."""

    body: Runnable
    head: Runnable
    commit: Runnable
    logits: Array
    features: Array | None


def new_sequence(
    model: Model, ops: Ops, max_ctx: int
) -> tuple[tuple[LayerStore, ...], SequenceState]:
    """Empty: what each layer remembers, and all of it together."""
    layers = model.new_state(ops)
    kv = tuple(layer for layer in layers if isinstance(layer, KvState))
    recurrent = tuple(
        store
        for layer in layers
        if isinstance(layer, RecurrentState)
        for store in (layer.conv, layer.delta)
    )
    return layers, SequenceState(ops, kv, max_ctx, recurrent)


class Target:
    """Runs the pass that its state has begun."""

    def __init__(
        self, model: Model, ops: Ops, max_ctx: int, feature_layers: tuple[int, ...] = ()
    ) -> None:
        self.model = model
        self._ops = ops
        layers, self.state = new_sequence(model, ops, max_ctx)
        self.kv = tuple(layer for layer in layers if isinstance(layer, KvState))
        self.feature_layers = feature_layers
        self._centred = [cache for cache in self.kv if cache.centre is not None]
        self.num_forwards = 0
        width = len(feature_layers) * model.hidden_size
        self._features = ops.new_rows(width) if feature_layers else None
        with ops.scope():
            with ops.capture() as self._body:
                hidden = model.record_body(ops, layers, feature_layers, self._features)
            with ops.capture() as self._head:
                self._logits = model.record_head(ops, hidden)

    @property
    def step(self) -> PassArgs:
        """What a pass runs over, for those who set it up themselves."""
        return self._ops.step

    @property
    def has_centred_keys(self) -> bool:
        return bool(self._centred)

    def centre_keys(self, first: int, end: int) -> None:
        """What keys at positions first … end-1 have in common is taken from all to come."""
        for cache in self._centred:
            self._ops.centre_keys(cache, first, end)

    def programs(self) -> TargetPrograms:
        """For devices that run whole rounds by themselves."""
        return TargetPrograms(
            self._body, self._head, self.state.commit_program(), self._logits, self._features
        )

    def forward(self, rows: Sequence[int]) -> ForwardOutput:
        """One pass over what state.begin() was given; logits for those of its nodes that rows
        names.
        """
        self.num_forwards += 1
        if rows:
            self._ops.step.set_rows(rows)
        self._body.run()
        if rows:
            self._head.run()
        return ForwardOutput(self._ops.read(self._logits, len(rows)), self._features)
