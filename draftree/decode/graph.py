"""Decoding where a whole round runs on the device: launched ahead, read one round behind.

The device drafts, builds the tree, verifies, accepts and commits by itself (kernels/cuda/round.py);
here rounds are started, their records read, and the host's picture of the sequence kept in step.
With an automatic budget, rounds without a draft take over where drafting does not pay.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from draftree.core import Request, RoundStats, TokenSource
from draftree.decode.decoder import Emitted
from draftree.decode.draft import BlockDrafter
from draftree.decode.speculative import Round
from draftree.models.target import Target

_TRIAL = 8  # drafted rounds before they are judged
_COMPARED = 3  # plain rounds, where it is not known what they take
_MAX_RUN, _MAX_PAUSE = 512, 256  # drafted rounds without plain ones to compare with; plain ones
_NEAR = 2048  # positions that make no difference to what a round takes
_MIN_GAIN, _FADE = 1.02, 0.95


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """What one round did, and how long it took."""

    round: Round
    is_last: bool
    ms: float


class DeviceRounds(Protocol):
    """Rounds of one sequence on a device."""

    @staticmethod
    def can_serve(request: Request) -> bool:
        """Whether the device can make all of the request's choices."""
        ...

    def begin(
        self, request: Request, anchor: int, max_tokens: int, committed: int, drafted: int
    ) -> None:
        """committed, drafted: how many positions target and draft have read."""
        ...

    def launch(self, *, use_draft: bool) -> None:
        """Queue a round behind those under way."""
        ...

    def read(self) -> DeviceRecord | None:
        """Wait for the oldest round under way; None if it was launched after the end."""
        ...


@dataclass(slots=True)
class Pace:
    """What a plain round takes, kept over requests: what drafted ones are compared with."""

    ms: float = 0.0  # 0: not known
    position: int = 0  # of the sequence when it was timed
    num_since: int = 0  # drafted rounds since

    def observe(self, ms: float, position: int) -> None:
        """Slow rounds count little: something may have come between."""
        if self.ms:
            ms = self.ms + (0.5 if ms < self.ms else 0.1) * (min(ms, 2.0 * self.ms) - self.ms)
        self.ms, self.position, self.num_since = ms, position, 0

    def is_known_at(self, position: int) -> bool:
        """Passes take longer as the context grows, which is forgiven up to a point."""
        is_near = abs(position - self.position) <= _NEAR + min(position, self.position)
        return self.ms > 0.0 and self.num_since < _MAX_RUN and is_near


class GraphDecoder:
    def __init__(
        self,
        target: Target,
        drafter: BlockDrafter | None,
        rounds: DeviceRounds,
        request: Request,
        *,
        use_draft: bool,
        is_auto: bool,
        pace: Pace | None = None,
        off_reason: str | None = None,
        watch: Callable[[Round], None] | None = None,
    ) -> None:
        """pace: what is known of plain rounds, and learnt here."""
        self.stats = RoundStats(off_reason=off_reason)
        self._target, self._drafter, self._rounds = target, drafter, rounds
        self._request, self._watch = request, watch
        is_auto = is_auto and use_draft
        self._choice = _Choice(pace or Pace(), is_auto=is_auto, use_draft=use_draft)
        self._under_way: deque[bool] = deque()  # whether each round drafts
        self._anchor = -1
        self._is_begun = self._is_done = False
        self.round_ms: list[float] = []

    def start(self, anchor: int) -> None:
        self._anchor = anchor

    def step(self, max_tokens: int) -> list[Emitted]:
        """The tokens of the oldest round; the next one runs meanwhile."""
        if not self._is_begun:
            self._begin(max_tokens)
        self._launch()
        return self._read()

    def finish(self) -> None:
        """Let the rounds under way end, and note what they committed."""
        while self._under_way:
            self._read()

    def _begin(self, max_tokens: int) -> None:
        drafted = self._drafter.catch_up() if self._drafter is not None else 0
        committed = self._target.state.committed
        self._rounds.begin(self._request, self._anchor, max_tokens, committed, drafted)
        self._is_begun = True
        self._launch()

    def _launch(self) -> None:
        if not self._is_done:
            use_draft = self._choice.next(self._target.state.committed)
            self._rounds.launch(use_draft=use_draft)
            self._under_way.append(use_draft)

    def _read(self) -> list[Emitted]:
        was_drafted = self._under_way.popleft()
        record = self._rounds.read()
        if record is None:
            return []
        self._is_done = record.is_last
        tree, path, bonus = record.round.tree, record.round.path, record.round.bonus
        self._target.state.note([tree.tokens[node] for node in path])
        if self._drafter is not None:
            self._drafter.note(len(path))
        self._anchor = bonus
        self._choice.observe(was_drafted, len(path), record.ms, self._target.state.committed)
        self.stats.count(tree.num_nodes, max(tree.depths), len(path) - 1)
        self.stats.verify_ms += record.ms
        self.round_ms.append(record.ms)
        if self._watch is not None:
            self._watch(record.round)
        emitted = [Emitted(tree.tokens[node], tree.sources[node]) for node in path[1:]]
        last = TokenSource.BONUS if tree.num_nodes > 1 else TokenSource.PLAIN
        return [*emitted, Emitted(bonus, last)]


class _Choice:
    """Whether the next round drafts: the kind that gave more tokens a millisecond, with trials."""

    def __init__(self, pace: Pace, *, is_auto: bool, use_draft: bool) -> None:
        self._pace = pace
        self._is_auto, self._use_draft = is_auto, use_draft
        self._tokens = self._ms = 0.0  # of drafted rounds; older ones fade
        self._left = _TRIAL  # rounds before the next decision
        self._pause = _TRIAL

    def next(self, position: int) -> bool:
        if self._is_auto:
            self._left -= 1
            if self._left < 0:
                self._decide(position)
        return self._use_draft

    def observe(self, was_drafted: bool, count: int, ms: float, position: int) -> None:
        if ms <= 0.0:  # a device without a clock
            return
        if not was_drafted:
            self._pace.observe(ms, position)
            return
        self._pace.num_since += 1
        self._tokens = _FADE * self._tokens + count
        self._ms = _FADE * self._ms + ms

    def _decide(self, position: int) -> None:
        """Draft while it pays. A few plain rounds where theirs is not known; more of them, and then
        a trial, each time a draft did not pay.
        """
        if not self._use_draft:
            self._use_draft, self._left = True, _TRIAL // 2
        elif not self._pace.is_known_at(position):
            self._use_draft, self._left = False, _COMPARED
        elif self._tokens * self._pace.ms < _MIN_GAIN * self._ms:
            self._use_draft, self._left = False, self._pause
            self._pause = min(4 * self._pause, _MAX_PAUSE)
            self._tokens, self._ms = self._tokens / 4, self._ms / 4  # the trial decides
        else:
            self._pause = _TRIAL
