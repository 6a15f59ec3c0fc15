"""Choosing a token: a pure function of logits, history, seed and absolute position.

The noise is a counter-based function of (seed, position, token), so plain and speculative decoding,
in any batch, choose the same token at the same position. A draft's candidates are ranked with the
same noise.
"""

from collections.abc import Sequence

import numpy as np

from draftree.core import SamplingParams
from draftree.decode.tree import DraftBlock
from draftree.kernels.cpu.sampling import Filters, SamplingScratch, choose
from draftree.kernels.cpu.select import rank_row


class Sampler:
    """The choices of one request. Penalties count the reply; repetition counts the prompt too."""

    def __init__(
        self, params: SamplingParams, vocab_size: int, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._seed = params.seed
        self._filters = Filters(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
        )
        self._scratch = SamplingScratch(vocab_size)
        self._slots: dict[int, int] = {}  # token -> place in the two arrays
        self._seen_ids = np.zeros(64, dtype=np.int64)
        self._seen_counts = np.zeros(64, dtype=np.int64)
        if params.has_penalties:
            for token in dict.fromkeys(prompt_ids):
                self._slot(token)

    def choose(self, logits: np.ndarray, position: int) -> int:
        """The token at an absolute position, given the logits float32 [vocab_size] before it."""
        count = len(self._slots)
        return choose(
            logits,
            self._filters,
            self._seed,
            position,
            self._scratch,
            self._seen_ids[:count],
            self._seen_counts[:count],
        )

    def accept(self, token: int) -> None:
        """The token is part of the text from now on; penalties count it."""
        if self._filters.has_penalties:
            slot = self._slot(token)  # may replace the arrays
            self._seen_counts[slot] += 1

    def rank(self, logits: np.ndarray, position: int, num_candidates: int) -> DraftBlock:
        """Candidates for consecutive positions from `position` on: logits float32 [num_positions,
        vocab_size].

        Scores are the draft's log-probabilities, or with a temperature those of log-probability / T
        + noise, so that what the noise favours comes first, as it will in the target's own choice.
        """
        num_positions, count = len(logits), min(num_candidates, logits.shape[1])
        ids = np.empty((num_positions, count), dtype=np.int64)
        scores, log_probs = np.empty((2, num_positions, count), dtype=np.float32)
        for row in range(num_positions):
            rank_row(
                logits[row],
                *(self._filters.temperature, self._seed, position + row),
                *(scores[row], ids[row], log_probs[row]),
            )
        if self._filters.temperature == 0.0:
            return DraftBlock(ids, log_probs)
        weights = np.exp(scores - scores[:, :1])
        return DraftBlock(ids, scores - scores[:, :1] - np.log(weights.sum(axis=1, keepdims=True)))

    def _slot(self, token: int) -> int:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._seen_ids):
            more = np.zeros_like(self._seen_ids)
            self._seen_ids = np.concatenate([self._seen_ids, more])
            self._seen_counts = np.concatenate([self._seen_counts, more])
        self._seen_ids[slot] = token
        return slot
