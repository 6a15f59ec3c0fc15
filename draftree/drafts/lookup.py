"""Prompt lookup: text that repeats is its own draft.

Remembers where every short run of tokens last occurred; proposes what followed it there. Knows
nothing of models.
"""

from collections.abc import Iterable

_MIN_MATCH, _MAX_MATCH = 3, 6
_BRANCH_LEN, _LONG_MATCH = 10, 4


class LookupIndex:
    """The text so far, and the newest position after each run of 3 to 6 tokens."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self._num_entered = 0  # tokens whose runs before them are known

    def extend(self, tokens: Iterable[int]) -> None:
        self._tokens.extend(tokens)

    def _enter(self) -> None:
        """A run is entered with the token after it, so that it never finds itself."""
        for end in range(self._num_entered, len(self._tokens)):
            last = tuple(self._tokens[max(end - _MAX_MATCH, 0) : end])
            for length in range(_MIN_MATCH, len(last) + 1):
                self._after[last[-length:]] = end
        self._num_entered = len(self._tokens)

    def propose(self, max_tokens: int) -> tuple[tuple[int, ...], int]:
        """What followed the longest matching end of the text, and the length of that match (0:
        none). Only now the text is looked at: most plain steps never ask.
        """
        self._enter()
        for length in range(min(_MAX_MATCH, len(self._tokens)), _MIN_MATCH - 1, -1):
            start = self._after.get(tuple(self._tokens[-length:]))
            if start is not None:
                return tuple(self._tokens[start : start + max_tokens]), length
        return (), 0

    def propose_branch(self, room: int, *, has_draft: bool) -> tuple[int, ...]:
        """What joins a tree of so many positions: beside a draft, only after a long match."""
        tokens, match_len = self.propose(min(_BRANCH_LEN, room))
        return () if has_draft and match_len < _LONG_MATCH else tokens
