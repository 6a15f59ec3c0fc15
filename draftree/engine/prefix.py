"""Where a prompt can start from: the sequence that is at hand, or what is kept of earlier ones.

Keeps target and draft in step: both go back to the same position, with the same bits as if the
tokens had just been read. Attention layers can go back anywhere; a recurrent state only to
positions that were marked while they were passed. Knows token ids, no text.
"""

from collections.abc import Sequence

from draftree.decode.draft import BlockDrafter
from draftree.state.prefix import PrefixStore
from draftree.state.sequence import SequenceState, Snapshot, common_len
from draftree.state.span import Parts, Span, count_bytes

_MIN_GAP = 16  # tokens between marks; fewer than that are sooner read again than copied
_NUM_POINTS = 2  # of those that a request names, the last ones


class PrefixCache:
    """Copies are made only of what is about to be lost, or when there is time (`save`)."""

    def __init__(self, state: SequenceState, drafter: BlockDrafter | None, max_bytes: int) -> None:
        self.store = PrefixStore(max_bytes, is_recurrent=state.is_recurrent)
        self._state, self._drafter = state, drafter
        self._marks: dict[int, Parts] = {}  # recurrent states at positions of the sequence at hand

    def resume(self, tokens: tuple[int, ...], points: Sequence[int]) -> list[int]:
        """Go to the longest prefix of the tokens that is known; positions further on where `mark`
        is to be called. points: prefixes that later requests are likely to share.
        """
        state = self._state
        state.rollback()
        if self._drafter is not None and self._drafter.position != state.committed:
            self.forget()
        shared = common_len(state.tokens, tokens)
        found = self.store.find(tokens)
        is_whole = shared == state.committed
        at_hand = shared
        if not is_whole:
            self.save()
            if state.is_recurrent:
                at_hand = max((at for at in self._marks if at <= shared), default=0)
        if found.length > at_hand:
            self._restore(tokens[: found.length], found.spans, found.recurrent)
        elif not is_whole:
            self._restore(tokens[:at_hand], (), self._marks.get(at_hand, ()))
        self._marks = {at: mark for at, mark in self._marks.items() if at <= shared}
        return self._plan_marks(len(tokens), (max(shared, found.shared), *points[-_NUM_POINTS:]))

    def mark(self) -> None:
        """Make this position one that the sequence can come back to."""
        if not self._state.is_recurrent or self._state.committed in self._marks:
            return
        marks = self._marks
        marks[self._state.committed] = self._state.copy_recurrent()
        while marks and sum(map(count_bytes, marks.values())) > self.store.max_bytes // 2:
            del marks[min(marks)]
        self.store.reserved_bytes = sum(map(count_bytes, marks.values()))

    def save(self) -> None:
        """Keep the sequence at hand, and what of it was marked."""
        state = self._state
        for at, mark in sorted(self._marks.items()):
            self.store.insert(state.tokens[:at], self._copy, lambda mark=mark: mark)  # type: ignore[misc]
        self.store.insert(state.tokens, self._copy, state.copy_recurrent)

    def forget(self) -> None:
        """The sequence at hand cannot be trusted; what was kept before can."""
        self._state.reset()
        if self._drafter is not None:
            self._drafter.reset()
        self._marks = {}
        self.store.reserved_bytes = 0

    def _plan_marks(self, length: int, points: Sequence[int]) -> list[int]:
        """points and the end of the prompt, but no two that are close together."""
        if not self._state.is_recurrent or self.store.max_bytes == 0:
            return []
        planned: list[int] = []
        last = self._state.committed
        for point in sorted({*points, length}):
            if last + _MIN_GAP <= point <= length:
                planned.append(point)
                last = point
        return planned

    def _copy(self, start: int, end: int) -> Parts:
        parts = self._state.kv.copy(start, end)
        return (*parts, *self._drafter.copy(start, end)) if self._drafter is not None else parts

    def _restore(
        self, tokens: tuple[int, ...], spans: Sequence[Span], recurrent: Parts
    ) -> None:
        state, num_layers = self._state, len(self._state.kv)
        shared = common_len(state.tokens, tokens)
        own = tuple(Span(s.start, s.end, s.parts[:num_layers]) for s in spans)
        if self._drafter is not None:
            rest = [Span(s.start, s.end, s.parts[num_layers:]) for s in spans]
            self._drafter.restore(rest, shared, len(tokens))
        state.restore(Snapshot(tokens, own, recurrent))
