"""A chat module without a model: replies are given in advance, requests are written down."""

import os
import signal
import sys
import time
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

from draftree.core import FinishReason, TokenSource, Usage
from draftree.errors import CapacityError


@dataclass(frozen=True)
class Delta:
    text: str
    source: TokenSource
    round_index: int


class Generation:
    def __init__(self, words, sources):
        self._pending = list(zip(words, sources, strict=True))
        self._num_words = len(words)
        self.text = ""
        self.usage = Usage(prompt_tokens=3, prefill_ms=100.0)
        self.finish_reason = None
        self.is_closed = False

    def __iter__(self):
        return self

    def __next__(self):
        if self.is_closed or not self._pending:
            self.finish_reason = self.finish_reason or FinishReason.STOP
            raise StopIteration
        word, source = self._pending.pop(0)
        index = self._num_words - len(self._pending)
        if word == "<ctrl-c>":
            os.kill(os.getpid(), signal.SIGINT)
            word = " cut"
        if word == "<slow>":
            time.sleep(0.02)
            word = "."
        if word == "<full>":
            raise CapacityError("The conversation no longer fits.")
        self.text += word
        self.usage.completion_tokens += 1
        self.usage.decode_ms += 10.0
        self.usage.rounds.num_rounds += 1
        self.usage.rounds.num_drafted += source != TokenSource.PLAIN
        return Delta(word, source, index // 2)

    def watch_prompt(self, on_chunk):
        """It is read at once."""

    def cancel(self):
        """It is closed soon."""

    def close(self):
        if not self.is_closed and self._pending:
            self.finish_reason = FinishReason.CANCELLED
        self.is_closed = True


@dataclass
class Engine:
    """Every reply is `words`; `requests` holds the arguments of each call."""

    words: list[str] = field(default_factory=lambda: ["Hello", " there"])
    sources: list[TokenSource] | None = None
    has_template: bool = True
    name: str = "fake"
    requests: list[dict] = field(default_factory=list)
    opened: list[tuple] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    is_closed: bool = False
    plan: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(kv_note=""))

    def open(self, model, config=None, **options):
        self.opened.append((model, config))
        return self

    def prepare_chat(self):
        """There is no template."""

    def close(self):
        self.is_closed = True

    def generate(self, prompt, **options):
        self.requests.append({"prompt": prompt, **options})
        sources = self.sources or [TokenSource.PLAIN] * len(self.words)
        self.generations.append(Generation(self.words, sources))
        return self.generations[-1]


def install(engine):
    """Make `draftree.chat` this engine's module; returns the module."""
    module = ModuleType("draftree.chat")
    module.Engine, module.Generation, module.Delta = engine, Generation, Delta
    sys.modules["draftree.chat"] = module
    return module
