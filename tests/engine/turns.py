"""Requests that take turns on a tiny engine, and what of a reply does not depend on time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from draftree.config import EngineConfig
from draftree.core import Request, RoundStats, SamplingParams, TokenEvent
from draftree.decode.decoder import Round
from draftree.engine.engine import TokenEngine
from draftree.engine.stream import PAUSE, TokenStream
from tests.made import make_draft
from tests.tiny import tiny_path

HOT = SamplingParams(temperature=3.0, seed=4)
KINDS = {
    "dense": ("llama", None),
    "dense, drafted": ("llama", (0, 1, 2)),
    "hybrid": ("qwen35-mtp", None),
    "hybrid, drafted": ("qwen35-mtp", (0, 1, 3)),
}
MS = {"draft_ms", "tree_ms", "verify_ms", "accept_ms", "commit_ms"}


def open_engine(kind: str = "hybrid, drafted", **options: Any) -> TokenEngine:
    model, layers = KINDS[kind]
    draft = make_draft(feature_layers=layers) if layers else None
    settings = {"budget": 7, "ngram": "off", "max_ctx": 200, "threads": 1, "math": "exact"}
    settings |= {"chunk": 8, "prefix_bytes": 0, "parallel": 4, "batching": "off"}
    return TokenEngine.open(tiny_path(model), EngineConfig(**{**settings, **options}), draft)


def make_prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 256, length).tolist())


REQUESTS = (
    Request(make_prompt(60, 1), 30, HOT),
    Request(make_prompt(3, 2), 40),
    Request(make_prompt(33, 3), 25, HOT, logprobs=3, logit_bias=((5, 2.0),)),
    Request(make_prompt(41, 4), 12, SamplingParams(presence_penalty=1.0), cache_points=(10, 30)),
)


@dataclass
class Reply:
    """All of a reply that does not depend on time."""

    stream: TokenStream
    events: list[TokenEvent] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    num_pauses: int = 0

    @classmethod
    def start(cls, engine: TokenEngine, request: Request) -> "Reply":
        reply = cls(engine.generate(request))
        reply.stream.watch = reply.rounds.append
        return reply

    def advance(self) -> bool:
        """Up to the next pause; False at the end."""
        for event in self.stream:
            if event is PAUSE:
                self.num_pauses += 1
                return True
            self.events.append(event)
        return False

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self.events]

    @property
    def facts(self) -> tuple[object, ...]:
        usage = self.stream.usage
        stats = {name: getattr(usage.rounds, name) for name in RoundStats.__slots__}
        counts = {name: value for name, value in stats.items() if name not in MS}
        sizes = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        return self.events, self.rounds, self.stream.finish_reason, sizes, counts


def alone(engine: TokenEngine, request: Request) -> Reply:
    engine.reset()
    return alone_with(engine, request)


def alone_with(engine: TokenEngine, request: Request) -> Reply:
    """With what the engine has kept."""
    reply = Reply.start(engine, request)
    assert not reply.advance() and reply.num_pauses == 0
    return reply


def take_turns(
    engine: TokenEngine, requests: Sequence[Request], order: np.random.Generator | None = None
) -> list[Reply]:
    """All of them, with a pause after every chunk and every round, one after the other or as the
    dice fall.
    """
    replies = [Reply.start(engine, request) for request in requests]
    for reply in replies:
        reply.stream.should_pause = lambda: True
    live = list(replies)
    while live:
        index = 0 if order is None else int(order.integers(len(live)))
        reply = live.pop(index)
        if reply.advance():
            live.append(reply)
    return replies
