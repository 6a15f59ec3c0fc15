"""Token ids in, TokenEvents out: one model, one sequence at a time, on one device.

Opens a checkpoint and its draft as the plan says, prefills what is new of a prompt, and decodes.
Knows no text.
"""

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from draftree.config import EngineConfig, Plan, resolve
from draftree.core import FinishReason, ModelFacts, Request, TokenEvent, Usage
from draftree.decode.budget import Calibration, CostModel
from draftree.decode.decoder import Decoder
from draftree.decode.draft import BlockDrafter
from draftree.decode.graph import DeviceRounds, GraphDecoder, Pace
from draftree.decode.plain import PlainDecoder
from draftree.decode.sampler import Sampler
from draftree.decode.speculative import Round, SpeculationOptions, SpeculativeDecoder
from draftree.decode.turns import PRIOR_SAMPLED_GAIN, Turns
from draftree.engine.device import Device, open_device
from draftree.engine.gpu import find_card
from draftree.engine.prefix import PrefixCache
from draftree.errors import CapacityError
from draftree.models.dflash import check_fit, load_draft, read_draft_facts, read_draft_size
from draftree.models.facts import read_facts
from draftree.models.load import load_model
from draftree.models.target import Target
from draftree.prefill.chunked import prefill
from draftree.weights.checkpoint import Checkpoint
from draftree.weights.file import open_checkpoint

_log = logging.getLogger("draftree")


class TokenStream:
    """The events of one request. Closing it (or leaving the loop) cancels; then usage and
    finish_reason are set. Only `cancel` may be called from another thread.
    """

    def __init__(self, events: Iterator[TokenEvent], usage: Usage) -> None:
        self._events = events
        self.usage = usage
        self.finish_reason: FinishReason | None = None
        self.is_cancelled = False
        self.on_round: Callable[[], None] = lambda: None  # called when a round's events are read
        self.watch: Callable[[Round], None] | None = None  # instead of the engine's, if set in time

    def __iter__(self) -> "TokenStream":
        return self

    def __next__(self) -> TokenEvent:
        return next(self._events)

    def cancel(self) -> None:
        """End after the round, or the chunk of the prompt, that is being computed."""
        self.is_cancelled = True

    def close(self) -> None:
        self._events.close()  # type: ignore[attr-defined]
        if self.finish_reason is None:
            self.finish_reason = FinishReason.CANCELLED


