"""Prompt lookup: text that repeats is its own draft.

Finds where the last tokens of the text occurred before, newest first; proposes what followed them
there. A search reads the whole text, which takes less than to index it. Knows nothing of models.
"""

from collections.abc import Iterable

import numpy as np

_MIN_MATCH, _MAX_MATCH = 3, 6
_BRANCH_LEN, _LONG_MATCH = 10, 4


class LookupIndex:
    """The text so far. Only when something is looked up its new tokens join the array."""

    def __init__(self) -> None:
        self._tokens = np.empty(0, np.int64)  # with room for more
        self._length = 0
        self._new: list[int] = []

    def extend(self, tokens: Iterable[int]) -> None:
        self._new.extend(tokens)

    def _read_text(self) -> np.ndarray:
        start, self._length = self._length, self._length + len(self._new)
        if self._length > len(self._tokens):
            grown = np.empty(2 * self._length, np.int64)
            grown[:start] = self._tokens[:start]
            self._tokens = grown
        self._tokens[start : self._length] = self._new
        self._new.clear()
        return self._tokens[: self._length]

    def propose(self, max_tokens: int) -> tuple[tuple[int, ...], int]:
        """What followed the longest matching end of the text, of 3 to 6 tokens, where that occurred
        last, and the length of that match (0: none).
        """
        text = self._read_text()
        end = len(text)
        # Where runs end that end as the text does; the text's own end is none of them.
        found = np.flatnonzero(text[_MIN_MATCH - 1 : -1] == text[-1:]) + _MIN_MATCH
        match_len, start = 0, 0
        for length in range(2, _MAX_MATCH + 1):
            found = found[found >= length]
            found = found[text[found - length] == text[end - length]] if len(found) else found
            if len(found) == 0:
                break
            if length >= _MIN_MATCH:
                match_len, start = length, int(found[-1])
        return tuple(text[start : start + max_tokens].tolist()) if match_len else (), match_len

    def propose_branch(self, room: int, *, has_draft: bool) -> tuple[int, ...]:
        """What joins a tree of so many positions: beside a draft, only after a long match."""
        tokens, match_len = self.propose(min(_BRANCH_LEN, room))
        return () if has_draft and match_len < _LONG_MATCH else tokens
