"""Where a prompt can start from: the sequence that is at hand, or what is kept of earlier ones.

Keeps target and draft in step: both go back to the same position, with the same bits as if the
tokens had just been read. Attention layers can go back anywhere; a recurrent state only to
positions that were marked while they were passed. Of a long text the draft's context holds the end
alone: where that is gone, it goes on with less. Knows token ids, no text.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial

import numpy as np

from draftree.drafts.drafter import Drafter
from draftree.state.prefix import Match, PrefixStore
from draftree.state.prefix_file import PrefixFolder
from draftree.state.sequence import SequenceState, Snapshot, common_len
from draftree.state.span import Parts, Span, count_bytes

_MIN_GAP = 16  # tokens between checkpoints; fewer than that are sooner read again than copied
_NUM_POINTS = 2  # of those that a request names, the last ones
_OPENING_LEN = 12  # tokens at a prompt's end that open the reply, which a later one may not repeat
NUM_CHECKPOINTS = 4  # of the sequence at hand
_SHORT_READ = 64  # tokens that are one pass, which takes hardly longer than one of fewer
_SHORT_SPAN = 64  # positions; one that was swapped out is copied again with what follows it


class PrefixCache:
    """Copies are made only of what is about to be lost, or when there is time (`save`). folder:
    where they outlive the engine.
    """

    def __init__(
        self,
        state: SequenceState,
        drafter: Drafter | None,
        max_bytes: int,
        folder: PrefixFolder | None = None,
    ) -> None:
        self.store = PrefixStore(max_bytes, is_recurrent=state.is_recurrent, folder=folder)
        self._state, self._drafter = state, drafter
        self._sinks = 0

    def set_sinks(self, count: int, *, is_swapped: bool) -> None:
        """Use nothing that was read under other sinks. is_swapped: the one at hand is, out."""
        if count != self._sinks:
            if not is_swapped and self._state.committed:
                self.save()
            self.reset()
            self._sinks = count
            self._state.set_sinks(count)

    def find(self, tokens: Sequence[int], sinks: int) -> Match:
        """What is kept of a sequence that was read under so many sinks."""
        return self.store.find(_keys(tokens, sinks))

    def resume(
        self, tokens: tuple[int, ...], points: Sequence[int], held: Match, *, is_swapped: bool
    ) -> list[int]:
        """Go to the longest prefix of the tokens that is known; positions further on where
        `save_checkpoint` is to be called. points: lengths of prefixes that later requests are
        likely to share. held: what is known of it elsewhere. is_swapped: the one at hand is, out.
        """
        state = self._state
        state.rollback()
        if not self._is_in_step:
            self.reset()
        shared = common_len(state.tokens, tokens)
        is_whole, found = shared == state.committed, held
        if not (is_whole and shared and len(tokens) - shared <= _SHORT_READ):  # more than one pass
            found = max(held, self.find(tokens, self._sinks), key=lambda match: match.length)
        at_hand = shared
        if not is_whole:
            if not is_swapped:
                self.save()
            if state.is_recurrent:
                at_hand = max((at for at in state.checkpoints if at <= shared), default=0)
        if found.length > at_hand:
            self._restore(tokens[: found.length], found.spans, found.recurrent)
        elif not is_whole:  # spans: the draft's context may be gone where the target's is at hand
            self._restore(tokens[:at_hand], found.spans, state.checkpoints.get(at_hand, ()))
        self._limit_checkpoints()
        if state.committed and len(tokens) - state.committed <= _SHORT_READ:
            self._save_start()
            return []
        ends, end = {*points[-_NUM_POINTS:]}, len(tokens) - _OPENING_LEN
        if max(ends, default=0) <= end - _MIN_GAP:
            ends.add(end)
        return self._plan_checkpoints(len(tokens), {max(shared, found.shared), *ends})

    def count_known(self, tokens: tuple[int, ...]) -> int:
        """Of the beginning of the tokens, how many need not be read."""
        state = self._state
        at_hand = common_len(state.tokens, tokens)
        if state.is_recurrent and at_hand < state.committed:
            at_hand = max((at for at in state.checkpoints if at <= at_hand), default=0)
        return max(at_hand, self.store.find(tokens).length)

    def _save_start(self) -> None:
        """Instead of checkpoints on the way, which would cut the only pass into several."""
        last = max(self._state.checkpoints, default=0)
        if self.store.max_bytes > 0 and self._state.committed - last >= _MIN_GAP:
            self.save_checkpoint()

    def save_checkpoint(self) -> None:
        """Make this position one that the sequence can come back to."""
        self._state.save_checkpoint()
        self._limit_checkpoints()

    def save(self) -> None:
        """Keep the sequence at hand, and what of it was marked."""
        state = self._state
        if not self._is_in_step:
            return
        cut = self._drafter.first if self._drafter is not None else 0
        keys = np.asarray(_keys(state.tokens, self._sinks), np.int64)
        for at in sorted(state.checkpoints):
            checkpoint = partial(state.checkpoints.__getitem__, at)
            self.store.insert(keys[:at], self._copy, checkpoint, cut)
        self.store.insert(keys, self._copy, state.copy_recurrent, cut)

    def offload(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Keep the sequence at hand, then put copies into files until asked to stop."""
        self.save()
        self.store.write(should_stop)

    def reset(self) -> None:
        """The sequence at hand cannot be trusted; what was kept before can."""
        self._state.reset()
        if self._drafter is not None:
            self._drafter.reset()
        self._limit_checkpoints()

    def swap_out(self, last: Snapshot | None) -> Snapshot:
        """A copy of the sequence at hand and of the draft's context. last: an earlier one, so that
        only what is new is copied.
        """
        tokens = tuple(self._state.tokens)
        spans = list(last.spans if last is not None else self.find(tokens, self._sinks).spans)
        if spans and spans[-1].end - spans[-1].start < _SHORT_SPAN:
            spans.pop()
        start = spans[-1].end if spans else 0
        first = self._drafter.first if self._drafter is not None else 0
        for begin, end in ((start, min(first, len(tokens))), (max(start, first), len(tokens))):
            if begin < end:
                spans.append(Span(begin, end, self._copy(begin, end)))
        return Snapshot(tokens, tuple(spans), self._state.copy_recurrent())

    def swap_in(self, swapped: Snapshot, checkpoints: dict[int, Parts]) -> None:
        """Go on from such a copy, and with the checkpoints that its sequence had."""
        if not self._is_in_step:
            self.reset()
        self._restore(swapped.tokens, swapped.spans, swapped.recurrent)
        self._state.checkpoints = checkpoints
        self._limit_checkpoints()

    def catch_up(self, written: Snapshot, features: Sequence[np.ndarray], num_written: int) -> None:
        """Go on with what was written elsewhere to the sequence at hand: so many tokens. features:
        of the last of them; a draft whose context would have a gap begins anew behind it.
        """
        checkpoints = self._state.checkpoints
        self._state.restore(written)
        self._state.checkpoints = checkpoints  # this place is none that others begin with
        drafter = self._drafter
        if drafter is None:
            return
        if len(features) < num_written:
            drafter.restore((), 0, len(written.tokens) - len(features))
        if features:
            drafter.extend_context_from_host(np.stack(features))

    @property
    def _is_in_step(self) -> bool:
        return self._drafter is None or self._drafter.position == self._state.committed

    def _limit_checkpoints(self) -> None:
        """The first, which other conversations begin with as well, and the last few; not so many
        that nothing else could be kept.
        """
        checkpoints = self._state.checkpoints
        checkpoint_bytes = max(map(count_bytes, checkpoints.values()), default=1)
        count = min(NUM_CHECKPOINTS, self.store.max_bytes // 2 // checkpoint_bytes)
        first = min(1, max(count - 1, 0))
        for at in sorted(checkpoints)[first : first + max(len(checkpoints) - count, 0)]:
            del checkpoints[at]
        self.store.reserve(checkpoint_bytes * len(checkpoints))

    def _plan_checkpoints(self, length: int, points: Collection[int]) -> list[int]:
        """The points on the way, but no two that are close together; of two short passes, the last
        that makes no third.
        """
        if not self._state.is_recurrent or self.store.max_bytes == 0:
            return []
        start = self._state.committed
        if start > 0 and length - start <= 2 * _SHORT_READ:
            halves = range(length - _SHORT_READ, start + _SHORT_READ + 1)
            points = [max(fitting)] if (fitting := {*points} & {*halves}) else points
        planned: list[int] = []
        last = max(self._state.checkpoints, default=0)
        for point in sorted(points):
            if self._state.committed < point <= length and point - last >= _MIN_GAP:
                planned.append(point)
                last = point
        return planned

    def _copy(self, start: int, end: int) -> Parts:
        parts, drafter = self._state.kv.copy(start, end), self._drafter
        if drafter is not None and start >= drafter.first:
            return (*parts, *drafter.copy(start, end))
        return parts

    def _restore(self, tokens: tuple[int, ...], spans: Sequence[Span], recurrent: Parts) -> None:
        state, num_layers = self._state, len(self._state.kv)
        shared = common_len(state.tokens, tokens)
        own = tuple(Span(s.start, s.end, s.parts[:num_layers]) for s in spans)
        if self._drafter is not None:
            parts = [(s.start, s.end, s.parts[num_layers:]) for s in spans]
            rest = [Span(*each) for each in parts if each[2]]
            self._drafter.restore(rest, shared, len(tokens))
        state.restore(Snapshot(tokens, own, recurrent))


def _keys(tokens: Sequence[int], sinks: int) -> Sequence[int]:
    """What a text is kept under: texts of other sinks have another beginning."""
    return [tokens[0] + (sinks << 32), *tokens[1:]] if sinks and tokens else tokens
