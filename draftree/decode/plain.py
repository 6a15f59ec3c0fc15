"""Plain decoding: one target pass a token. The oracle of every other way."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from draftree.core import DraftTree, RoundStats, TokenSource
from draftree.decode.decoder import Emitted
from draftree.decode.sampler import Sampler
from draftree.models.target import ForwardOutput, Target


class PlainStep(NamedTuple):
    emitted: Emitted
    verified: ForwardOutput
    pass_ms: float


def take_plain_step(target: Target, sampler: Sampler, anchor: int) -> PlainStep:
    """The token after the anchor, which is committed."""
    state = target.state
    start = time.perf_counter()
    state.begin(DraftTree.chain((anchor,)), is_committed=True)
    verified = target.forward(rows=(0,))
    pass_ms = (time.perf_counter() - start) * 1000
    state.commit((0,))
    emitted = choose_plainly(sampler, verified.logits[0], state.committed)
    return PlainStep(emitted, verified, pass_ms)


def choose_plainly(sampler: Sampler, logits: np.ndarray, position: int) -> Emitted:
    """The token at this position, which is part of the text from now on."""
    token = sampler.choose(logits, position)
    sampler.accept(token)
    return Emitted(token, TokenSource.PLAIN, sampler.scores, sampler.is_complete)


class PlainDecoder:
    def __init__(self, target: Target, sampler: Sampler, off_reason: str | None = None) -> None:
        self.stats = RoundStats(off_reason=off_reason)
        self._target = target
        self._sampler = sampler
        self._anchor = -1

    @property
    def anchor(self) -> int:
        return self._anchor

    def start(self, anchor: int, written: Sequence[int] = ()) -> None:
        self._anchor = anchor
        for token in written:
            self._sampler.accept(token)

    def pause(self) -> None:
        """A step leaves nothing under way."""

    def finish(self) -> None:
        """A step leaves nothing under way."""

    def step(self, max_tokens: int) -> list[Emitted]:
        assert max_tokens >= 1
        emitted = take_plain_step(self._target, self._sampler, self._anchor).emitted
        self._anchor = emitted.token
        self.stats.num_rounds += 1
        return [emitted]

    @property
    def can_follow(self) -> bool:
        return True

    def settle(self) -> list[Emitted]:
        return []

    def follow(self, logits: np.ndarray, position: int) -> Emitted:
        emitted = choose_plainly(self._sampler, logits, position)
        self._anchor = emitted.token
        self.stats.num_rounds += 1
        self.stats.num_batched += 1
        return emitted
