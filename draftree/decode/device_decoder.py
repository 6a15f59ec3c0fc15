"""Decoding where a whole round runs on the device: launched ahead, read one round behind.

The device drafts, builds the tree, verifies, accepts and commits by itself (device_round.py);
here rounds are started, their records read, and the host's picture of the sequence kept in step.
With an automatic budget, a controller says how many rows the next round has, down to one where
drafting does not pay.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from draftree.core import Request, RoundStats, TokenSource
from draftree.decode.controller import SpeculationController
from draftree.decode.decoder import Emitted, Round, plain_round
from draftree.decode.plain import choose_plainly
from draftree.decode.sampler import Sampler
from draftree.drafts.drafter import Drafter
from draftree.models.target import Target

if TYPE_CHECKING:
    from draftree.decode.device_round import GpuRounds


class DeviceDecoder:
    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        rounds: "GpuRounds",
        request: Request,
        *,
        use_draft: bool,
        use_lookup: bool = False,
        controller: SpeculationController | None = None,
        off_reason: str | None = None,
        watch: Callable[[Round], None] | None = None,
    ) -> None:
        """controller: says which rounds draft; without one all do, if use_draft. use_lookup: those
        that do also look their text up.
        """
        self.stats = RoundStats(off_reason=off_reason)
        self._target, self._drafter, self._rounds = target, drafter, rounds
        self._request, self._watch = request, watch
        self._use_lookup = use_lookup
        self._use_draft, self._controller = use_draft, controller if use_draft else None
        if self._controller is not None:
            self._controller.begin_request()
        self._under_way: deque[int] = deque()  # rows of each round
        self._anchor = -1
        self._said: list[int] = []  # of the reply
        self._sampler: Sampler | None = None  # where the host chooses
        self._is_begun = self._is_done = False
        self._unread: deque[list[Emitted]] = deque()  # of rounds that a pause has waited for
        self.round_ms: list[float] = []

    @property
    def anchor(self) -> int:
        return self._anchor

    def start(self, anchor: int, written: Sequence[int] = ()) -> None:
        self._anchor, self._said = anchor, list(written)

    def rehearse(self) -> None:
        """Have all that rounds are made of prepared; none is launched."""
        self._begin()
        self._rounds.begin_segment(1, self._target.state.committed)
        self._is_begun = False

    def step(self, max_tokens: int) -> list[Emitted]:
        """The tokens of the oldest round; the next one runs meanwhile."""
        if self._unread:
            return self._unread.popleft()
        if not self._is_begun:
            self._begin()
            self._begin_free(max_tokens)
        self._launch()
        return self._read()

    def pause(self) -> None:
        """Let the rounds under way end; their tokens come with the next steps, and then rounds
        begin again.
        """
        while self._under_way:
            if emitted := self._read():
                self._unread.append(emitted)
        self._is_begun = False

    @property
    def can_follow(self) -> bool:
        """Log-probabilities have other last bits on the host."""
        return self._request.logprobs is None

    def settle(self) -> list[Emitted]:
        self.pause()
        emitted: list[Emitted] = []
        while self._unread:
            emitted += self.step(0)
        return emitted

    def follow(self, logits: np.ndarray, position: int) -> Emitted:
        """With the host's sampler, which chooses as the device does."""
        if self._sampler is None:
            self._sampler = Sampler.for_request(self._request, len(logits))
            for token in self._said:
                self._sampler.accept(token)
        emitted = choose_plainly(self._sampler, logits, position)
        self.stats.num_rounds += 1
        self.stats.num_batched += 1
        if self._watch is not None:
            self._watch(plain_round(self._anchor, emitted.token))
        self._say(emitted.token)
        return emitted

    def _say(self, *tokens: int) -> None:
        self._said += tokens
        self._anchor = tokens[-1]

    def finish(self) -> None:
        """Let the rounds under way end, and note what they committed."""
        while self._under_way:
            self._read()
        if self._controller is not None:
            self._controller.end_request()

    def _begin(self) -> None:
        drafted = self._drafter.flush_context() if self._drafter is not None else 0
        text = (*self._target.state.tokens, self._anchor) if self._use_lookup else ()
        written: tuple[int, ...] = ()
        if self._request.sampling.has_penalties:  # what counts, where a pause came between
            so_far = *self._target.state.tokens, self._anchor
            written = so_far[len(self._request.prompt_ids) :]
        self._rounds.begin(self._request, self._anchor, drafted, text, written)
        self._is_begun, self._sampler = True, None

    def _begin_free(self, max_tokens: int, end_ids: Collection[int] = ()) -> None:
        self._rounds.begin_segment(max_tokens, self._target.state.committed, end_ids=end_ids)
        self._is_done = False
        self._launch()

    def _launch(self) -> None:
        if not self._is_done:
            size = self._next_size()
            self._rounds.launch(size, *self._limit_lookup(size))
            self._under_way.append(size)

    def _limit_lookup(self, size: int) -> tuple[int, ...]:
        """The most nodes to be looked up, if that is to be said."""
        controller = self._controller
        if controller is None or not self._use_lookup or size == 1:
            return ()
        return (controller.looked.limit(controller.sizes.last_worth(self._rounds.sizes, size)),)

    def _next_size(self) -> int:
        if not self._is_draft_next():
            return 1
        controller, sizes = self._controller, self._rounds.sizes
        return sizes[-1] if controller is None else controller.sizes.choose(sizes)

    def _is_draft_next(self) -> bool:
        if self._controller is None:
            return self._use_draft
        return self._controller.is_draft_next(self._target.state.committed)

    def _read(self) -> list[Emitted]:
        size = self._under_way.popleft()
        record = self._rounds.read()
        if record is None:
            return []
        self._is_done = record.is_last
        tree, path, bonus = record.round.tree, record.round.path, record.round.bonus
        self._target.state.record([tree.tokens[node] for node in path])
        if self._drafter is not None:
            self._drafter.record_context(len(path))
        self._say(*(tree.tokens[node] for node in path[1:]), bonus)
        self._observe(size, path, record.ms, tree.sources.count(TokenSource.NGRAM))
        self.stats.count(tree.num_nodes, max(tree.depths), len(path) - 1)
        self.stats.verify_ms += record.ms
        self.round_ms.append(record.ms)
        if self._watch is not None:
            self._watch(record.round)
        emitted = [Emitted(tree.tokens[node], tree.sources[node]) for node in path[1:]]
        last = TokenSource.BONUS if tree.num_nodes > 1 else TokenSource.PLAIN
        emitted.append(Emitted(bonus, last))
        if record.scores:
            pairs = zip(emitted, record.scores, strict=True)
            emitted = [token._replace(scores=scores) for token, scores in pairs]
        return emitted

    def _observe(self, size: int, path: Sequence[int], ms: float, num_looked: int) -> None:
        """num_looked: of the tree's nodes, the first besides the root."""
        controller = self._controller
        if controller is not None and num_looked > 0:
            controller.looked.observe(num_looked, sum(0 < node <= num_looked for node in path))
        if controller is None or ms <= 0.0:  # a device without a clock
            return
        if size > 1:
            controller.observe_device_draft(len(path), ms)
            controller.sizes.observe(self._rounds.sizes, size, path, ms)
        else:
            controller.observe_plain(ms, ms, self._target.state.committed)
