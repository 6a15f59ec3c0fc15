"""A target's model over several sequences: passes of one row of each.

For every number of rows a program is recorded when it is first needed; sequences are made as they
are.
"""

from collections.abc import Callable, Sequence

from draftree.core import DraftTree
from draftree.kernels.ops import (
    Array,
    BatchedKv,
    BatchedStores,
    BatchOps,
    KvState,
    LayerStore,
    Ops,
    Runnable,
)
from draftree.layers.delta_net import RecurrentState
from draftree.models.target import ForwardOutput, Target, new_sequence
from draftree.state.sequence import SequenceState


class BatchTarget:
    """Sequence i is row i: those of a pass are the first ones."""

    def __init__(
        self,
        target: Target,
        members: Sequence[Ops],
        new_batch_ops: Callable[[Sequence[Ops]], BatchOps],
    ) -> None:
        self._target, self._members = target, members
        self._ops = new_batch_ops(members)
        self.states: list[SequenceState] = []
        self._layers: list[tuple[LayerStore, ...]] = []
        self._programs: dict[int, tuple[Runnable, Array]] = {}
        width = len(target.feature_layers) * target.model.hidden_size
        self._features = self._ops.new_rows(width) if width else None

    def prepare(self, num_rows: int) -> None:
        """All that passes of so many rows need, which takes a moment when it is new."""
        while len(self.states) < num_rows:
            self._add_sequence()
        if num_rows not in self._programs:
            self._programs[num_rows] = self._record(num_rows)

    @property
    def feature_bytes(self) -> int:
        """Of a row; 0: there are none."""
        return 4 * self._features.shape[1] if self._features is not None else 0

    def forward(self, anchors: Sequence[int]) -> ForwardOutput:
        """Run and commit the next token of each of the first sequences. Features are in main
        memory.
        """
        num_rows = len(anchors)
        self.prepare(num_rows)
        states = self.states[:num_rows]
        self._ops.set_batch(anchors, [state.committed for state in states])
        for state, anchor in zip(states, anchors, strict=True):
            state.begin(DraftTree.chain((anchor,)), is_committed=True)
        program, logits = self._programs[num_rows]
        self._target.num_forwards += 1
        program.run()
        for state in states:
            state.commit((0,))
        features = None if self._features is None else self._ops.read(self._features, num_rows)
        return ForwardOutput(self._ops.read(logits, num_rows), features)

    def _add_sequence(self) -> None:
        target, ops = self._target, self._members[len(self.states)]
        layers, state = new_sequence(target.model, ops, target.state.max_ctx)
        own = [layer for layer in layers if isinstance(layer, KvState)]
        for cache, known in zip(own, target.kv, strict=True):
            cache.centre = known.centre
        self.states.append(state)
        self._layers.append(layers)

    def _record(self, num_rows: int) -> tuple[Runnable, Array]:
        ops, target = self._ops, self._target
        layers = tuple(map(_join, zip(*self._layers[:num_rows], strict=True)))
        with ops.scope(), ops.capture() as program:
            features = target.feature_layers, self._features
            hidden = target.model.record_body(ops, layers, *features)
            logits = target.model.record_head(ops, hidden)
        return program, logits


def _join(stores: Sequence[LayerStore]) -> LayerStore:
    """One layer's."""
    pairs = [store for store in stores if isinstance(store, RecurrentState)]
    if not pairs:
        return BatchedKv(stores)
    convs, deltas = [pair.conv for pair in pairs], [pair.delta for pair in pairs]
    return RecurrentState(BatchedStores(convs), BatchedStores(deltas))
