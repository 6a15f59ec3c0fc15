"""Which parts of a long text a question looks at: a score for every chunk of its tokens.

In: token ids of a text and of a question. Out: scores, higher for what should be kept. A model
reads both, window by window; its queries and keys are compared before they are rotated, so distance
does not count.
"""

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np

from draftree.kernels.heads import CHUNK_LEN
from draftree.kernels.ops import Array, Ops
from draftree.models.key_reader import KeyReader

QUESTION_LEN: Final = 256  # of a longer question the end is read
WINDOW_LEN: Final = 4096  # tokens that are read together, the question among them
_LEAD_LEN: Final = 2 * CHUNK_LEN  # a window's first tokens draw attention whatever they say


class Scorer(Protocol):
    def score(self, text: Sequence[int], question: Sequence[int]) -> np.ndarray:
        """float32 [ceil(len(text) / CHUNK_LEN)]; only their order counts."""
        ...


class AttentionScorer:
    """What a model's heads attend to, from the end of the question."""

    def __init__(self, reader: KeyReader, ops: Ops) -> None:
        self._reader, self._ops = reader, ops

    def score(self, text: Sequence[int], question: Sequence[int]) -> np.ndarray:
        """Of a long text all windows have the same length, so that they are passes of one size;
        each but the first begins with some of the one before.
        """
        asked = list(question[-QUESTION_LEN:])
        room = (min(WINDOW_LEN, self._reader.max_ctx) - len(asked)) // _LEAD_LEN * _LEAD_LEN
        assert room > _LEAD_LEN, "the scoring model's context is too short"
        last = max(-(-(len(text) - room) // _LEAD_LEN) * _LEAD_LEN, 0)
        found: list[Array] = []
        start = 0  # of what has no score yet
        while start < len(text):
            first = min(start - _LEAD_LEN, last) if start else 0
            window = text[first : first + room]
            self._reader.read([*window, *asked])
            scores = self._reader.heads.score(len(window), len(window) + len(asked))
            found.append(scores[(start - first) // CHUNK_LEN :])
            start = first + len(window)
        return np.concatenate([self._ops.read(scores, len(scores)) for scores in found])
