"""A block draft at work: proposes a block after the anchor, in one pass."""

from collections.abc import Sequence

import numpy as np

from draftree.core import DraftSize
from draftree.drafts.context import ContextDrafter
from draftree.drafts.dflash_head import BlockOutput
from draftree.drafts.dflash_model import (
    Draft,
    check_fit,
    check_tokens,
    load_draft,
    name_kind,
    read_draft_config,
    read_draft_size,
)
from draftree.drafts.draft_vocab import DraftVocab
from draftree.drafts.drafter import Drafter, DraftPrograms, Proposal, Ranking
from draftree.kernels.ops import Ops
from draftree.models.model import Model
from draftree.models.model_config import read_model_config
from draftree.weights.checkpoint import Checkpoint


class DFlashKind:
    """How DFlash files become drafters."""

    def name(self, checkpoint: Checkpoint) -> str:
        return name_kind(checkpoint)

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


class BlockDrafter(ContextDrafter):
    """A DFlash draft bound to its target."""

    def __init__(
        self,
        draft: Draft,
        target: Model,
        ops: Ops,
        *,
        block_len: int = 0,
        use_draft_vocab: bool = True,
    ) -> None:
        """use_draft_vocab: propose what the draft lists, if it does, and tokens of the text."""
        width = len(draft.config.feature_layers) * draft.config.hidden_size
        states = draft.new_state(ops)
        super().__init__(ops, states, width, block_len or draft.config.block_size)
        self._mask = draft.config.mask_token
        listed = draft.config.draft_vocab if use_draft_vocab else ()
        self._vocab = DraftVocab(listed, target.head_rows, ops) if listed else None
        head = target.head if self._vocab is None else self._vocab.head
        with ops.scope(), ops.capture() as self._context_program:
            draft.record_context(ops, self._input, states)
        self._head, self._first_row = draft.head, draft.config.first_row
        with ops.scope():
            with ops.capture() as self._block_program:
                hidden = draft.record_block(ops, target, states)
                self._projected = draft.record_projection(ops, hidden)
            with ops.capture() as self._head_program:
                self._logits = draft.record_head(ops, head, hidden)
        self.hidden = hidden

    def programs(self) -> DraftPrograms | None:
        """For devices that run whole rounds by themselves, which know blocks of masks alone, and of
        heads those that score pairs.
        """
        pairs = None
        if self._head is not None:
            hidden = None if self._projected is None else self._projected[self._first_row :]
            pairs = self._head.pair_scores(hidden)
        if self._first_row != 1 or (self._head is not None and pairs is None):
            return None
        programs = self._context_program, self._block_program, self._head_program
        sizes = self._mask, self.block_len
        return DraftPrograms(*programs, self._input, self._logits, *sizes, pairs)

    def propose(
        self, anchor: int, ranking: Ranking, num_candidates: int, num_positions: int
    ) -> Proposal:
        """Candidates for positions after the anchor; the head runs only for those wanted."""
        logits, position = self.block_logits(anchor, num_positions), self._context_len + 1
        if self._head is None:
            return ranking.rank(logits, position, num_candidates, self.draft_vocab)
        hidden: np.ndarray | None = None
        if self._projected is not None:
            rows = self._ops.read(self._projected, self._first_row + len(logits))
            hidden = rows[self._first_row :]
        output = BlockOutput(anchor, position, logits, self.draft_vocab, hidden)
        return self._head.rank(ranking, output, num_candidates)

    @property
    def draft_vocab(self) -> np.ndarray | None:
        """The tokens that its logits stand for now, in no order; None: all."""
        return None if self._vocab is None else self._vocab.tokens

    def extend_text(self, tokens: Sequence[int]) -> None:
        if self._vocab is not None:
            self._vocab.add(tokens)

    def read_hidden(self, num_positions: int) -> np.ndarray:
        """Behind the logits of the last block, before the final norm: float32 [positions,
        hidden_size].
        """
        first = self._first_row
        return self._ops.read(self.hidden, first + num_positions)[first:]

    def block_logits(self, anchor: int, num_positions: int = 0) -> np.ndarray:
        """float32 [positions, tokens]; row i is for position i + 1 after the anchor. 0: all.

        No more is filled than is wanted: a shorter block costs less and guesses as well.
        """
        self._flush()
        first = self._first_row
        num_positions = min(num_positions or self.block_len, self.block_len - first)
        block = (anchor, *[self._mask] * (num_positions + first - 1))
        self._ops.step.set_chain(block, self._context_len)
        self._ops.step.set_rows(range(first, first + num_positions))
        self._block_program.run()
        self._head_program.run()
        return self._ops.read(self._logits, num_positions)
