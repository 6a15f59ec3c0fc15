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
from draftree.decode.draft import BlockDrafter
from draftree.decode.speculative import Round
from draftree.decode.step import Emitted
from draftree.models.target import Target

_TRIAL = 8  # rounds of each kind before they are compared
_MAX_PAUSE = 256
_MIN_GAIN = 1.02


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
        off_reason: str | None = None,
        watch: Callable[[Round], None] | None = None,
    ) -> None:
        self.stats = RoundStats(off_reason=off_reason)
        self._target, self._drafter, self._rounds = target, drafter, rounds
        self._request, self._watch = request, watch
        self._choice = _Choice(is_auto=is_auto and use_draft, use_draft=use_draft)
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
            use_draft = self._choice.next()
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
        self._choice.observe(was_drafted, len(path), record.ms)
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

    def __init__(self, *, is_auto: bool, use_draft: bool) -> None:
        self._is_auto, self._use_draft = is_auto, use_draft
        self._tokens, self._ms = [0.0, 0.0], [0.0, 0.0]  # plain, drafted; older rounds fade
        self._left = _TRIAL  # rounds before the next decision
        self._pause = _TRIAL

    def next(self) -> bool:
        if self._is_auto:
            self._left -= 1
            if self._left <= 0:
                self._decide()
        return self._use_draft

    def observe(self, was_drafted: bool, count: int, ms: float) -> None:
        for kind in range(2):
            fade = 0.95 if kind == was_drafted else 1.0
            self._tokens[kind] *= fade
            self._ms[kind] *= fade
        self._tokens[was_drafted] += count
        self._ms[was_drafted] += ms

    def _decide(self) -> None:
        """Stay with what pays and try the other kind now and then, more rarely each time."""
        if not all(self._ms):
            self._use_draft, self._left = not self._use_draft, _TRIAL
            return
        plain, drafted = (self._tokens[kind] / self._ms[kind] for kind in range(2))
        best = drafted >= _MIN_GAIN * plain
        is_trial_over = self._use_draft != best
        self._use_draft = best if is_trial_over else not best
        if is_trial_over:
            self._left = self._pause = min(4 * self._pause, _MAX_PAUSE)
        else:
            self._left = _TRIAL // 2
