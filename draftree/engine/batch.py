"""Requests that write side by side: where it pays, a plain step is a row of a pass that others
share, and no request has the device to itself.

Each sequence in the batch has keys, values and recurrent state of its own. Whoever has the turn
runs passes for all; the others find their tokens when their turn comes. Texts are those of requests
alone, since a row's bits do not depend on its company. A draft reads what was written meanwhile
when its request leaves the batch.
"""

import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from draftree.core import Request
from draftree.decode.decoder import BatchableDecoder, Emitted
from draftree.engine.batch_gain import BatchGain
from draftree.engine.lock import Turn
from draftree.engine.parts import EngineParts
from draftree.engine.slot import Slot, Slots
from draftree.engine.stream import TokenStream
from draftree.models.batch import BatchTarget
from draftree.state.sequence import Snapshot
from draftree.state.span import Span

_FRAME_S = 0.03  # of passes, before others say what they wrote in them
_SLICE_S = 0.25  # the same where requests wait that write nothing yet: they have turns as long
_MOST_READY = 128  # tokens that a request may be behind
_FEATURE_BYTES = 2**25  # of those that a draft will read; of more, the last ones
_JOIN_GAIN, _STAY_GAIN = 1.1, 1.0  # over rounds of each by itself


class Batch:
    """mode: "always", or "auto": where it is worth it."""

    def __init__(self, parts: EngineParts, slots: Slots, mode: str) -> None:
        device = parts.device
        members = [device.new_member_ops() for _ in range(parts.plan.batch)]
        self._target = BatchTarget(parts.target, members, device.new_batch_ops)
        self._slots, self._is_forced, self._size = slots, mode == "always", len(members)
        self._num_kv_layers = len(parts.target.kv)
        self.most_features = _FEATURE_BYTES // max(self._target.feature_bytes, 1)
        self.gain = BatchGain()
        self._writing: set[BatchedDecoder] = set()  # those that could join
        self._joined: list[BatchedDecoder] = []  # row by row

    def begin(self, decoder: "BatchedDecoder") -> None:
        self._writing.add(decoder)

    def end(self, decoder: "BatchedDecoder") -> None:
        """No row of it is wanted any more. Other threads may call, while somebody runs passes."""
        self._writing.discard(decoder)

    def is_wanted(self, decoder: "BatchedDecoder") -> bool:
        """Whether the request is to write in the batch."""
        self._drop_ended()
        is_joined, count = decoder in self._joined, min(len(self._writing), self._size)
        if count < 2 or (not is_joined and len(self._joined) >= self._size):
            return False
        if decoder.has_yielded and self.is_blocked(decoder):
            return False
        least = _STAY_GAIN if is_joined else _JOIN_GAIN
        return self._is_forced or self.gain.is_worth(count, least)

    def has_joined(self, decoder: "BatchedDecoder") -> bool:
        return decoder in self._joined

    def is_blocked(self, decoder: "BatchedDecoder") -> bool:
        """Whether somebody else has to have a turn before the next pass."""
        return any(each.is_full for each in self._joined if each is not decoder)

    def do_others_wait(self, decoder: "BatchedDecoder") -> bool:
        """Whether others are to join or to end, or have tokens that they have not said."""
        others = [each for each in self._writing if each is not decoder]
        return any(
            each.ready or each.is_full if self.has_joined(each) else self.is_wanted(each)
            for each in others
        )

    def enter(self, decoder: "BatchedDecoder") -> None:
        """Give the device's own sequence to the request."""
        self._slots.enter(decoder.slot)

    def join(self, decoder: "BatchedDecoder") -> None:
        """Take over from the device's sequence, or from the copy of one that had to leave it."""
        slot, row = decoder.slot, len(self._joined)
        copy, num_layers = self._slots.lend(slot), self._num_kv_layers
        self._target.prepare(row + 1)
        spans = tuple(Span(s.start, s.end, s.parts[:num_layers]) for s in copy.spans)
        self._put(row, decoder, Snapshot(copy.tokens, spans, copy.recurrent))
        self._joined.append(decoder)

    def leave(self, decoder: "BatchedDecoder") -> None:
        """The device's sequence is the request's again, as if all that was said had been written
        there. A recurrent state cannot go back to it, so then what was written is lost.
        """
        row, slot = self._joined.index(decoder), decoder.slot
        state, copy, num_unsaid = self._target.states[row], slot.swapped, len(decoder.ready)
        assert copy is not None, "whoever joined was copied"
        start, end = len(copy.tokens), state.committed - num_unsaid
        if num_unsaid and (state.is_recurrent or end < start):
            return self._remove(decoder)
        span = Span(start, end, state.kv.copy(start, end))
        written = Snapshot(tuple(state.tokens[:end]), (span,), state.copy_recurrent())
        features = list(decoder.features)
        if num_unsaid:
            del features[-num_unsaid:]
        self._remove(decoder)
        decoder.features.clear()
        self._slots.take_back(slot, written, features, end - start)

    def run(self, runner: "BatchedDecoder") -> None:
        """Passes for all, until others should say what they wrote, or one has ended."""
        start, is_any_reading = time.perf_counter(), self._slots.num_live > len(self._writing)
        limit_s, num_passes = _SLICE_S if is_any_reading else _FRAME_S, 0
        self.gain.begin(tuple(self._joined))
        while num_passes == 0 or not (
            time.perf_counter() - start >= limit_s or any(each.is_full for each in self._joined)
        ):
            self._step(runner)
            num_passes += 1
        if is_any_reading:  # in turns of its own
            self.gain.forget()

    def _step(self, runner: "BatchedDecoder") -> None:
        joined = list(self._joined)
        self._target.prepare(len(joined))
        start = time.perf_counter()
        try:
            output = self._target.forward([each.anchor for each in joined])
            for row, each in enumerate(joined):
                each.follow(output.logits[row], self._target.states[row].committed)
                if output.features is not None:
                    each.features.append(np.array(output.features[row]))
        except BaseException:
            for each in joined:  # nobody knows what their states hold
                each.slot.is_lost, each.slot.is_lent = True, False
            self._joined.clear()
            raise
        seconds = time.perf_counter() - start
        self.gain.note_pass(len(joined), seconds)
        for each in joined:
            each.elsewhere_s += 0.0 if each is runner else seconds

    def _drop_ended(self) -> None:
        for decoder in [each for each in self._joined if each not in self._writing]:
            self._remove(decoder)

    def _remove(self, decoder: "BatchedDecoder") -> None:
        """The last row takes the place of this one."""
        row, last = self._joined.index(decoder), self._joined.pop()
        decoder.slot.is_lent = False
        if last is not decoder:
            self._put(row, last, self._target.states[len(self._joined)].snapshot())
            self._joined[row] = last

    def _put(self, row: int, decoder: "BatchedDecoder", snapshot: Snapshot) -> None:
        state = self._target.states[row]
        state.set_sinks(decoder.slot.sinks)
        state.reset()
        state.restore(snapshot)


