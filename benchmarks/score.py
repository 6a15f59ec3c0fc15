"""What logits say about a text that is already known: log-probabilities, first choices, gaps. numpy
only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

_ROWS_AT_ONCE = 64  # bounds the memory of intermediate results


@dataclass(slots=True)
class Scores:
    """Position by position. The last position of a text predicts nothing that is known."""

    log_probs: list[float] = field(default_factory=list)  # of the token that follows
    best: list[int] = field(default_factory=list)  # likeliest token
    second: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # logit of best minus that of second
    pair_gaps: list[list[float]] = field(default_factory=list)  # of the pairs that were asked for

    def extend(self, other: "Scores") -> None:
        self.log_probs += other.log_probs
        self.best += other.best
        self.second += other.second
        self.gaps += other.gaps
        self.pair_gaps += other.pair_gaps


def score_logits(
    logits: np.ndarray, next_ids: Sequence[int], pairs: Sequence[Sequence[Sequence[int]]] = ()
) -> Scores:
    """logits float32 [num_rows, vocab_size]; next_ids[i] follows row i, and may end a row early.

    pairs[i]: pairs of tokens whose logits in row i are to be compared.
    """
    scores = Scores()
    for start in range(0, len(logits), _ROWS_AT_ONCE):
        rows = logits[start : start + _ROWS_AT_ONCE]
        _rank(rows, scores)
        targets = np.asarray(next_ids[start : start + len(rows)], dtype=np.int64)
        if len(targets):
            scored = rows[: len(targets)]
            peak = scored.max(axis=1)
            total = np.exp(scored - peak[:, None]).sum(axis=1, dtype=np.float64)
            chosen = scored[np.arange(len(targets)), targets] - peak
            scores.log_probs += (chosen - np.log(total)).tolist()
    for row, wanted in zip(logits, pairs, strict=False):
        scores.pair_gaps.append([float(row[a] - row[b]) for a, b in wanted])
    return scores


def _rank(rows: np.ndarray, scores: Scores) -> None:
    best = rows.argmax(axis=1)
    peak = np.take_along_axis(rows, best[:, None], 1)[:, 0]
    rest = rows.copy()
    np.put_along_axis(rest, best[:, None], -np.inf, 1)
    second = rest.argmax(axis=1)
    scores.best += best.tolist()
    scores.second += second.tolist()
    scores.gaps += (peak - np.take_along_axis(rest, second[:, None], 1)[:, 0]).tolist()
