"""An engine without a model: replies are given in advance, requests are written down."""

import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from draftree.core import FinishReason, TokenSource, Usage
from draftree.errors import CapacityError, TokenizerError
from draftree.text.reply import DeltaKind


@dataclass(frozen=True)
class Call:
    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Score:
    token_id: int
    text: bytes
    logprob: float
    top: tuple = ()


@dataclass(frozen=True)
class Delta:
    text: str = ""
    kind: DeltaKind = DeltaKind.TEXT
    tool_call: Call | None = None
    logprobs: tuple = ()
    source: TokenSource = TokenSource.PLAIN
    round_index: int = 0


class Broken(Exception):
    """What a broken engine raises."""


class Generation:
    """Yields the pieces: words, Deltas, exceptions to raise, or functions to call on the way."""

    def __init__(self, engine, prompt, pieces, round_s):
        self.prompt = prompt
        self._engine = engine
        self._pieces = list(pieces)
        self._round_s = round_s
        self._is_cancelled = threading.Event()
        self._on_round = lambda: None
        self._should_pause = lambda: False
        self.usage = Usage(prompt_tokens=3, prefill_ms=5.0)
        self.finish_reason = None

    def __iter__(self):
        self._engine.started.append(self)
        for piece in self._pieces:
            time.sleep(self._round_s)
            if self._is_cancelled.is_set():
                self.finish_reason = FinishReason.CANCELLED
                return
            if isinstance(piece, Exception):
                raise piece
            if callable(piece):
                piece()
                continue
            self.usage.completion_tokens += 1
            self.usage.decode_ms += 10.0
            self.usage.rounds.num_rounds += 1
            yield piece if isinstance(piece, Delta) else Delta(piece)
            self._on_round()
            if self._should_pause():
                yield Delta(kind=DeltaKind.PAUSE)
        self.finish_reason = self._engine.finish_reason

    def watch_rounds(self, on_round):
        self._on_round = on_round

    stream = SimpleNamespace(tokens=())

    def watch_prompt(self, on_chunk):
        pass

    def pause_when(self, should_pause):
        self._should_pause = should_pause

    def cancel(self):
        self._is_cancelled.set()

    def close(self):
        self.finish_reason = self.finish_reason or FinishReason.CANCELLED
        self._engine.ended.append(self)


@dataclass(eq=False)
class Engine:
    """Every reply is `pieces`; `calls` holds what was asked, `started` and `ended` what ran."""

    pieces: list = field(default_factory=lambda: ["Hello", " there"])
    finish_reason: FinishReason = FinishReason.STOP
    round_s: float = 0.0
    max_ctx: int = 64
    parallel: int = 4
    thinks: bool = False
    name: str = "fake"
    calls: list = field(default_factory=list)
    started: list = field(default_factory=list)
    ended: list = field(default_factory=list)
    num_opened: int = 0
    num_kept: int = 0
    num_foreseen: int = 0
    opening_error: Exception | None = None

    @property
    def plan(self):
        return SimpleNamespace(max_ctx=self.max_ctx, parallel=self.parallel)

    @property
    def tokenizer(self):
        return self

    @property
    def tokens(self):
        return self

    model_config = SimpleNamespace(
        name="Fake",
        architecture="unreal",
        num_parameters=135_000_000,
        weight_bytes=98_000_000,
        hidden_size=4,
        num_layers=2,
    )
    max_embedding_len = 8
    chat_template = "{{ messages }}"
    vocab_size = 100

    def encode(self, text):
        return list(text.encode())

    def check_embedding(self, ids):
        if len(ids) > self.max_embedding_len:
            raise CapacityError(f"The text has {len(ids)} tokens.")

    def embed(self, ids):
        self.calls.append({"embedded": ids})
        return np.array([len(ids), 0, 0, 1], dtype=np.float32)

    def token_bytes(self, token):
        return b"abc"[: token + 1]

    def decode(self, ids):
        if max(ids) >= 100:
            raise TokenizerError(f"There is no token {max(ids)}.")
        return "".join(f"<{i}>" for i in ids)

    def open(self):
        if self.opening_error is not None:
            raise self.opening_error
        self.num_opened += 1
        self.num_prepared = 0
        return self

    @property
    def can_think(self):
        return self.thinks

    def close(self):
        pass

    def read_ahead(self, should_stop):
        assert not should_stop()
        self.num_foreseen += 1
        return 0

    def offload(self, should_stop):
        assert not should_stop()
        self.num_kept += 1

    def prepare_chat(self):
        self.num_prepared = getattr(self, "num_prepared", 0) + 1

    def chat(self, messages, **options):
        return self._start(sum(len(str(m.get("content"))) for m in messages), options, messages)

    def complete(self, prompt, **options):
        return self._start(len(prompt), options, prompt)

    def _start(self, length, options, prompt):
        if length >= self.max_ctx:
            raise CapacityError(f"The prompt has {length} tokens.", length)
        self.calls.append({"prompt": prompt, **options})
        return Generation(self, prompt, self.pieces, self.round_s)


# A reply that thinks, speaks, and makes two calls.
THINKING_AND_CALLS = [
    Delta("Let me", DeltaKind.REASONING),
    Delta(" see", DeltaKind.REASONING),
    Delta("Adding."),
    Delta(kind=DeltaKind.TOOL_CALL, tool_call=Call(0, "call_1", "add", '{"a"')),
    Delta(kind=DeltaKind.TOOL_CALL, tool_call=Call(0, None, None, ": 1}")),
    Delta(kind=DeltaKind.TOOL_CALL, tool_call=Call(1, "call_2", "add", "{}")),
]
