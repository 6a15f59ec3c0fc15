"""Choosing tokens from logits: penalties, temperature, filters, then the largest logit / T + noise.

The noise is a function of (seed, position, token) alone, so the choice does not depend on how the
logits were batched. Nothing of vocabulary size is allocated per call; ties go to the lower token
id everywhere.
"""

from typing import NamedTuple

import numpy as np

from draftree.kernels.cpu.noise import gumbel
from draftree.kernels.cpu.select import choose_filtered, choose_greedy, penalize, rank_rows

__all__ = ["SamplingArgs", "SamplingScratch", "choose", "gumbel", "load_choices"]


class SamplingArgs(NamedTuple):
    """How logits are changed before the choice; each has a value that means off."""

    temperature: float = 1.0  # 0: greedy, the rest but penalties is ignored
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def has_penalties(self) -> bool:
        return self[4:] != (1.0, 0.0, 0.0)


class SamplingScratch:
    """Memory for one caller at a time."""

    def __init__(self, vocab_size: int) -> None:
        self.logits = np.empty(vocab_size, np.float32)
        self.best_scores = np.empty(vocab_size, np.float32)
        self.best_ids = np.empty(vocab_size, np.int64)


_NO_TOKENS = np.empty(0, np.int64)


def choose(
    logits: np.ndarray,
    filters: SamplingArgs,
    seed: int,
    position: int,
    scratch: SamplingScratch,
    seen_ids: np.ndarray = _NO_TOKENS,
    seen_counts: np.ndarray = _NO_TOKENS,
) -> int:
    """The token at an absolute position, from logits float32 [vocab_size] (left as they are).

    seen_ids (int64, distinct) get the repetition penalty; those with a count above 0 also the
    presence penalty, and the frequency penalty times their count: so prompt tokens come with 0 if
    only the reply is to be counted.
    """
    assert logits.dtype == np.float32 and logits.flags.c_contiguous and logits.ndim == 1
    if filters.has_penalties and len(seen_ids) > 0:
        scratch.logits[:] = logits
        logits = scratch.logits
        penalize(logits, seen_ids, seen_counts, *filters[4:])
    if filters.temperature == 0.0:
        return int(choose_greedy(logits))
    return int(
        choose_filtered(
            logits,
            *(filters.temperature, filters.top_k, filters.top_p, filters.min_p, seed, position),
            *(scratch.logits, scratch.best_scores, scratch.best_ids),
        )
    )


def load_choices(*, is_sampled: bool = False) -> None:
    """Have the code of greedy decoding in memory before the first token needs it; and the rest."""
    logits = np.zeros(1, np.float32)
    if is_sampled:
        choose(logits, SamplingArgs(), 0, 0, SamplingScratch(1))
    choose_greedy(logits)
    rank_rows(logits[None], _NO_TOKENS, 0.0, 0, 0, 0.0, 1)
