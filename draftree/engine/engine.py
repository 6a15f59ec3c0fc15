"""Token ids in, TokenEvents out: one model, one sequence at a time, on one device.

Opens and closes, checks requests, and says what is kept of those that have ended. Knows no text,
nor how models are read.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from draftree.config import EngineConfig
from draftree.core import Request, Usage
from draftree.decode.decoder import Round
from draftree.engine.batch import Batch
from draftree.engine.centre import centre_keys
from draftree.engine.decoders import Decoders
from draftree.engine.embedding import MAX_LEN, Embedder
from draftree.engine.identity import open_folder
from draftree.engine.live import EngineUse, LiveRequest
from draftree.engine.lock import EngineLock
from draftree.engine.parts import open_parts
from draftree.engine.prefix import PrefixCache
from draftree.engine.scoring import OwnedScorer, open_scorer, score_with_own
from draftree.engine.slot import Slots
from draftree.engine.stream import TokenStream
from draftree.engine.warm import Report, warm_up
from draftree.errors import CapacityError
from draftree.weights.checkpoint import Checkpoint
from draftree.weights.file import open_checkpoint

if TYPE_CHECKING:
    from draftree.decode.device_round import GpuRounds

_WORTH_READING = 4  # tokens; fewer are read with those that follow


class TokenEngine:
    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        draft_checkpoint: Checkpoint | None = None,
        report: Report = lambda number, total: None,
    ) -> None:
        """Ready when it returns. report: kernels compiled, and of how many."""
        self.config = config
        self._parts = open_parts(checkpoint, config, draft_checkpoint)
        self.model_config, self.plan = self._parts.model_config, self._parts.plan
        self.target, self.drafter = self._parts.target, self._parts.drafter
        self.watch: Callable[[Round], None] | None = None
        self._scorers: list[OwnedScorer] = []
        self._embedder: Embedder | None = None  # made when it is first asked for
        self._lock = EngineLock()
        folder = open_folder(config, self.plan, checkpoint, draft_checkpoint)
        prefix_bytes = self.plan.prefix_bytes
        self._prefix = PrefixCache(self.target.state, self.drafter, prefix_bytes, folder)
        self._slots = Slots(self._prefix, self.target.state, self.plan.parallel)
        decoders = Decoders(self._parts, config)
        shared = self._parts, decoders, self._prefix, self._slots, self._lock
        batch = None
        if self.plan.batch:
            batch = Batch(self._parts, self._slots, self._lock, config.batching)
        self._use = EngineUse(*shared, batch)
        self.target.state.commit_program()
        checkpoint.release()
        self._parts.device.finish_loading()
        if config.warm_up:
            warm_up(self._use, self.generate, report)
        centre_keys(self.target, self.plan.chunk, self.plan.max_ctx)

    @classmethod
    def open(
        cls, path: Path, config: EngineConfig | None = None, draft: Path | None = None
    ) -> "TokenEngine":
        """draft is a path that the caller has resolved; config says how to use it."""
        checkpoint = open_checkpoint(path)
        draft_checkpoint = open_checkpoint(draft) if draft is not None else None
        return cls(checkpoint, config or EngineConfig(), draft_checkpoint)

    def rounds_of(self, budget: int) -> "GpuRounds | None":
        """Rounds of at most so many nodes besides the root, where the device runs them itself;
        0: without the draft.
        """
        return self._parts.new_rounds(budget)

    def new_scorer(self, checkpoint: Checkpoint | None) -> OwnedScorer:
        """Of long texts: by another model, or by this one. It is closed with the engine."""
        parts, hold = self._parts, self._lock.hold
        with hold():
            parts.device.release_copies()
        if checkpoint is None:
            with hold():
                scorer = score_with_own(parts, hold)
        else:
            scorer = open_scorer(checkpoint, parts)
        self._scorers.append(scorer)
        return scorer

    def embed(self, ids: Sequence[int]) -> np.ndarray:
        """A text as a vector of length one, see Embedder; no conversation is disturbed."""
        self.check_embedding(ids)
        with self._lock.hold():
            if self._embedder is None:
                self._embedder = Embedder(self._parts)
            return self._embedder.embed(ids)

    @property
    def max_embedding_len(self) -> int:
        return min(MAX_LEN, self.plan.max_ctx)

    def check_embedding(self, ids: Sequence[int]) -> None:
        limit, size = self.max_embedding_len, self.model_config.vocab_size
        if not ids:
            raise ValueError("the text is empty")
        if len(ids) > limit:
            raise CapacityError(f"The text has {len(ids)} tokens, of at most {limit}; shorten it.")
        if not all(0 <= token < size for token in ids):
            raise ValueError(f"a token is not in the vocabulary of {size}")

    def close(self) -> None:
        """Ends after the pass that is being computed; an unfinished reply raises when read on."""
        if not self._lock.is_closed:
            if self.config.prefix_dir:
                with suppress(Exception):  # what cannot be kept is read again
                    self.offload()
            self._lock.is_closed = True
            for scorer in self._scorers:
                scorer.close()
            self._parts.device.close()

    def generate(self, request: Request) -> TokenStream:
        """Continue the prompt. One request at a time: those of other threads wait until it ends, or
        pauses, if its `should_pause` says so.
        """
        self._lock.check_open()
        self._check(request)
        stream = TokenStream(iter(()), Usage(prompt_tokens=len(request.prompt_ids)))
        stream._events = LiveRequest(self._use, request, stream, lambda: self.watch).run()
        return stream

    def offload(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Copy what the last request left behind now, if nothing else is to be done: later ones
        that begin like it need not wait for it to be saved, or read it again. Where there is a
        folder for copies, write them until should_stop says that something is to be done.
        """
        with self._lock.try_hold() as is_free:
            if is_free:
                try:
                    self._parts.device.make_room()
                    self._prefix.offload(should_stop)
                except BaseException:
                    self._slots.reset()
                    raise

    def read_ahead(
        self, tokens: Sequence[int], should_stop: Callable[[], bool] = lambda: False
    ) -> int:
        """Read what a later prompt is likely to begin with, if nothing else is to be done, until
        should_stop says that something is; how many tokens were read. What is known already, and
        what could not be kept beside the last conversation, is left.
        """
        ids, max_ctx = tuple(tokens), self.plan.max_ctx
        with self._lock.try_hold() as is_free:
            num_new = len(ids) - self._prefix.count_known(ids) if is_free else 0
        if num_new < _WORTH_READING or len(ids) >= max_ctx or self.plan.prefix_bytes == 0:
            return 0
        stream = TokenStream(iter(()), Usage(prompt_tokens=len(ids)))
        request = Request((*ids, ids[-1]), max_tokens=0)  # the last one is not read
        stream._events = LiveRequest(self._use, request, stream, lambda: None).run()
        stream.on_chunk = lambda: stream.cancel() if should_stop() else None
        stream.is_cancelled = should_stop()
        for _ in stream:
            raise AssertionError("nothing was asked for")
        return stream.usage.read_tokens - stream.usage.cached_tokens

    @property
    def kept_bytes(self) -> int:
        """Main memory that earlier conversations take."""
        return self._prefix.store.num_bytes + self._prefix.store.reserved_bytes

    @property
    def swapped_bytes(self) -> int:
        """Main memory that the unfinished requests take, which take turns."""
        return self._slots.num_bytes

    def reset(self) -> None:
        """Begin the next request with nothing, as a new engine would."""
        with self._lock.hold():
            self._slots.vacate()
            self._prefix.store.clear()

    def _check(self, request: Request) -> None:
        length, max_ctx = len(request.prompt_ids), self.plan.max_ctx
        if length == 0:
            raise ValueError("the prompt is empty")
        if request.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        if not 0 <= request.sink_len <= length:
            raise ValueError("sink_len must be a length of the prompt's beginning")
        if not all(isfinite(value) for _, value in request.logit_bias):
            raise ValueError("logit_bias must be finite numbers")
        if length >= max_ctx:
            raise CapacityError(
                f"The prompt has {length} tokens, but the context was planned for {max_ctx}; "
                "start with a larger --max-ctx or shorten the prompt.",
                length,
            )
        biased = (token for token, _ in request.logit_bias)
        tokens = (*request.prompt_ids, *biased)
        bad = next((t for t in tokens if not 0 <= t < self.model_config.vocab_size), None)
        if bad is not None:
            raise ValueError(
                f"token {bad} is not in the vocabulary of {self.model_config.vocab_size}"
            )