class BatchedDecoder:
    """One request's decoder: its own rounds, or rows of the batch, whichever is worth more."""

    def __init__(
        self,
        batch: Batch,
        slot: Slot,
        decoder: BatchableDecoder,
        request: Request,
        stream: TokenStream,
        turn: Turn,
    ) -> None:
        self.slot, self.stats = slot, decoder.stats
        self.ready: list[Emitted] = []  # written in the batch, and not said yet
        self.features: deque[np.ndarray] = deque(maxlen=batch.most_features)  # since it joined
        self.elsewhere_s = 0.0  # of passes in others' turns, since it was last asked
        self._batch, self._decoder, self._turn = batch, decoder, turn
        self._stop_ids, self._stream = request.stop_ids, stream
        self.has_yielded = False  # to those whose turn has to come before the next pass
        self._room = 0
        batch.begin(self)

    @property
    def anchor(self) -> int:
        return self._decoder.anchor

    @property
    def is_full(self) -> bool:
        """Whether nothing may be written before its next turn: what is ready, or its caller, ends
        the reply, or it is as much as a caller should have to catch up with.
        """
        if len(self.ready) >= min(self._room, _MOST_READY) or self._stream.is_cancelled:
            return True
        last = self.ready[-1] if self.ready else None
        return last is not None and (last.is_last or last.token in self._stop_ids)

    @property
    def do_others_wait(self) -> bool:
        """Whether they should have a turn, to say what was written in this one's."""
        batch = self._batch
        return not self.ready and batch.has_joined(self) and batch.do_others_wait(self)

    def start(self, anchor: int, written: Sequence[int] = ()) -> None:
        self._decoder.start(anchor, written)

    def step(self, max_tokens: int) -> list[Emitted]:
        self._room = max_tokens
        if not self.ready:
            self.take_place()
            if not self._batch.has_joined(self):
                self._batch.gain.begin(self)
                emitted = self._decoder.step(max_tokens)
                self._batch.gain.note_step(len(emitted))
                return emitted
        if not self.ready:  # nor was a round of its own under way
            if self._batch.is_blocked(self):
                self.has_yielded = True  # next time it goes on alone
                return []
            self.has_yielded = False
            self._batch.run(self)
        emitted, self.ready = self.ready, []
        self._room = max_tokens - len(emitted)
        return emitted

    def take_place(self) -> None:
        """In the batch, or in the device's sequence, as it is worth now."""
        if self.ready:
            return
        batch = self._batch
        is_joined, is_wanted = batch.has_joined(self), batch.is_wanted(self)
        if is_wanted and not is_joined:
            self.ready += self._decoder.settle()
            batch.join(self)
        elif is_joined and not is_wanted:
            batch.leave(self)
        elif not is_joined:
            batch.enter(self)

    def follow(self, logits: np.ndarray, position: int) -> None:
        self.ready.append(self._decoder.follow(logits, position))

    def take_elsewhere_s(self) -> float:
        taken, self.elsewhere_s = self.elsewhere_s, 0.0
        return taken

    def pause(self) -> None:
        if not self._batch.has_joined(self):
            self._batch.gain.forget()
        self._decoder.pause()

    def finish(self) -> None:
        """What was written is left in the device's sequence, if it may be used now."""
        if self._turn.is_held and self._batch.has_joined(self):
            self._batch.leave(self)
        self._batch.end(self)
        self._decoder.finish()
