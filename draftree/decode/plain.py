"""Plain decoding: one target pass a token. The oracle of every other way."""

from draftree.core import DraftTree, RoundStats, TokenSource
from draftree.decode.sample import Sampler
from draftree.decode.step import Emitted
from draftree.models.target import Target


class PlainDecoder:
    def __init__(self, target: Target, sampler: Sampler, off_reason: str | None = None) -> None:
        self.stats = RoundStats(off_reason=off_reason)
        self._target = target
        self._sampler = sampler
        self._anchor = -1

    def start(self, anchor: int) -> None:
        self._anchor = anchor

    def finish(self) -> None:
        """A step leaves nothing under way."""

    def step(self, max_tokens: int) -> list[Emitted]:
        assert max_tokens >= 1
        state = self._target.state
        state.begin(DraftTree.chain((self._anchor,)), certain=True)
        verified = self._target.forward(rows=(0,))
        state.commit((0,))
        token = self._sampler.choose(verified.logits[0], state.committed)
        self._sampler.accept(token)
        self._anchor = token
        self.stats.num_rounds += 1
        sampler = self._sampler
        return [Emitted(token, TokenSource.PLAIN, sampler.scores, sampler.is_complete)]
