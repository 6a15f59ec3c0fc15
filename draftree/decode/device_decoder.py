"""Decoding where a whole round runs on the device: launched ahead, read one round behind.

The device drafts, builds the tree, verifies, accepts and commits by itself (device_round.py);
here rounds are started, their records read, and the host's picture of the sequence kept in step.
With an automatic budget, rounds without a draft take over where drafting does not pay.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from draftree.core import Request, RoundStats, TokenSource
from draftree.decode.controller import SpeculationController
from draftree.decode.decoder import Emitted, Round
from draftree.drafts.drafter import Drafter
from draftree.models.target import Target


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


class DeviceDecoder:
    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        rounds: DeviceRounds,
        request: Request,
        *,
        use_draft: bool,
        controller: SpeculationController | None = None,
        off_reason: str | None = None,
        watch: Callable[[Round], None] | None = None,
    ) -> None:
        """controller: says which rounds draft; without one all do, if use_draft."""
        self.stats = RoundStats(off_reason=off_reason)
        self._target, self._drafter, self._rounds = target, drafter, rounds
        self._request, self._watch = request, watch
        self._use_draft, self._controller = use_draft, controller if use_draft else None
        if self._controller is not None:
            self._controller.begin_request()
        self._under_way: deque[bool] = deque()  # whether each round drafts
        self._anchor = -1
        self._is_begun = self._is_done = False
        self._unread: deque[list[Emitted]] = deque()  # of rounds that a pause has waited for
        self.round_ms: list[float] = []

    def start(self, anchor: int) -> None:
        self._anchor = anchor

    def step(self, max_tokens: int) -> list[Emitted]:
        """The tokens of the oldest round; the next one runs meanwhile."""
        if self._unread:
            return self._unread.popleft()
        if not self._is_begun:
            self._begin(max_tokens)
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

    def finish(self) -> None:
        """Let the rounds under way end, and note what they committed."""
        while self._under_way:
            self._read()
        if self._controller is not None:
            self._controller.end_request()

    def _begin(self, max_tokens: int) -> None:
        drafted = self._drafter.flush_context() if self._drafter is not None else 0
        committed = self._target.state.committed
        self._rounds.begin(self._request, self._anchor, max_tokens, committed, drafted)
        self._is_begun = True
        self._launch()

    def _launch(self) -> None:
        if not self._is_done:
            use_draft, controller = self._use_draft, self._controller
            if controller is not None:
                use_draft = controller.is_draft_next(self._target.state.committed)
            self._rounds.launch(use_draft=use_draft)
            self._under_way.append(use_draft)

    def _read(self) -> list[Emitted]:
        was_drafted = self._under_way.popleft()
        record = self._rounds.read()
        if record is None:
            return []
        self._is_done = record.is_last
        tree, path, bonus = record.round.tree, record.round.path, record.round.bonus
        self._target.state.record([tree.tokens[node] for node in path])
        if self._drafter is not None:
            self._drafter.record_context(len(path))
        self._anchor = bonus
        self._observe(was_drafted, len(path), record.ms)
        self.stats.count(tree.num_nodes, max(tree.depths), len(path) - 1)
        self.stats.verify_ms += record.ms
        self.round_ms.append(record.ms)
        if self._watch is not None:
            self._watch(record.round)
        emitted = [Emitted(tree.tokens[node], tree.sources[node]) for node in path[1:]]
        last = TokenSource.BONUS if tree.num_nodes > 1 else TokenSource.PLAIN
        return [*emitted, Emitted(bonus, last)]

    def _observe(self, was_drafted: bool, num_tokens: int, ms: float) -> None:
        if self._controller is None or ms <= 0.0:  # a device without a clock
            return
        if was_drafted:
            self._controller.observe_device_draft(num_tokens, ms)
        else:
            self._controller.observe_plain(ms, ms, self._target.state.committed)
