"""Requests that write side by side: where it pays, a plain step is a row of a pass that others
share, and no request has the device to itself.

Each sequence in the batch has keys, values and recurrent state of its own. Whoever has the turn
runs passes for all; the others find their tokens when their turn comes. Texts are those of requests
alone, since passes are batch-invariant. A draft reads what was written meanwhile when its request
leaves the batch.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np

from draftree.core import Request
from draftree.decode.decoder import BatchableDecoder, Emitted
from draftree.engine.batch_gain import BatchGain
from draftree.engine.lock import EngineLock, Turn
from draftree.engine.parts import EngineParts
from draftree.engine.slot import Slot, Slots
from draftree.engine.stream import TokenStream
from draftree.memory import count_features
from draftree.models.batch import BatchTarget
from draftree.state.sequence import Snapshot
from draftree.state.span import Span

_FRAME_S = 0.03  # of passes, before others say what they wrote in them
_SLICE_S = 0.25  # the same, at most, where others than those in the batch have turns as long
_MOST_READY = 128  # tokens that a request may be behind
_JOIN_GAIN, _STAY_GAIN = 1.1, 1.0  # over rounds of each by itself


class Batch:
    """mode: "always", or "auto": where it is worth it."""

    def __init__(self, parts: EngineParts, slots: Slots, lock: EngineLock, mode: str) -> None:
        device, self._lock, self._num_uses = parts.device, lock, 0
        members = [device.new_member_ops() for _ in range(parts.plan.batch)]
        self._target = BatchTarget(parts.target, members, device.new_batch_ops)
        self._slots, self._is_forced, self._size = slots, mode == "always", len(members)
        self._num_kv_layers = len(parts.target.kv)
        self.most_features = count_features(self._target.feature_bytes)
        self.gain = BatchGain()
        self._writing: set[BatchedDecoder] = set()  # those that could join
        self._joined: list[BatchedDecoder] = []  # row by row

    def begin(self, decoder: "BatchedDecoder") -> None:
        self._writing.add(decoder)

    def end(self, decoder: "BatchedDecoder") -> None:
        """No row of it is wanted any more. Other threads may call, while somebody runs passes."""
        self._writing.discard(decoder)
        self.gain.forget()

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
        others = [each for each in tuple(self._writing) if each is not decoder]
        return any(
            each.ready or each.is_full if self.has_joined(each) else self.is_wanted(each)
            for each in others
        )

    def is_at_hand(self, decoder: "BatchedDecoder") -> bool:
        """Whether the device's own sequence is the request's."""
        return self._slots.is_at_hand(decoder.slot)

    def enter(self, decoder: "BatchedDecoder") -> None:
        """Give the device's own sequence to the request."""
        self._slots.enter(decoder.slot)

    def join(self, decoder: "BatchedDecoder") -> None:
        """Take over from the device's sequence, or from the copy of one that had to leave it."""
        slot, row, num_layers = decoder.slot, len(self._joined), self._num_kv_layers
        self._target.prepare(row + 1)
        copy = self._slots.lend(slot)
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
        self._slots.take_back(slot, written, features, end - start)

    def run(self, runner: "BatchedDecoder") -> None:
        """Passes for all, until others should have a turn, or one has ended. Where only those in
        the batch have turns, they say what they wrote; else the runner's turn lasts as any other.
        """
        start, are_others = time.perf_counter(), self._lock.num_uses != self._num_uses
        self._num_uses = self._lock.num_uses
        if are_others:
            self.gain.forget()
        self.gain.begin(tuple(self._joined))
        is_over = False
        while not is_over:
            self._step(runner)
            seconds = time.perf_counter() - start
            is_over = seconds >= (_SLICE_S if are_others else _FRAME_S)
            is_over |= any(each.is_full for each in self._joined)
            is_over |= are_others and runner.should_pause

    def step_alone(
        self, decoder: "BatchedDecoder", own: BatchableDecoder, max_tokens: int
    ) -> list[Emitted]:
        """A step of the request by itself."""
        self._lock.num_uses += 1
        self.gain.begin(decoder)
        emitted = own.step(max_tokens)
        self.gain.note_step(len(emitted))
        return emitted

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
            self._lose_all()
            raise
        seconds = time.perf_counter() - start
        self.gain.note_pass(len(joined), seconds)
        for each in joined:
            each.stats.verify_ms += seconds * 1000
            each.elsewhere_s += 0.0 if each is runner else seconds

    def _drop_ended(self) -> None:
        for decoder in [each for each in self._joined if each not in self._writing]:
            self._remove(decoder)

    def _remove(self, decoder: "BatchedDecoder") -> None:
        """The last row takes the place of this one."""
        row, last = self._joined.index(decoder), self._joined[-1]
        if last is not decoder:
            try:
                self._put(row, last, self._target.states[len(self._joined) - 1].snapshot())
            except BaseException:
                self._lose_all()
                raise
            self._joined[row] = last
        self._joined.pop()
        decoder.slot.is_lent = False
        decoder.features.clear()

    def _lose_all(self) -> None:
        """Nobody knows what their states hold."""
        for each in self._joined:
            each.slot.is_lost, each.slot.is_lent = True, False
        self._joined.clear()

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
        switching: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """switching: around what moves sequences."""
        self.slot, self.stats = slot, decoder.stats
        self.ready: list[Emitted] = []  # written in the batch, and not said yet
        self.features: deque[np.ndarray] = deque(maxlen=batch.most_features)  # since it joined
        self.elsewhere_s = 0.0  # of passes in others' turns, since it was last asked
        self._batch, self._decoder, self._turn = batch, decoder, turn
        self._switching = switching
        self._num_new = 0  # of what is ready, from passes of the batch: its last ones
        self._told = (0, 0, 0)  # by the last step: tokens, those of the batch, and tokens before
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
    def should_pause(self) -> bool:
        """Whether its turn is over."""
        return self._stream.should_pause is not None and self._stream.should_pause()

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
            self._told = (0, 0, 0)
            if not self._batch.has_joined(self):
                return self._batch.step_alone(self, self._decoder, max_tokens)
        if not self.ready:  # nor was a round of its own under way
            if self._batch.is_blocked(self):
                self.has_yielded = True  # next time it goes on alone
                return []
            self.has_yielded = False
            self._batch.run(self)
        emitted, self.ready = self.ready, []
        self._told = (len(emitted), self._num_new, self._stream.usage.completion_tokens)
        self._num_new = 0
        self._room = max_tokens - len(emitted)
        return emitted

    def take_place(self) -> None:
        """In the batch, or in the device's sequence, as it is worth now."""
        if self.ready:
            return
        batch = self._batch
        is_joined, is_wanted = batch.has_joined(self), batch.is_wanted(self)
        if is_joined == is_wanted and (is_joined or batch.is_at_hand(self)):
            return
        with self._switching():
            if is_joined:
                batch.leave(self)
            elif is_wanted:
                self.ready += self._decoder.settle()
                batch.join(self)
            else:
                batch.enter(self)

    def follow(self, logits: np.ndarray, position: int) -> None:
        self.ready.append(self._decoder.follow(logits, position))
        self._num_new += 1

    def take_elsewhere_s(self) -> float:
        taken, self.elsewhere_s = self.elsewhere_s, 0.0
        return taken

    def pause(self) -> None:
        if not self._batch.has_joined(self):
            self._batch.gain.forget()
        self._decoder.pause()

    def finish(self) -> None:
        """What was written is left in the device's sequence, if it may be used now. Rounds are
        those of tokens that were said.
        """
        count, num_batched, before = self._told
        num_said = self._stream.usage.completion_tokens - before
        num_unsaid = self._num_new + min(num_batched, max(count - num_said, 0))
        self.stats.num_rounds -= num_unsaid
        self.stats.num_batched -= num_unsaid
        try:
            if self._turn.is_held and self._batch.has_joined(self):
                self._batch.leave(self)
        finally:
            self._batch.end(self)
            self._decoder.finish()
