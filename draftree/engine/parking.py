"""Requests that take turns on one sequence: whose the device holds now, and copies of the others.

A copy is made when another request needs the device, not before, and only of what is new since the
last one. Copies are held until their request goes on or ends, however full the prefix cache is.
"""

from collections.abc import Sequence

from draftree.engine.prefix import PrefixCache
from draftree.errors import EngineError
from draftree.state.prefix import Match
from draftree.state.sequence import SequenceState, Snapshot, common_len
from draftree.state.span import Parts, count_bytes

_WORTH_WAITING = 16  # tokens; fewer are sooner read than waited for


class Seat:
    """One live request: what it reads, how far it is, and its copy while it is parked."""

    def __init__(self, prompt: tuple[int, ...], sinks: int = 0) -> None:
        self.prompt, self.sinks = prompt, sinks
        self.num_read = 0
        self.stops: Sequence[int] = ()  # where checkpoints will be, from when reading began
        self.is_reading = False
        self.parked: Snapshot | None = None
        self.checkpoints: dict[int, Parts] = {}
        self.is_lost = False

    @property
    def parked_bytes(self) -> int:
        kept = () if self.parked is None else self.parked.parts
        return count_bytes(kept) + sum(map(count_bytes, self.checkpoints.values()))


class Parking:
    def __init__(self, prefix: PrefixCache, state: SequenceState, max_live: int) -> None:
        self._prefix, self._state, self._max_live = prefix, state, max_live
        self._seated: Seat | None = None  # whose sequence is at hand
        self._live: set[Seat] = set()

    @property
    def num_bytes(self) -> int:
        """Main memory that the copies take."""
        return sum(seat.parked_bytes for seat in tuple(self._live))

    def admit(self, prompt: tuple[int, ...], sinks: int = 0) -> Seat:
        if len(self._live) >= self._max_live:
            raise EngineError(
                f"{len(self._live)} replies of this engine are unfinished already; read one to its "
                "end, close it, or open the engine with a larger `parallel`."
            )
        seat = Seat(prompt, sinks)
        self._live.add(seat)
        return seat

    def leave(self, seat: Seat) -> None:
        """The request has ended; what the device holds of it stays for others to begin with."""
        self._live.discard(seat)
        seat.parked, seat.checkpoints = None, {}

    def begin(self, seat: Seat, points: Sequence[int], *, is_parked: bool) -> Sequence[int]:
        """Give the device to a new request, as far in its prompt as anything is known of it;
        positions where its checkpoints are to be saved. is_parked: what `park` said.
        """
        held = self._find(seat)
        self._seated = seat
        self._prefix.set_sinks(seat.sinks, is_parked=is_parked)
        seat.stops = self._prefix.resume(seat.prompt, points, held, is_parked=is_parked)
        seat.is_reading, seat.num_read = True, self._state.committed
        return seat.stops

    def enter(self, seat: Seat) -> None:
        """Give the device to a request that has begun."""
        if seat.is_lost:
            raise EngineError(
                "The reply could not be kept while others had their turns; ask again."
            )
        if self._seated is seat:
            return
        if not self.park():
            self._prefix.save()
        assert seat.parked is not None, "whoever lost the device was parked"
        self._seated = None  # until all of it is there
        self._prefix.set_sinks(seat.sinks, is_parked=True)
        self._prefix.unpark(seat.parked, dict(seat.checkpoints))
        self._seated = seat

    def vacate(self) -> None:
        """Have nothing at hand."""
        self.park()
        self.reset()

    def reset(self) -> None:
        """The sequence at hand cannot be trusted; copies can."""
        self._seated = None
        self._prefix.reset()

    def is_read_elsewhere(self, seat: Seat) -> bool:
        """Whether another request is on its way to read what this one begins with, so that it is
        sooner waited for than read twice.
        """
        known = self._prefix.find(seat.prompt, seat.sinks).length
        for other in self._live - {seat}:
            if other.is_reading and other.sinks == seat.sinks:
                end = common_len(other.prompt, seat.prompt)
                if self._state.is_recurrent:
                    end = max((stop for stop in other.stops if stop <= end), default=0)
                if end - max(known, other.num_read) >= _WORTH_WAITING:
                    return True
        return False

    def park(self) -> bool:
        """Copy the sequence at hand, if a live request still needs it."""
        seat = self._seated
        if seat is None or seat not in self._live:
            return False
        try:
            seat.parked = self._prefix.park(seat.parked)
            seat.checkpoints = dict(self._state.checkpoints)
        except BaseException:
            seat.is_lost = True
            raise
        return True

    def _find(self, wanted: Seat) -> Match:
        """What the copies hold of a sequence."""
        best = Match()
        for seat in tuple(self._live):
            if seat.parked is None or seat.sinks != wanted.sinks:
                continue
            shared = common_len(seat.parked.tokens, wanted.prompt)
            recurrent: Parts = ()
            length = shared
            if self._state.is_recurrent:
                length = max((at for at in seat.checkpoints if at <= shared), default=0)
                recurrent = seat.checkpoints.get(length, ())
            if length > best.length:
                best = Match(length, seat.parked.spans, recurrent, shared)
        return best
