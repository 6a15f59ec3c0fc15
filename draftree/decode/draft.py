"""The draft at work: keeps its context in step with the target and proposes a block after the
anchor.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from draftree.decode.sample import Sampler
from draftree.decode.tree import DraftBlock
from draftree.kernels.ops import Array, Ops, Runnable
from draftree.models.dflash import Draft
from draftree.models.model import Model
from draftree.state.features import FeatureRing
from draftree.state.span import KvLayers, Parts, Span


class Drafter(Protocol):
    """Observes features of committed tokens; proposes candidates for the positions after the
    anchor.
    """

    def reset(self) -> None: ...
    def observe(self, features: Array) -> None: ...
    def propose(
        self, anchor: int, sampler: Sampler, num_candidates: int, num_positions: int
    ) -> DraftBlock:
        """At most num_positions of what the draft can fill."""
        ...


class DraftPrograms(NamedTuple):
    """What a block is made of, and where its inputs and results are."""

    context: Runnable
    block: Runnable
    head: Runnable
    features: Array
    logits: Array
    mask_token: int
    block_len: int


class BlockDrafter:
    """A DFlash draft bound to its target. Positions are its own: rotary positions are relative."""

    def __init__(
        self, draft: Draft, target: Model, ops: Ops, *, block_len: int = 0, features_len: int = 4096
    ) -> None:
        self.block_len = block_len or draft.facts.block_size
        self._mask = draft.facts.mask_token
        self._ops = ops
        self._context_len = 0  # positions whose keys and values are cached
        width = len(draft.facts.feature_layers) * draft.facts.hidden_size
        self._ring = FeatureRing(ops.new_rows(width, features_len))
        self._offset = 0  # absolute position of the first cached one
        states = draft.new_state(ops)
        self._kv = KvLayers(ops, states)
        self._input = ops.new_rows(width)
        with ops.scope(), ops.capture() as self._context_program:
            draft.record_context(ops, self._input, states)
        with ops.scope():
            with ops.capture() as self._block_program:
                hidden = draft.record_block(ops, target, states)
            with ops.capture() as self._head_program:
                self._logits = draft.record_head(ops, target, hidden)
        self.hidden = hidden

    def programs(self) -> DraftPrograms:
        """For devices that run whole rounds by themselves."""
        return DraftPrograms(
            *(self._context_program, self._block_program, self._head_program),
            *(self._input, self._logits, self._mask, self.block_len),
        )

    def reset(self) -> None:
        self._context_len = self._offset = 0
        self._ring.reset()

    @property
    def position(self) -> int:
        """How many tokens it has seen the features of."""
        return self._ring.end

    def copy(self, start: int, end: int) -> Parts:
        """Keys and values of the context at positions start … end-1."""
        self._catch_up()
        assert self._offset == 0, "the context does not begin with the text"
        return self._kv.copy(start, end)

    def restore(self, spans: Sequence[Span], shared: int, length: int) -> None:
        """Return to the context of a text of this length, the first `shared` of whose positions are
        those of the present one.
        """
        if shared > self._offset + self._context_len:
            self._catch_up()
        assert self._offset == 0 or shared == 0, "the context does not begin with the text"
        self._kv.put(spans, shared, length)
        self._offset, self._context_len = 0, length
        self._ring.reset(length)

    def observe(self, features: Array) -> None:
        """Features of tokens that were just committed, in order: float32 [count, width]."""
        chunk_len = min(len(self._input), self._ring.capacity)
        for start in range(0, len(features), chunk_len):
            self._ring.append(features[start : start + chunk_len])
            if self._ring.end - self._offset - self._context_len > self._ring.capacity - chunk_len:
                self._catch_up()

    def catch_up(self) -> int:
        """Read all features at hand; how many positions are cached now."""
        self._catch_up()
        return self._context_len

    def note(self, count: int) -> None:
        """The device has read the features of so many tokens in a round of its own."""
        self._context_len += count
        self._ring.reset(self._offset + self._context_len)

    def propose(
        self, anchor: int, sampler: Sampler, num_candidates: int, num_positions: int
    ) -> DraftBlock:
        """Candidates for positions after the anchor; the head runs only for those wanted."""
        logits = self.block_logits(anchor, num_positions)
        first = self._offset + self._context_len + 1
        return sampler.rank(logits, first, num_candidates)

    def block_logits(self, anchor: int, num_positions: int = 0) -> np.ndarray:
        """float32 [positions, vocab_size]; row i is for position i + 1 after the anchor. 0: all."""
        self._catch_up()
        num_positions = min(num_positions or self.block_len, self.block_len - 1)
        block = np.full(self.block_len, self._mask, dtype=np.int64)
        block[0] = anchor
        self._ops.step.set_chain(block, self._context_len)
        self._block_program.run()
        self._ops.step.set_rows(np.arange(1, num_positions + 1))
        self._head_program.run()
        return self._ops.read(self._logits, num_positions)

    def _catch_up(self) -> None:
        """Cache keys and values for the features that arrived since the last block."""
        ring, first = self._ring, self._offset + self._context_len
        if first < ring.start:  # too far behind: begin again at the oldest features at hand
            self._offset, self._context_len, first = ring.start, 0, ring.start
        while first < ring.end:
            last = min(first + len(self._input), ring.end)
            count = last - first
            self._input[:count] = ring.read(first, last)
            self._ops.step.set_chain(np.zeros(count, dtype=np.int64), self._context_len)
            self._context_program.run()
            self._context_len += count
            first = last
