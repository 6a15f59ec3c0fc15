"""A block draft at work: keeps its context in step with the target and proposes a block after the
anchor.
"""

from collections.abc import Sequence

import numpy as np

from draftree.core import DraftSize
from draftree.drafts.dflash_model import (
    Draft,
    check_fit,
    check_tokens,
    load_draft,
    read_draft_config,
    read_draft_size,
)
from draftree.drafts.drafter import Drafter, DraftPrograms, Proposal, Ranking
from draftree.kernels.ops import Array, Ops
from draftree.models.model import Model
from draftree.models.model_config import read_model_config
from draftree.state.span import KvLayers, Parts, Span
from draftree.weights.checkpoint import Checkpoint


class DFlashKind:
    """How DFlash files become drafters."""

    def read_size(self, checkpoint: Checkpoint) -> DraftSize:
        return read_draft_size(checkpoint)

    def check_fit(self, checkpoint: Checkpoint, target: Checkpoint, model: Model) -> None:
        config, name = read_draft_config(checkpoint), read_model_config(target).name
        check_fit(config, str(checkpoint.path), model, name)
        check_tokens(checkpoint, target)

    def load(
        self,
        checkpoint: Checkpoint,
        target: Model,
        ops: Ops,
        *,
        block_len: int,
        use_draft_vocab: bool,
    ) -> Drafter:
        draft = load_draft(checkpoint, ops)
        return BlockDrafter(
            draft, target, ops, block_len=block_len, use_draft_vocab=use_draft_vocab
        )


class BlockDrafter:
    """A DFlash draft bound to its target. Positions are its own: rotary positions are relative."""

    def __init__(
        self,
        draft: Draft,
        target: Model,
        ops: Ops,
        *,
        block_len: int = 0,
        use_draft_vocab: bool = True,
    ) -> None:
        """use_draft_vocab: propose only the tokens that the draft lists, if it does."""
        self.block_len = block_len or draft.config.block_size
        self._mask = draft.config.mask_token
        head, self._tokens = target.head, None
        if use_draft_vocab and draft.config.draft_vocab:
            self._tokens = np.asarray(draft.config.draft_vocab, dtype=np.int64)
            head = ops.pack(target.head_rows.raw[self._tokens], target.head_rows.qtype)
        self._ops = ops
        self._context_len = 0  # positions before it have been read
        self._first = 0  # those from here on are of this text
        width = len(draft.config.feature_layers) * draft.config.hidden_size
        self._num_waiting = 0  # positions after them whose features lie in the input
        states = draft.new_state(ops)
        self._kv = KvLayers(ops, states)
        self._input = ops.new_rows(width)
        with ops.scope(), ops.capture() as self._context_program:
            draft.record_context(ops, self._input, states)
        with ops.scope():
            with ops.capture() as self._block_program:
                hidden = draft.record_block(ops, target, states)
            with ops.capture() as self._head_program:
                self._logits = draft.record_head(ops, head, hidden)
        self.hidden = hidden

    def programs(self) -> DraftPrograms:
        """For devices that run whole rounds by themselves."""
        programs = self._context_program, self._block_program, self._head_program
        return DraftPrograms(*programs, self._input, self._logits, self._mask, self.block_len)

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

    def extend_context(self, features: Array) -> None:
        """Features of tokens that were just committed, in order: float32 [count, width]."""
        room = len(self._input) - self._num_waiting
        if len(features) >= room:
            self._put(features[:room])
            self._flush()
            self.extend_context(features[room:])
        elif len(features) > 0:
            self._put(features)

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

    def propose(
        self, anchor: int, ranking: Ranking, num_candidates: int, num_positions: int
    ) -> Proposal:
        """Candidates for positions after the anchor; the head runs only for those wanted."""
        logits = self.block_logits(anchor, num_positions)
        return ranking.rank(logits, self._context_len + 1, num_candidates, self._tokens)

    def block_logits(self, anchor: int, num_positions: int = 0) -> np.ndarray:
        """float32 [positions, tokens]; row i is for position i + 1 after the anchor. 0: all.

        No more is filled than is wanted: a shorter block costs less and guesses as well.
        """
        self._flush()
        num_positions = min(num_positions or self.block_len, self.block_len - 1)
        block = (anchor, *[self._mask] * num_positions)
        self._ops.step.set_chain(block, self._context_len)
        self._ops.step.set_rows(range(1, num_positions + 1))
        self._block_program.run()
        self._head_program.run()
        return self._ops.read(self._logits, num_positions)

    def _flush(self) -> None:
        """Cache keys and values for the features that arrived since the last block."""
        count = self._num_waiting
        if count:
            self._ops.step.set_chain((0,) * count, self._context_len)
            self._context_program.run()
            self._context_len += count
            self._num_waiting = 0
