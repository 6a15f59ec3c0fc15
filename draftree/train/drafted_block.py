"""Blocks that a draft fills while they are asked for, on the device that it learned on: what a
selector learns from at the end of a run.

In: the draft as its file will hold it, the teacher, batches of the corpus. Out: candidates among
the tokens that the file lists, with the hidden states behind them. The draft stays as it is.
"""

from collections.abc import Sequence

import torch

from draftree.train.draft import DraftModule
from draftree.train.loop import Feeder
from draftree.train.objective import Batch, begin_rounds, draft_rows, read_labels
from draftree.train.selector import CandidateBlocks
from draftree.train.teacher import Teacher

_CHUNK_ROWS = 8192  # rows whose logits are in memory at once
_ROUND_SHARE = 0.5  # of blocks that begin where a round would


class DraftedBlocks:
    """A source of blocks: half of them at random, half where rounds begin."""

    def __init__(
        self,
        draft: DraftModule,
        teacher: Teacher,
        feeder: Feeder,
        listed: Sequence[int],
        num_candidates: int,
    ) -> None:
        self._draft, self._teacher, self._feeder = draft, teacher, feeder
        self._tokens = torch.tensor(listed, device=teacher.device)
        self._head = teacher.head[self._tokens].float()  # coarser logits would be ties
        self._num_candidates = num_candidates

    @property
    def device(self) -> torch.device:
        return self._teacher.device

    def draw(self, step: int) -> CandidateBlocks:
        return self._fill(self._feeder.draw(step))[0]

    def held_out(self, *, is_greedy: bool) -> list[CandidateBlocks]:
        filled = [self._fill(batch) for batch in self._feeder.held_out(is_greedy=is_greedy)]
        return [
            CandidateBlocks(*(getattr(blocks, name)[is_whole] for name in blocks.__slots__))
            for blocks, is_whole in filled
        ]

    @torch.no_grad()
    def _fill(self, batch: Batch) -> tuple[CandidateBlocks, torch.Tensor]:
        """And which of the blocks are whole, bool [num_blocks]."""
        draft, teacher = self._draft, self._teacher
        features = teacher.read(batch.ids, draft.spec.feature_layers, needs_hidden=False).features
        assert features is not None
        batch = begin_rounds(draft, teacher, batch, features, _ROUND_SHARE)
        labels = read_labels(batch)
        hidden = draft_rows(draft, teacher, batch, labels, features).flatten(0, 1).float()
        best = [
            (rows @ self._head.T).topk(self._num_candidates)
            for rows in hidden.flatten(0, 1).split(_CHUNK_ROWS)
        ]
        shape = (*hidden.shape[:2], self._num_candidates)
        candidates = self._tokens[torch.cat([places for _, places in best])].view(shape)
        tokens, is_real = labels.tokens.flatten(0, 1), labels.is_real.flatten(0, 1)[:, 1:]
        is_right = (candidates == tokens[:, 1:, None]) & is_real[:, :, None]
        found = torch.where(is_right.any(-1), is_right.int().argmax(-1), -1)
        logits = torch.cat([values for values, _ in best]).view(shape)
        blocks = CandidateBlocks(hidden, tokens[:, :-1], candidates, logits, found)
        return blocks, is_real.all(-1)
