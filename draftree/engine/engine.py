"""Token ids in, TokenEvents out: one model, one sequence at a time, on one device.

Prefills what is new of a prompt, and decodes. Knows no text, nor how models are read.
"""

import time
from collections.abc import Callable, Iterator
from math import isfinite
from pathlib import Path

from draftree.config import EngineConfig
from draftree.core import FinishReason, Request, TokenEvent, Usage
from draftree.decode.decoder import Decoder, Round
from draftree.decode.device_decoder import DeviceRounds
from draftree.engine.decoders import Decoders
from draftree.engine.parts import open_parts
from draftree.engine.prefix import PrefixCache
from draftree.engine.stream import TokenStream
from draftree.engine.turnstile import Turnstile
from draftree.errors import CapacityError
from draftree.prefill.chunked import prefill
from draftree.weights.checkpoint import Checkpoint
from draftree.weights.file import open_checkpoint


class TokenEngine:
    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        draft_checkpoint: Checkpoint | None = None,
    ) -> None:
        self.config = config
        self._parts = open_parts(checkpoint, config, draft_checkpoint)
        self.model_config, self.plan = self._parts.model_config, self._parts.plan
        self.target, self.drafter = self._parts.target, self._parts.drafter
        self.watch: Callable[[Round], None] | None = None
        self._turnstile = Turnstile()
        self._prefix = PrefixCache(self.target.state, self.drafter, self.plan.prefix_bytes)
        self._decoders = Decoders(self._parts, config)
        self.target.state.commit_program()
        checkpoint.release()
        self._parts.device.finish_loading()

    @classmethod
    def open(
        cls, path: Path, config: EngineConfig | None = None, draft: Path | None = None
    ) -> "TokenEngine":
        """draft is a path that the caller has resolved; config says how to use it."""
        checkpoint = open_checkpoint(path)
        draft_checkpoint = open_checkpoint(draft) if draft is not None else None
        return cls(checkpoint, config or EngineConfig(), draft_checkpoint)

    def rounds_of(self, budget: int) -> DeviceRounds | None:
        """Rounds of at most so many nodes besides the root, where the device runs them itself;
        0: without the draft.
        """
        return self._parts.new_rounds(budget)

    def close(self) -> None:
        """Ends after the pass that is being computed; an unfinished reply raises when read on."""
        if not self._turnstile.is_closed:
            self._turnstile.is_closed = True
            self._parts.device.close()

    def generate(self, request: Request) -> TokenStream:
        """Continue the prompt. One request at a time: those of other threads wait."""
        self._turnstile.check_open()
        self._check(request)
        stream = TokenStream(iter(()), Usage(prompt_tokens=len(request.prompt_ids)))
        stream._events = self._run(request, stream)
        return stream

    def offload(self) -> None:
        """Copy what the last request left behind now, if nothing else is to be done: later ones
        that begin like it need not wait for it to be saved, or read it again.
        """
        with self._turnstile.try_hold() as is_free:
            if is_free:
                try:
                    self._prefix.save()
                except BaseException:
                    self._prefix.reset()
                    raise

    @property
    def kept_bytes(self) -> int:
        """Main memory that earlier conversations take."""
        return self._prefix.store.num_bytes + self._prefix.store.reserved_bytes

    def reset(self) -> None:
        """Begin the next request with nothing, as a new engine would."""
        with self._turnstile.hold():
            self._prefix.reset()
            self._prefix.store.clear()

    def _check(self, request: Request) -> None:
        length, max_ctx = len(request.prompt_ids), self.plan.max_ctx
        if length == 0:
            raise ValueError("the prompt is empty")
        if request.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        if not all(isfinite(value) for _, value in request.logit_bias):
            raise ValueError("logit_bias must be finite numbers")
        if length >= max_ctx:
            raise CapacityError(
                f"The prompt has {length} tokens, but the context was planned for {max_ctx}; "
                "start with a larger --max-ctx or shorten the prompt."
            )
        biased = (token for token, _ in request.logit_bias)
        tokens = (*request.prompt_ids, *biased)
        bad = next((t for t in tokens if not 0 <= t < self.model_config.vocab_size), None)
        if bad is not None:
            raise ValueError(
                f"token {bad} is not in the vocabulary of {self.model_config.vocab_size}"
            )

    def _run(self, request: Request, stream: TokenStream) -> Iterator[TokenEvent]:
        with self._turnstile.hold():
            try:
                yield from self._events(request, stream)
            except GeneratorExit:  # closed between two tokens: state and draft are in step
                raise
            except BaseException as error:  # inside a pass: nobody knows what the state holds
                self._prefix.reset()
                if isinstance(error, RuntimeError):
                    self._turnstile.check_open()
                raise

    def _events(self, request: Request, stream: TokenStream) -> Iterator[TokenEvent]:
        usage = stream.usage
        start = time.perf_counter()
        usage.cached_tokens = self._prefill(request, stream)
        decoder = self._decoders.new(request, stream.watch or self.watch)
        usage.rounds = decoder.stats
        decoder.start(request.prompt_ids[-1])
        usage.prefill_ms = (time.perf_counter() - start) * 1000
        try:
            yield from self._decode(request, stream, decoder)
        finally:
            decoder.finish()

    def _decode(
        self, request: Request, stream: TokenStream, decoder: Decoder
    ) -> Iterator[TokenEvent]:
        usage, decode_start = stream.usage, time.perf_counter()
        position = len(request.prompt_ids)
        end = min(position + request.max_tokens, self.plan.max_ctx)
        while position < end and not stream.is_cancelled:
            self._turnstile.enter()
            for emitted in decoder.step(end - position):
                usage.decode_ms = (time.perf_counter() - decode_start) * 1000
                if usage.completion_tokens == 0:
                    usage.first_token_ms = usage.prefill_ms + usage.decode_ms
                usage.completion_tokens += 1
                if emitted.token in request.stop_ids:
                    stream.finish_reason = FinishReason.STOP
                    return
                rounds = decoder.stats.num_rounds
                yield TokenEvent(emitted.token, position, emitted.source, rounds, emitted.scores)
                if emitted.is_last:
                    stream.finish_reason = FinishReason.STOP
                    return
                position += 1
            stream.on_round()
        is_cancelled = stream.is_cancelled
        stream.finish_reason = FinishReason.CANCELLED if is_cancelled else FinishReason.LENGTH

    def _prefill(self, request: Request, stream: TokenStream) -> int:
        """Run all but the last token, which is the anchor; return how many were there already."""
        state, body = self.target.state, request.prompt_ids[:-1]
        stops = self._prefix.resume(body, request.cache_points)
        cached = state.committed
        extend = self.drafter.extend_context if self.drafter else None
        for stop in (*stops, len(body)):
            rest = body[state.committed : stop]
            prefill(self.target, rest, self.plan.chunk, extend, lambda: stream.is_cancelled)
            if state.committed in stops:
                self._prefix.save_checkpoint()
        return cached
