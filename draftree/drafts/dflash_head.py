"""Heads of DFlash's relatives: what a candidate's logit gains or loses by the token before it.

DFlash2 scores all pairs of the best candidates of neighbouring positions (`Selector`); DSpark adds
a bias for the token before to all logits (`MarkovHead`). Both are small, and computed on the host.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from draftree.drafts.drafter import Proposal, Ranking
from draftree.kernels.quant.formats import QuantType, dequantize
from draftree.layers.attention import Projection


@dataclass(frozen=True, slots=True)
class TokenTable:
    """A row for every token, as the file holds them."""

    raw: np.ndarray  # uint8 [vocab_size, row_bytes]
    qtype: QuantType

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [*tokens.shape, width]."""
        rows = dequantize(np.ascontiguousarray(self.raw[tokens.ravel()]), self.qtype)
        return rows.reshape(*tokens.shape, -1)


class PairHead(Protocol):
    """Ranks a block's logits, given the anchor and, where the head projects them, hidden states."""

    @property
    def projection(self) -> Projection | None: ...
    def rank(
        self,
        ranking: Ranking,
        logits: np.ndarray,  # float32 [num_positions, vocab_size or len(tokens)]
        hidden: np.ndarray | None,  # float32 [num_positions, rank]
        anchor: int,
        position: int,
        num_candidates: int,
        tokens: np.ndarray | None,
    ) -> Proposal: ...


@dataclass(frozen=True, slots=True)
class Selector:
    """score(p, c) = logit(c) + <before[p] * hidden, after[c]>, for the top_k of each position."""

    before: TokenTable
    after: TokenTable
    projection: Projection | None
    top_k: int
    num_tokens: int  # those after them only fill the vocabulary up

    def rank(
        self,
        ranking: Ranking,
        logits: np.ndarray,
        hidden: np.ndarray | None,
        anchor: int,
        position: int,
        num_candidates: int,
        tokens: np.ndarray | None,
    ) -> Proposal:
        assert hidden is not None
        if tokens is None:
            logits = logits[:, : self.num_tokens]
        ranked = ranking.rank(logits, position, self.top_k, tokens)
        parents = np.concatenate([np.full_like(ranked.tokens[:1], anchor), ranked.tokens[:-1]])
        contexts = self.before(parents) * hidden[:, None]
        return ranking.rank_edges(ranked, contexts @ self.after(ranked.tokens).swapaxes(1, 2))


@dataclass(frozen=True, slots=True)
class MarkovHead:
    """logit(c) after p = logit(c) + <before[p], after[c]>. The candidates of a position are those
    after the first one of the position before; the others' are scored with them.
    """

    before: TokenTable
    after: np.ndarray  # float32 [vocab_size, rank]
    projection: Projection | None = None

    def rank(
        self,
        ranking: Ranking,
        logits: np.ndarray,
        hidden: np.ndarray | None,
        anchor: int,
        position: int,
        num_candidates: int,
        tokens: np.ndarray | None,
    ) -> Proposal:
        after = self.after[: logits.shape[1]] if tokens is None else self.after[tokens]
        rows: list[Proposal] = []
        used = [anchor]
        for i, row in enumerate(logits):
            biased = row + after @ self.before(np.array(used[-1:]))[0]
            rows.append(ranking.rank(biased[None], position + i, num_candidates, tokens))
            used.append(int(rows[-1].tokens[0, 0]))
        ids = np.concatenate([row.tokens for row in rows])
        ranked = Proposal(ids, np.concatenate([row.log_probs for row in rows]))
        parents = np.concatenate([np.full_like(ids[:1], anchor), ids[:-1]])
        others = self.before(parents) - self.before(np.array(used[:-1]))[:, None]
        return ranking.rank_edges(ranked, others @ self.after[ids].swapaxes(1, 2))
