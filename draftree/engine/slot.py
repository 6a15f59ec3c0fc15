"""Requests that take turns on one sequence: whose the device holds now, and copies of the others.

A copy is made when another request needs the device, not before, and only of what is new since the
last one. Copies are held until their request goes on or ends, however full the prefix cache is.
"""

from collections.abc import Sequence

import numpy as np

from draftree.engine.prefix import PrefixCache
from draftree.errors import EngineError
from draftree.state.prefix import Match
from draftree.state.sequence import SequenceState, Snapshot, common_len
from draftree.state.span import Parts, count_bytes

_WORTH_WAITING = 16  # tokens; fewer are sooner read than waited for


class Slot:
    """One live request: what it reads, how far it is, and its copy while it is swapped out."""

    def __init__(self, prompt: tuple[int, ...], sinks: int = 0) -> None:
        self.prompt, self.sinks = prompt, sinks
        self.num_read = 0
        self.stops: Sequence[int] = ()  # where checkpoints will be, from when reading began
        self.is_reading = False
        self.swapped: Snapshot | None = None
        self.checkpoints: dict[int, Parts] = {}
        self.is_lost = False
        self.is_lent = False  # another sequence goes on with it, see `lend`

    @property
    def swapped_bytes(self) -> int:
        kept = () if self.swapped is None else self.swapped.parts
        return count_bytes(kept) + sum(map(count_bytes, self.checkpoints.values()))


class Slots:
    def __init__(self, prefix: PrefixCache, state: SequenceState, max_live: int) -> None:
        self._prefix, self._state, self._max_live = prefix, state, max_live
        self._active: Slot | None = None  # whose sequence is at hand
        self._live: set[Slot] = set()

    @property
    def num_bytes(self) -> int:
        """Main memory that the copies take."""
        return sum(slot.swapped_bytes for slot in tuple(self._live))

    def admit(self, prompt: tuple[int, ...], sinks: int = 0) -> Slot:
        if len(self._live) >= self._max_live:
            raise EngineError(
                f"{len(self._live)} replies of this engine are unfinished already; read one to its "
                "end, close it, or open the engine with a larger `parallel`."
            )
        slot = Slot(prompt, sinks)
        self._live.add(slot)
        return slot

    def leave(self, slot: Slot) -> None:
        """The request has ended; what the device holds of it stays for others to begin with."""
        self._live.discard(slot)
        slot.swapped, slot.checkpoints = None, {}

    def begin(self, slot: Slot, points: Sequence[int], *, is_swapped: bool) -> Sequence[int]:
        """Give the device to a new request, as far in its prompt as anything is known of it;
        positions where its checkpoints are to be saved. is_swapped: what `swap_out` said.
        """
        held = self._find(slot)
        self._active = slot
        self._prefix.set_sinks(slot.sinks, is_swapped=is_swapped)
        slot.stops = self._prefix.resume(slot.prompt, points, held, is_swapped=is_swapped)
        slot.is_reading, slot.num_read = True, self._state.committed
        return slot.stops

    def is_at_hand(self, slot: Slot) -> bool:
        """Whether the device holds its sequence, as the request left it."""
        return self._active is slot and not slot.is_lost

    def enter(self, slot: Slot) -> None:
        """Give the device to a request that has begun."""
        _check_kept(slot)
        if self._active is not slot:
            self._swap_in(slot)

    def lend(self, slot: Slot) -> Snapshot:
        """A copy of what the request has so far, with which another sequence is to go on."""
        _check_kept(slot)
        if self._active is slot:
            self.swap_out()
        assert slot.swapped is not None, "whoever lost the device was swapped out"
        slot.is_lent = True
        return slot.swapped

    def take_back(
        self, slot: Slot, written: Snapshot, features: Sequence[np.ndarray], num_written: int
    ) -> None:
        """Give the device to a request that was lent, and has written so many tokens since then.
        features: of the last of them, for a draft.
        """
        slot.is_lent = False
        self._swap_in(slot)
        self._prefix.catch_up(written, features, num_written)

    def _swap_in(self, slot: Slot) -> None:
        if self._active is not slot and not self.swap_out():
            self._prefix.save()
        assert slot.swapped is not None, "whoever lost the device was swapped out"
        self._active = None  # until all of it is there
        self._prefix.set_sinks(slot.sinks, is_swapped=True)
        self._prefix.swap_in(slot.swapped, dict(slot.checkpoints))
        self._active = slot

    def vacate(self) -> None:
        """Have nothing at hand."""
        self.swap_out()
        self.reset()

    def reset(self) -> None:
        """The sequence at hand cannot be trusted; copies can."""
        self._active = None
        self._prefix.reset()

    def break_off(self, slot: Slot) -> None:
        """A pass of the request failed. Another live one's sequence at hand was not touched."""
        if self._active is slot or self._active not in self._live:
            self.reset()

    def is_read_elsewhere(self, slot: Slot) -> bool:
        """Whether another request is on its way to read what this one begins with, so that it is
        sooner waited for than read twice.
        """
        others = self._live - {slot}
        known = self._prefix.find(slot.prompt, slot.sinks).length if others else 0
        for other in others:
            if other.is_reading and other.sinks == slot.sinks:
                end = common_len(other.prompt, slot.prompt)
                if self._state.is_recurrent:
                    end = max((stop for stop in other.stops if stop <= end), default=0)
                if end - max(known, other.num_read) >= _WORTH_WAITING:
                    return True
        return False

    def swap_out(self) -> bool:
        """Copy the sequence at hand, if a live request still needs it."""
        slot = self._active
        if slot is None or slot not in self._live:
            return False
        if slot.is_lent:  # copied, when it was
            return True
        try:
            slot.swapped = self._prefix.swap_out(slot.swapped)
            slot.checkpoints = dict(self._state.checkpoints)
        except BaseException:
            slot.is_lost = True
            raise
        return True

    def _find(self, wanted: Slot) -> Match:
        """What the copies hold of a sequence."""
        best = Match()
        for slot in tuple(self._live):
            if slot.swapped is None or slot.sinks != wanted.sinks:
                continue
            shared = common_len(slot.swapped.tokens, wanted.prompt)
            recurrent: Parts = ()
            length = shared
            if self._state.is_recurrent:
                length = max((at for at in slot.checkpoints if at <= shared), default=0)
                recurrent = slot.checkpoints.get(length, ())
            if length > best.length:
                best = Match(length, slot.swapped.spans, recurrent, shared)
        return best


def _check_kept(slot: Slot) -> None:
    if slot.is_lost:
        raise EngineError("The reply could not be kept while others had their turns; ask again.")
