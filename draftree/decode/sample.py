"""Choosing a token: a pure function of logits, history, seed and absolute position.

The noise is a counter-based function of (seed, position, token), so plain and speculative decoding, in any batch,
choose the same token at the same position. A draft's candidates are ranked with the same noise.
"""

from collections.abc import Sequence

import numpy as np

from draftree.core import SamplingParams
from draftree.decode.tree import DraftBlock


class Sampler:
    def __init__(
        self, params: SamplingParams, vocab_size: int, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._params = params

    def choose(self, logits: np.ndarray, position: int) -> int:
        """The token at an absolute position, given the logits float32 [vocab_size] before it."""
        return int(logits.argmax())

    def accept(self, token: int) -> None:
        """The token is part of the text from now on; penalties count it."""

    def rank(self, logits: np.ndarray, position: int, num_candidates: int) -> DraftBlock:
        """Candidates for consecutive positions from `position` on: logits float32 [num_positions, vocab_size]."""
        k = min(num_candidates, logits.shape[1] - 1)
        log_probs = logits - np.logaddexp.reduce(logits.astype(np.float64), axis=1, keepdims=True)
        best = np.argpartition(-log_probs, k, axis=1)[:, :k]
        order = np.take_along_axis(log_probs, best, 1).argsort(axis=1)[:, ::-1]
        best = np.take_along_axis(best, order, 1)
        return DraftBlock(best.astype(np.int64), np.take_along_axis(log_probs, best, 1))
