"""One request on its way: the new part of its prompt in chunks, then rounds.

Between two of them it may pause, and another request use the device; it then goes on with the
same chunks and rounds as if it had not. In: what engines are made of. Out: TokenEvents.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from draftree.config import Plan
from draftree.core import FinishReason, Request, TokenEvent, TokenSource
from draftree.decode.beginning import find_beginning
from draftree.decode.decoder import BatchableDecoder, Decoder, Round
from draftree.engine.batch import Batch, BatchedDecoder
from draftree.engine.decoders import Decoders
from draftree.engine.lock import EngineLock, Turn
from draftree.engine.parts import EngineParts
from draftree.engine.prefix import PrefixCache
from draftree.engine.slot import Slot, Slots
from draftree.engine.stream import PAUSE, TokenStream
from draftree.prefill.chunked import prefill

_LEAST_SINKS = 4  # tokens at the beginning: without them, attention has nowhere to rest
_ROUND_ROWS = 64  # of one pass, up to which its bits are those of single rows on every device


@dataclass(frozen=True, slots=True)
class EngineUse:
    """What all requests of an engine share."""

    parts: EngineParts
    decoders: Decoders
    prefix: PrefixCache
    slots: Slots
    lock: EngineLock
    batch: Batch | None = None  # where requests may write side by side


def choose_rows(plan: Plan, left: int) -> int:
    """Of a pass, where so much of the prompt is left. Two passes of few rows take a GPU less time
    than a longer one, for which it expands all weights.
    """
    has_few = plan.gpu is not None and left <= 2 * _ROUND_ROWS
    return min(plan.chunk, _ROUND_ROWS) if has_few else plan.chunk


class LiveRequest:
    """find_watch: who wants to see the rounds, if the stream names nobody."""

    def __init__(
        self,
        use: EngineUse,
        request: Request,
        stream: TokenStream,
        find_watch: Callable[[], Callable[[Round], None] | None],
    ) -> None:
        self._use, self._request, self._stream = use, request, stream
        self._find_watch = find_watch
        self._turn = Turn(use.lock)
        self._paused_s = 0.0

    def run(self) -> Iterator[TokenEvent]:
        with self._turn:
            slots = self._use.slots
            usage, request = self._stream.usage, self._request
            usage.window = self._use.parts.plan.window
            usage.sinks = max(request.sink_len, _LEAST_SINKS) if usage.window else 0
            slot = slots.admit(request.prompt_ids[:-1], usage.sinks)
            try:
                yield from self._events(slot)
            except GeneratorExit:  # closed between two tokens: state and draft are in step
                raise
            except BaseException as error:  # inside a pass: nobody knows what the state holds
                if self._turn.is_held:
                    slots.break_off(slot)
                if isinstance(error, RuntimeError):
                    self._use.lock.check_open()
                raise
            finally:
                slots.leave(slot)

    def _events(self, slot: Slot) -> Iterator[TokenEvent]:
        stream, usage, request = self._stream, self._stream.usage, self._request
        start = self._now()
        begun, source = self._find_begun()
        yield from self._prefill(slot, begun)
        usage.prefill_ms = (self._now() - start) * 1000
        if stream.is_cancelled or request.max_tokens == 0:
            stream.finish_reason = FinishReason.CANCELLED
            return
        yield from self._say(begun, source)
        decoder = self._new_decoder(slot)
        usage.rounds = decoder.stats
        usage.rounds.num_rounds += _count_rounds(begun, source)
        decoder.start((*request.prompt_ids[-1:], *begun)[-1], begun)
        usage.prefill_ms = (self._now() - start) * 1000
        try:
            yield from self._decode(slot, decoder)
        finally:
            decoder.finish()

    def _new_decoder(self, slot: Slot) -> Decoder:
        use, stream = self._use, self._stream
        decoder = use.decoders.new(self._request, stream.watch or self._find_watch())
        if use.batch is None or stream.should_pause is None:  # it has the engine to itself
            return decoder
        if not isinstance(decoder, BatchableDecoder) or not decoder.can_follow:
            return decoder
        parts = use.batch, slot, decoder, self._request, stream, self._turn
        return BatchedDecoder(*parts, self._switching)

    def _find_begun(self) -> tuple[tuple[int, ...], TokenSource]:
        """What of the reply is known before the model is asked: from another engine, or by its
        grammar. Plain decoding asks the model for every token.
        """
        parts, request = self._use.parts, self._request
        if request.logprobs is None and self._stream.begun:
            return tuple(self._stream.begun), TokenSource.PLAIN
        known = find_beginning(request, parts.model_config.vocab_size)
        return known if parts.plan.max_nodes > 1 else (), TokenSource.GRAMMAR

    def _prefill(self, slot: Slot, begun: tuple[int, ...]) -> Iterator[TokenEvent]:
        """Run the prompt and what the reply begins with, all but the last token, the anchor. The
        reply is read in passes that give the same bits as rounds; the end of the prompt joins the
        first of them if there is room.
        """
        parts, stream, slots = self._use.parts, self._stream, self._use.slots
        usage, body, state, drafter = stream.usage, slot.prompt, parts.target.state, parts.drafter
        while stream.should_pause and not stream.is_cancelled and slots.is_read_elsewhere(slot):
            yield from self._pause()
        with self._switching():
            is_swapped = slots.swap_out()
        stops = slots.begin(slot, self._request.cache_points, is_swapped=is_swapped)
        usage.cached_tokens = usage.read_tokens = state.committed
        text, num_rows = (
            (*self._request.prompt_ids, *begun)[:-1],
            min(parts.plan.chunk, _ROUND_ROWS),
        )
        for stop in (*stops, len(body), len(text)):
            while not stream.is_cancelled and state.committed < stop:
                start = state.committed
                most = num_rows if stop > len(body) else choose_rows(parts.plan, stop - start)
                is_joined = stop == len(body) and len(text) - start <= num_rows
                end = len(text) if is_joined else min(start + most, stop)
                extend = drafter.extend_context if drafter is not None else None
                self._use.lock.num_uses += 1
                prefill(parts.target, text[start:end], end - start, extend)
                if drafter is not None:  # it reads the same rows together, with or without a pause
                    drafter.flush_context()
                if end in stops:
                    self._use.prefix.save_checkpoint()
                usage.read_tokens = slot.num_read = min(end, len(body))
                slot.is_reading = end < len(body)
                if start < len(body):
                    stream.on_chunk()
                if end < len(text):  # else the first token is near
                    yield from self._pause_if_asked(slot)

    def _say(self, begun: tuple[int, ...], source: TokenSource) -> Iterator[TokenEvent]:
        """The tokens that a reply begins with."""
        stream, position = self._stream, len(self._request.prompt_ids)
        for index, token in enumerate(begun):
            stream.usage.completion_tokens += 1
            self._note_first()
            stream.tokens.append(token)
            yield TokenEvent(token, position + index, source, _count_rounds(begun, source))
        if begun:
            stream.on_round()

    def _note_first(self) -> None:
        usage = self._stream.usage
        if usage.first_token_ms == 0.0:
            usage.first_token_ms = usage.prefill_ms + usage.decode_ms
            if usage.compression is not None:
                usage.first_token_ms += usage.compression.score_ms

    def _decode(self, slot: Slot, decoder: Decoder) -> Iterator[TokenEvent]:
        request, stream, usage = self._request, self._stream, self._stream.usage
        start, position = self._now(), len(request.prompt_ids)
        end = min(position + request.max_tokens, self._use.parts.plan.max_ctx)
        position += usage.completion_tokens
        while position < end and not stream.is_cancelled:
            self._use.lock.enter()
            step = decoder.step(end - position)
            if isinstance(decoder, BatchedDecoder):
                self._paused_s -= decoder.take_elsewhere_s()
            else:
                self._use.lock.num_uses += 1
            for emitted in step:
                usage.decode_ms = (self._now() - start) * 1000
                self._note_first()
                usage.completion_tokens += 1
                if emitted.token in request.stop_ids:
                    stream.finish_reason = FinishReason.STOP
                    return
                rounds = decoder.stats.num_rounds
                if request.logprobs is None:
                    stream.tokens.append(emitted.token)
                yield TokenEvent(emitted.token, position, emitted.source, rounds, emitted.scores)
                if emitted.is_last:
                    stream.finish_reason = FinishReason.STOP
                    return
                position += 1
            stream.on_round()
            if position < end:
                yield from self._pause_if_asked(slot, decoder)
        is_cancelled = stream.is_cancelled
        stream.finish_reason = FinishReason.CANCELLED if is_cancelled else FinishReason.LENGTH

    def _pause_if_asked(self, slot: Slot, decoder: Decoder | None = None) -> Iterator[TokenEvent]:
        should_pause = self._stream.should_pause
        batched = decoder if isinstance(decoder, BatchedDecoder) else None
        is_asked = batched is not None and batched.do_others_wait
        if not is_asked and (should_pause is None or not should_pause()):
            return
        if decoder is not None:
            decoder.pause()
        yield from self._pause()
        if not self._stream.is_cancelled:
            if batched is not None:
                batched.take_place()
            else:
                with self._switching():
                    self._use.slots.enter(slot)

    @contextmanager
    def _switching(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        switch_s = time.perf_counter() - start
        self._paused_s += switch_s
        self._stream.usage.switch_ms += switch_s * 1000

    def _pause(self) -> Iterator[TokenEvent]:
        start = time.perf_counter()
        self._turn.end()
        yield PAUSE
        self._turn.begin()
        self._paused_s += time.perf_counter() - start

    def _now(self) -> float:
        """Seconds, on a clock that stands still while the request pauses."""
        return time.perf_counter() - self._paused_s


def _count_rounds(begun: tuple[int, ...], source: TokenSource) -> int:
    """Reading what a grammar gives counts as one, as if it had been proposed."""
    return int(bool(begun) and source is TokenSource.GRAMMAR)
