"""What plain and speculative decoding have in common: one step of one sequence."""

from typing import NamedTuple, Protocol

from draftree.core import RoundStats, TokenScores, TokenSource


class Emitted(NamedTuple):
    """A token that is now part of the text."""

    token: int
    source: TokenSource
    scores: TokenScores | None = None
    is_last: bool = False  # the grammar is complete


class Decoder(Protocol):
    """start once with the last prompt token as the anchor; then each step commits one or more
    tokens.
    """

    stats: RoundStats

    def start(self, anchor: int) -> None: ...
    def step(self, max_tokens: int) -> list[Emitted]:
        """At least one token, at most max_tokens."""
        ...

    def finish(self) -> None:
        """No more steps: the state is left as the tokens that were read say."""
        ...
