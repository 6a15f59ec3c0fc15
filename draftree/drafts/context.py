"""What drafts that read the target's features have in common: a context of their own, which goes
forward and back with the target's sequence.

In: features of committed tokens, in order. They wait until they are needed, and are then read
together. What is proposed from them is up to each kind.
"""

from collections.abc import Sequence

import numpy as np

from draftree.kernels.ops import Array, LayerStore, Ops, Runnable
from draftree.state.span import KvLayers, Parts, Span


class ContextDrafter:
    """Positions are its own: rotary positions are relative."""

    _context_program: Runnable  # caches keys and values of the rows in the input

    def __init__(
        self, ops: Ops, states: Sequence[LayerStore], feature_width: int, block_len: int
    ) -> None:
        """block_len: positions after the context that a proposal writes to, at most."""
        self.block_len = block_len
        self._ops = ops
        self._context_len = 0  # positions before it have been read
        self._first = 0  # those from here on are of this text
        self._num_waiting = 0  # positions after them whose features lie in the input
        self._kv = KvLayers(ops, states)
        self._input = ops.new_rows(feature_width)

    def reset(self) -> None:
        self._begin_at(0, 0)

    @property
    def position(self) -> int:
        """How many tokens it has seen the features of."""
        return self._context_len + self._num_waiting

    @property
    def first(self) -> int:
        """The first position whose context it still has; later ones are all there."""
        return max(self._first, self._ring_start(self.position))

    def _ring_start(self, length: int) -> int:
        """The first position that no block after a text of this length overwrites."""
        ring_len = self._ops.ring_len
        return max(length + self.block_len - ring_len, 0) if ring_len else 0

    def copy(self, start: int, end: int) -> Parts:
        """Keys and values of the context at positions start … end-1, none before the first."""
        assert start >= self.first, "that context has been overwritten"
        self._flush()
        return self._kv.copy(start, end)

    def restore(self, spans: Sequence[Span], shared: int, length: int) -> None:
        """Return to the context of a text of this length, the first `shared` of whose positions are
        those of the present one. Context that is neither at hand nor in the spans is missing.
        """
        if shared > self._context_len:
            self._flush()
        at_hand = range(self.first, shared)
        self._begin_at(self._kv.put(spans, at_hand, length, self._ring_start(length)), length)

    def _begin_at(self, first: int, length: int) -> None:
        self._first, self._context_len, self._num_waiting = first, length, 0
        self._ops.step.set_first(first)

    def extend_text(self, tokens: Sequence[int]) -> None:
        """Tokens of the text, for kinds that propose some of them alone."""

    def extend_context(self, features: Array) -> None:
        """Features of tokens that were just committed, in order: float32 [count, width]."""
        room = len(self._input) - self._num_waiting
        if len(features) >= room:
            self._put(features[:room])
            self._flush()
            self.extend_context(features[room:])
        elif len(features) > 0:
            self._put(features)

    def extend_context_from_host(self, features: np.ndarray) -> None:
        """The same, of features in main memory."""
        self.extend_context(self._ops.constant(features))

    def _put(self, features: Array) -> None:
        end = self._num_waiting + len(features)
        self._input[self._num_waiting : end] = features
        self._num_waiting = end

    def flush_context(self) -> int:
        """Read all features at hand; how many positions are cached now."""
        self._flush()
        return self._context_len

    def record_context(self, count: int) -> None:
        """The device has read the features of so many tokens in a round of its own."""
        self._context_len += count

    def _flush(self) -> None:
        """Cache keys and values for the features that arrived since the last block."""
        count = self._num_waiting
        if count:
            self._ops.step.set_chain((0,) * count, self._context_len)
            self._context_program.run()
            self._context_len += count
            self._num_waiting = 0