class TokenEngine:
    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        draft_checkpoint: Checkpoint | None = None,
    ) -> None:
        self.facts: ModelFacts = read_facts(checkpoint)
        self.config = config
        if config.budget == 0:
            draft_checkpoint = None  # nobody would ask it
        draft_size = read_draft_size(draft_checkpoint) if draft_checkpoint else None
        self.plan: Plan = resolve(
            config, self.facts, card=find_card(config.device), draft=draft_size
        )
        self.watch: Callable[[Round], None] | None = None
        self._lock = threading.Lock()
        self._device: Device = open_device(self.plan)
        ops = self._device.new_ops()
        model = load_model(checkpoint, ops)
        feature_layers: tuple[int, ...] = ()
        if draft_checkpoint is not None:
            draft_facts = read_draft_facts(draft_checkpoint)
            check_fit(draft_facts, str(draft_checkpoint.path), model, self.facts.name)
            if config.block == 1 or config.block > draft_facts.block_size:
                raise ValueError(
                    f"block must be between 2 and the {draft_facts.block_size} trained"
                )
            feature_layers = draft_facts.feature_layers
        self.target = Target(model, ops, self.plan.max_ctx, feature_layers)
        self.drafter: BlockDrafter | None = None
        draft_ops = None
        if draft_checkpoint is not None:
            draft_ops = self._device.new_draft_ops(config.block or draft_facts.block_size)
            self.drafter = BlockDrafter(
                load_draft(draft_checkpoint, draft_ops),
                model,
                draft_ops,
                block_len=config.block,
                use_head_tokens=self.plan.card is None,
            )
        self._ops, self._draft_ops = ops, draft_ops
        self._rounds = self.rounds_of(self.plan.max_nodes - 1)
        self._prefix = PrefixCache(self.target.state, self.drafter, self.plan.prefix_bytes)
        self._cost = CostModel()
        # Greedy and sampled requests are judged apart.
        self._calibrations = Calibration(), Calibration()
        self._turns = Turns(), Turns(PRIOR_SAMPLED_GAIN)
        self._pace = Pace()
        self.target.state.commit_program()
        checkpoint.release()
        self._device.finish_loading()

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
        drafter = self.drafter if budget else None
        parts = self.target, self._ops, drafter, self._draft_ops
        return self._device.new_rounds(*parts, budget)

    def close(self) -> None:
        self._device.close()

    def generate(self, request: Request) -> TokenStream:
        """Continue the prompt. One request at a time: another one waits."""
        self._check(request)
        stream = TokenStream(iter(()), Usage(prompt_tokens=len(request.prompt_ids)))
        stream._events = self._run(request, stream)
        return stream

    def keep(self) -> None:
        """Copy what the last request left behind now, if nothing else is to be done: later ones
        that begin like it need not wait for it to be saved, or read it again.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._prefix.save()
            except BaseException:
                self._prefix.forget()
                raise
            finally:
                self._lock.release()

    @property
    def kept_bytes(self) -> int:
        """Main memory that earlier conversations take."""
        return self._prefix.store.num_bytes + self._prefix.store.reserved_bytes

    def forget(self) -> None:
        """Begin the next request with nothing, as a new engine would."""
        with self._lock:
            self._prefix.forget()
            self._prefix.store.clear()

    def _check(self, request: Request) -> None:
        length, max_ctx = len(request.prompt_ids), self.plan.max_ctx
        if length == 0:
            raise ValueError("the prompt is empty")
        if request.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        if length >= max_ctx:
            raise CapacityError(
                f"The prompt has {length} tokens, but the context was planned for {max_ctx}; "
                "start with a larger --max-ctx or shorten the prompt."
            )
        biased = (token for token, _ in request.logit_bias)
        tokens = (*request.prompt_ids, *biased)
        bad = next((t for t in tokens if not 0 <= t < self.facts.vocab_size), None)
        if bad is not None:
            raise ValueError(f"token {bad} is not in the vocabulary of {self.facts.vocab_size}")

    def _run(self, request: Request, stream: TokenStream) -> Iterator[TokenEvent]:
        if not self._lock.acquire(blocking=False):
            gc.collect()  # a stream that was dropped half way holds the lock until it is collected
            self._lock.acquire()
        try:
            yield from self._events(request, stream)
        except GeneratorExit:  # closed between two tokens: state and draft are in step
            raise
        except BaseException:  # broken off inside a pass: nobody knows what the state holds
            self._prefix.forget()
            raise
        finally:
            self._lock.release()

    def _events(self, request: Request, stream: TokenStream) -> Iterator[TokenEvent]:
        usage = stream.usage
        start = time.perf_counter()
        usage.cached_tokens = self._prefill(request, stream)
        decoder = self._decoder(request, stream.watch or self.watch)
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
        observe = self.drafter.observe if self.drafter else None
        for stop in (*stops, len(body)):
            rest = body[state.committed : stop]
            prefill(self.target, rest, self.plan.chunk, observe, lambda: stream.is_cancelled)
            if state.committed in stops:
                self._prefix.mark()
        return cached

    def _decoder(self, request: Request, watch: Callable[[Round], None] | None) -> Decoder:
        budget = self.plan.max_nodes - 1
        is_auto = self.config.budget == "auto"
        rounds = self._rounds
        if rounds is not None and rounds.can_serve(request) and self.config.ngram != "on":
            use_draft = self.drafter is not None and budget > 0
            reason = "the budget is 0" if budget == 0 else "there is no draft for this model"
            return GraphDecoder(
                *(self.target, self.drafter, rounds, request),
                use_draft=use_draft,
                is_auto=is_auto,
                pace=self._pace,
                off_reason=None if use_draft else reason,
                watch=watch,
            )
        sampler = Sampler.for_request(request, self.facts.vocab_size)
        use_ngram = self.config.ngram == "on" or (self.config.ngram == "auto" and is_auto)
        if budget == 0:
            return PlainDecoder(self.target, sampler, "the budget is 0")
        if self.drafter is None and not use_ngram and request.grammar is None:
            return PlainDecoder(self.target, sampler, "there is no draft for this model")
        options = SpeculationOptions(budget, is_auto, use_ngram, request.stop_ids)
        is_sampled = request.sampling.temperature > 0.0
        return SpeculativeDecoder(
            self.target,
            sampler,
            self.drafter,
            options,
            cost=self._cost,
            calibration=self._calibrations[is_sampled],
            turns=self._turns[is_sampled],
            watch=watch,
        )
