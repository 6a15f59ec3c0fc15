"""Heads of DFlash's relatives: what a candidate's logit gains or loses by the token before it.

DFlash2 scores all pairs of the best candidates of neighbouring positions (`Selector`); DSpark adds
a bias for the token before to all logits (`MarkovHead`). Both are small. Here is what the host
computes; a device may score pairs by itself, but no bias: it would need the choices before.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from draftree.drafts.drafter import MOST_RANKED, PairScores, Proposal, Ranking
from draftree.drafts.token_table import TokenTable
from draftree.kernels.ops import Array
from draftree.layers.attention import Projection


class BlockOutput(NamedTuple):
    """What a draft made of a block, for positions from `position` on."""

    anchor: int
    position: int
    logits: np.ndarray  # float32 [num_positions, vocab_size], or a column for each of the tokens
    tokens: np.ndarray | None
    hidden: np.ndarray | None  # float32 [num_positions, rank]: what the head's projection gave


class PairHead(Protocol):
    """projection: of the block's hidden states, where the head reads them."""

    @property
    def projection(self) -> Projection | None: ...
    def rank(self, ranking: Ranking, block: BlockOutput, num_candidates: int) -> Proposal: ...
    def pair_scores(self, hidden: Array | None) -> PairScores | None:
        """What devices need to rank by themselves; None: they cannot. hidden: the projection's rows
        for the positions after the anchor.
        """
        ...


@dataclass(frozen=True, slots=True)
class Selector:
    """score(p, c) = logit(c) + <before[p] * hidden, after[c]>, for the top_k of each position.

    fewest: with fewer candidates the logits alone count: a small tree gains less than scores cost.
    """

    before: TokenTable
    after: TokenTable
    projection: Projection | None
    top_k: int
    num_tokens: int  # those after them only fill the vocabulary up
    fewest: int = 0

    def rank(self, ranking: Ranking, block: BlockOutput, num_candidates: int) -> Proposal:
        assert block.hidden is not None
        logits = block.logits
        if block.tokens is None and self.num_tokens < logits.shape[1]:
            logits = _first_columns(logits, self.num_tokens)
        if num_candidates < self.fewest:
            return ranking.rank(logits, block.position, num_candidates, block.tokens)
        ranked = ranking.rank(logits, block.position, self.top_k, block.tokens)
        contexts = self.before(_parents(block.anchor, ranked.tokens)) * block.hidden[:, None]
        return ranking.rank_edges(ranked, contexts @ self.after(ranked.tokens).swapaxes(1, 2))

    def pair_scores(self, hidden: Array | None) -> PairScores | None:
        if hidden is None or self.top_k > MOST_RANKED:
            return None
        return PairScores(self.before, self.after, hidden, self.top_k, self.num_tokens)


@dataclass(frozen=True, slots=True)
class MarkovHead:
    """logit(c) after p = logit(c) + <before[p], after[c]>. The candidates of a position are those
    after the first one of the position before; the others' are scored with them.
    """

    before: TokenTable
    after: np.ndarray  # float32 [vocab_size, rank]
    projection: Projection | None = None

    def rank(self, ranking: Ranking, block: BlockOutput, num_candidates: int) -> Proposal:
        last = len(self.after) - 1  # stands for tokens after it
        after = self.after if block.tokens is None else self.after[np.minimum(block.tokens, last)]
        logits = _first_columns(block.logits, len(after))
        rows: list[Proposal] = []
        used = [block.anchor]
        for i, row in enumerate(logits):
            row[: len(after)] += after @ self.before(np.array(used[-1:]))[0]
            rank = ranking.rank(row[None], block.position + i, num_candidates, block.tokens)
            rows.append(rank)
            used.append(int(rank.tokens[0, 0]))
        ids = np.concatenate([row.tokens for row in rows])
        ranked = Proposal(ids, np.concatenate([row.log_probs for row in rows]))
        own = self.before(np.array(used[:-1]))
        others = self.before(_parents(block.anchor, ids)) - own[:, None]
        corrections = others @ self.after[np.minimum(ids, last)].swapaxes(1, 2)
        return ranking.rank_edges(ranked, corrections, is_chain=True)

    def pair_scores(self, hidden: Array | None) -> PairScores | None:
        return None


def _first_columns(logits: np.ndarray, count: int) -> np.ndarray:
    """A copy in which the others cannot be chosen; what a request asks goes by token, so they stay
    where they are.
    """
    logits = logits.copy()
    logits[:, count:] = -np.inf
    return logits


def _parents(anchor: int, tokens: np.ndarray) -> np.ndarray:
    """The candidates before each position's."""
    return np.concatenate([np.full_like(tokens[:1], anchor), tokens[:-1]])
