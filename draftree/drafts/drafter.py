"""The interface of drafts: the target's features in, candidates for the next positions out.

A draft that was trained for a target keeps a context of its own, which goes forward and back with
the target's sequence. Knows nothing of trees, nor of when drafting pays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from draftree.drafts.token_table import TokenTable
from draftree.kernels.ops import Array, Runnable
from draftree.state.span import Parts, Span

MOST_RANKED = 64  # candidates of a position, where a device ranks them


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a draft proposes after the anchor. Row d holds the candidates at depth d + 1.

    edges: where a candidate's chance depends on the one before it: row d holds, for each candidate
    at depth d + 1, the log-probabilities of those at depth d + 2 after it, in the order of tokens.
    Then log_probs counts at the first depth alone.
    """

    tokens: np.ndarray  # int64 [num_positions, num_candidates]
    log_probs: np.ndarray  # float [num_positions, num_candidates], falling along a row
    edges: np.ndarray | None = None  # float [num_positions - 1, num_candidates, num_candidates]

    def first(self, num_positions: int) -> "Proposal":
        """Without the positions after those."""
        edges = None if self.edges is None else self.edges[: max(num_positions - 1, 0)]
        return Proposal(self.tokens[:num_positions], self.log_probs[:num_positions], edges)


class Ranking(Protocol):
    """How a request chooses: a draft's candidates are ranked the same way."""

    def rank(
        self,
        logits: np.ndarray,
        position: int,
        num_candidates: int,
        tokens: np.ndarray | None = None,
    ) -> Proposal:
        """logits: float32 [num_positions, vocab_size], or a column for each of the tokens. Rows
        after the first of a call do not know the token before them.
        """
        ...

    def rank_edges(
        self, ranked: Proposal, corrections: np.ndarray, *, is_chain: bool = False
    ) -> Proposal:
        """With edges. corrections: float32 [num_positions, parents, num_candidates], what is added
        to a candidate's logit after each candidate before it; at the first position the anchor is
        the only parent, and the first row counts. is_chain: each row was ranked in a call of its
        own.
        """
        ...


class PairScores(NamedTuple):
    """What a candidate's logit gains after each candidate p before it: <before[p] * hidden,
    after[c]>, among the num_candidates best of a position's first num_tokens logits.
    """

    before: TokenTable
    after: TokenTable
    hidden: Array  # float32 [num_positions, width]
    num_candidates: int  # at most MOST_RANKED
    num_tokens: int


class DraftPrograms(NamedTuple):
    """What a block is made of, and where its inputs and results are."""

    context: Runnable
    block: Runnable
    head: Runnable
    features: Array
    logits: Array
    mask_token: int
    block_len: int
    pairs: PairScores | None = None  # where scores depend on the candidate before


class Proposer(Protocol):
    """All that a round needs of a draft."""

    def extend_text(self, tokens: Sequence[int]) -> None:
        """What the text goes on with, at first all of it; the last token is the anchor."""
        ...

    def extend_context(self, features: Array) -> None:
        """Features of tokens that were just committed, in order: float32 [count, width]."""
        ...

    def extend_context_from_host(self, features: np.ndarray) -> None:
        """The same, of features in main memory."""
        ...

    def propose(
        self, anchor: int, ranking: Ranking, num_candidates: int, num_positions: int
    ) -> Proposal:
        """At most num_positions of what the draft can fill."""
        ...


class Drafter(Proposer, Protocol):
    """A draft bound to its target, one sequence at a time."""

    @property
    def position(self) -> int:
        """How many tokens it has seen the features of."""
        ...

    @property
    def first(self) -> int:
        """The first position whose context it still has; later ones are all there."""
        ...

    def reset(self) -> None: ...
    def flush_context(self) -> int:
        """Read all features at hand; how many positions are cached now."""
        ...

    def record_context(self, count: int) -> None:
        """The device has read the features of so many tokens in a round of its own."""
        ...

    def copy(self, start: int, end: int) -> Parts:
        """Keys and values of the context at positions start … end-1, none before the first."""
        ...

    def restore(self, spans: Sequence[Span], shared: int, length: int) -> None:
        """Return to the context of a text of this length, the first `shared` of whose positions are
        those of the present one. Context that is neither at hand nor in the spans is missing.
        """
        ...

    def programs(self) -> DraftPrograms | None:
        """For devices that run whole rounds by themselves; None if the host has to run them."""
        ...
