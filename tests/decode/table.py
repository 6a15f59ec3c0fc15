"""A target that is a table: the logits after a token depend on that token alone. Fast and known.

It has the real sequence state, so paths and positions are checked as ever; its features, if wanted,
are the tokens and positions themselves. A clock that only passes advance makes time exact.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np

from draftree.decode.sampler import Sampler
from draftree.drafts.drafter import Proposal
from draftree.kernels.cpu.pass_args import NUM_TOKENS, PassArgs
from draftree.models.target import ForwardOutput
from draftree.state.sequence import SequenceState


class Clock:
    """Stands in for the time module."""

    def __init__(self) -> None:
        self.now_ms = 0.0

    def perf_counter(self) -> float:
        return self.now_ms / 1000


class _TableOps:
    def __init__(self, max_rows: int) -> None:
        self.step = PassArgs(max_rows, max_rows)

    @contextmanager
    def capture(self) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(run=lambda: None)

    def commit(self, stores: tuple[()]) -> None:
        """A table has nothing to keep."""


class TableTarget:
    """table: float32 [vocab_size, vocab_size], a row of logits for each last token."""

    def __init__(
        self,
        table: np.ndarray,
        *,
        max_ctx: int = 4096,
        has_features: bool = False,
        clock: Clock | None = None,
        pass_ms: Callable[[int], float] = lambda num_nodes: 1.0,
    ) -> None:
        self.table = np.ascontiguousarray(table, dtype=np.float32)
        self.model = SimpleNamespace(vocab_size=len(table))
        self.num_forwards = 0
        self.pass_sizes: list[int] = []
        self._ops = _TableOps(256)
        self._has_features = has_features
        self._clock, self._pass_ms = clock, pass_ms
        self.state = SequenceState(self._ops, (), max_ctx)

    def forward(self, rows: Sequence[int]) -> ForwardOutput:
        step = self._ops.step
        count = int(step.control[NUM_TOKENS])
        self.num_forwards += 1
        self.pass_sizes.append(count)
        if self._clock is not None:
            self._clock.now_ms += self._pass_ms(count)
        features = None
        if self._has_features:
            pairs = np.stack([step.tokens[:count], step.positions[:count]], axis=1)
            features = pairs.astype(np.float32)
        return ForwardOutput(self.table[step.tokens[list(rows)]], features)


class TableDrafter:
    """Follows a table of its own from the anchor on; the sampler ranks each row."""

    def __init__(
        self,
        table: np.ndarray,
        state: SequenceState,
        *,
        num_positions: int = 15,
        clock: Clock | None = None,
        draft_ms: float = 0.0,
    ) -> None:
        self._table = np.ascontiguousarray(table, dtype=np.float32)
        self._state, self._num_positions = state, num_positions
        self._clock, self._draft_ms = clock, draft_ms
        self.num_proposals = 0
        self.observed: list[np.ndarray] = []
        self.seen: list[int] = []

    def reset(self) -> None:
        self.observed.clear()

    def extend_text(self, tokens: Sequence[int]) -> None:
        self.seen += tokens

    def extend_context(self, features: np.ndarray) -> None:
        self.observed.append(features.copy())

    def propose(
        self, anchor: int, sampler: Sampler, num_candidates: int, num_positions: int
    ) -> Proposal:
        self.num_proposals += 1
        if self._clock is not None:
            self._clock.now_ms += self._draft_ms
        tokens, scores, last = [], [], anchor
        for i in range(self._num_positions):
            row = self._table[last : last + 1]
            ranked = sampler.rank(row, self._state.committed + 1 + i, num_candidates)
            tokens.append(ranked.tokens[0])
            scores.append(ranked.log_probs[0])
            last = int(ranked.tokens[0, 0])
        return Proposal(np.array(tokens), np.array(scores))
