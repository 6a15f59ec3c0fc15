"""What plain and speculative decoding have in common: one step of one sequence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from draftree.core import DraftTree, RoundStats, TokenScores, TokenSource


class Emitted(NamedTuple):
    """A token that is now part of the text."""

    token: int
    source: TokenSource
    scores: TokenScores | None = None
    is_last: bool = False  # the grammar is complete


@dataclass(frozen=True, slots=True)
class Round:
    """One finished round, for whoever wants to watch."""

    tree: DraftTree
    path: tuple[int, ...]
    bonus: int
    path_log_probs: tuple[float, ...] = ()  # the draft's, of every node but the root, if known


def plain_round(anchor: int, token: int) -> Round:
    """One in which nothing was drafted."""
    return Round(DraftTree((anchor,), (-1,), (0,), (TokenSource.BONUS,)), (0,), token)


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """What one round did, and how long it took."""

    round: Round
    is_last: bool
    ms: float
    scores: tuple[TokenScores, ...] = ()  # of every token of the round, bonus last, if wanted


class Decoder(Protocol):
    """start once with the last token as the anchor, and what of the reply is written already, the
    anchor included; then each step commits tokens.
    """

    stats: RoundStats

    def start(self, anchor: int, written: Sequence[int] = ()) -> None: ...
    def step(self, max_tokens: int) -> list[Emitted]:
        """At most max_tokens; none where another request has to have its turn first."""
        ...

    def pause(self) -> None:
        """Another sequence may have the device until the next step."""
        ...

    def finish(self) -> None:
        """No more steps: the state is left as the tokens that were read say."""
        ...


@runtime_checkable
class BatchableDecoder(Decoder, Protocol):
    """One whose plain steps may be rows of passes that others share."""

    @property
    def anchor(self) -> int: ...

    @property
    def can_follow(self) -> bool:
        """Whether what `follow` gives is what a step would have given."""
        ...

    def settle(self) -> list[Emitted]:
        """Tokens of rounds that were under way; none is now."""
        ...

    def follow(self, logits: np.ndarray, position: int) -> Emitted:
        """The token at this position, after a pass over the anchor that was run and committed
        elsewhere. The draft's context is left to whoever ran it.
        """
        ...
