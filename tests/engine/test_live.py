"""Requests that take turns give what each of them gives alone, bit for bit."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from draftree.chat import DeltaKind, Engine
from draftree.config import EngineConfig
from draftree.core import FinishReason, Request, RoundStats, SamplingParams, TokenEvent
from draftree.decode.decoder import Round
from draftree.engine.engine import TokenEngine
from draftree.engine.stream import PAUSE, TokenStream
from draftree.errors import EngineError
from draftree.text.grammar import FormatKind, ResponseFormat
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


def _open(kind: str = "hybrid, drafted", **options: Any) -> TokenEngine:
    model, layers = KINDS[kind]
    draft = make_draft(feature_layers=layers) if layers else None
    settings = {"budget": 7, "ngram": "off", "max_ctx": 200, "threads": 1, "math": "exact"}
    settings |= {"chunk": 8, "prefix_bytes": 0, "parallel": 4}
    return TokenEngine.open(tiny_path(model), EngineConfig(**{**settings, **options}), draft)


def _prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 256, length).tolist())


REQUESTS = (
    Request(_prompt(60, 1), 30, HOT),
    Request(_prompt(3, 2), 40),
    Request(_prompt(33, 3), 25, HOT, logprobs=3, logit_bias=((5, 2.0),)),
    Request(_prompt(41, 4), 12, SamplingParams(presence_penalty=1.0), cache_points=(10, 30)),
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


def _alone(engine: TokenEngine, request: Request) -> Reply:
    engine.reset()
    return _alone_with(engine, request)


def _alone_with(engine: TokenEngine, request: Request) -> Reply:
    """With what the engine has kept."""
    reply = Reply.start(engine, request)
    assert not reply.advance() and reply.num_pauses == 0
    return reply


def _take_turns(
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


@pytest.mark.parametrize("prefix_bytes", [0, 60_000, 1 << 30], ids=["none", "full", "large"])
@pytest.mark.parametrize("kind", KINDS)
def test_interleaved_requests_give_what_they_give_alone(kind: str, prefix_bytes: int) -> None:
    engine, fresh = _open(kind, prefix_bytes=prefix_bytes), _open(kind)
    expected = [_alone(fresh, request).facts for request in REQUESTS]
    for seed in (None, 1, 2):
        engine.reset()
        order = None if seed is None else np.random.default_rng(seed)
        replies = _take_turns(engine, REQUESTS, order)
        assert [reply.facts for reply in replies] == expected
        assert replies[0].num_pauses > 8, "the prompt alone has 8 chunks"
        assert engine.parked_bytes == 0 and engine.kept_bytes <= prefix_bytes
    fresh.close()
    engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_interleaved_requests_on_a_gpu(kind: str) -> None:
    """Rounds on the device end before a pause and begin again after it, and chunks that are longer
    than what is batch-invariant are cut in the same places.
    """
    options = {"device": "cuda", "math": "auto", "max_ctx": 600, "chunk": 96}
    engine, fresh = _open(kind, **options), _open(kind, **options)
    requests = [*REQUESTS, Request(_prompt(500, 9), 20, HOT), Request(_prompt(300, 8), 20)]
    expected = [_alone(fresh, request).facts for request in requests]
    for first in (0, 2):
        engine.reset()
        replies = _take_turns(engine, requests[first : first + 4], np.random.default_rng(first))
        assert [reply.facts for reply in replies] == expected[first : first + 4]
    fresh.close()
    engine.close()


def test_automatic_budgets_and_lookup() -> None:
    """Rounds depend on times there, the text does not."""
    engine = _open(budget="auto", ngram="on")
    expected = [_alone(engine, request).tokens for request in REQUESTS]
    engine.reset()
    assert [reply.tokens for reply in _take_turns(engine, REQUESTS)] == expected
    engine.close()


def test_passes_are_those_of_a_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device whose bits depend on how a prompt is cut, cuts must not move."""
    engine = _open()
    passes: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    begin, state = engine.target.state.begin, engine.target.state

    def note(tree: Any, *, is_committed: bool = False) -> None:
        if is_committed:
            passes.setdefault(current, []).append((state.committed, tree.num_nodes))
        begin(tree, is_committed=is_committed)

    monkeypatch.setattr(state, "begin", note)
    for request in REQUESTS:
        current = request.prompt_ids
        _alone(engine, request)
    expected, passes = passes, {}
    engine.reset()
    live = [(request, Reply.start(engine, request)) for request in REQUESTS]
    while live:
        request, reply = live.pop(0)
        reply.stream.should_pause = lambda: True
        current = request.prompt_ids
        if reply.advance():
            live.append((request, reply))
    assert passes == expected and len(expected[REQUESTS[0].prompt_ids]) >= 8
    engine.close()


def test_a_lone_request_that_pauses_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _open()
    expected = _alone(engine, REQUESTS[0]).facts
    engine.reset()
    monkeypatch.setattr(engine.target.state.kv, "copy", lambda *_: pytest.fail("copied"))
    (reply,) = _take_turns(engine, REQUESTS[:1])
    assert reply.facts == expected and reply.num_pauses > 8
    assert reply.stream.usage.switch_ms < 1000
    engine.close()


def test_only_what_is_new_is_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _open("dense", chunk=64)
    copied: list[tuple[int, int]] = []
    copy = engine.target.state.kv.copy
    monkeypatch.setattr(
        engine.target.state.kv, "copy", lambda a, b: copied.append((a, b)) or copy(a, b)
    )
    long, short = Request(_prompt(129, 1), 70), Request(_prompt(2, 2), 30)
    _take_turns(engine, (long, short))
    of_long = sorted({(start, end) for start, end in copied if end > 40})
    assert of_long[0] == (0, 64) and of_long[1] == (64, 128)
    assert all(start >= 128 and end - start <= 64 + 8 for start, end in of_long[2:])
    assert len(of_long) > 5
    engine.close()


def test_checkpoints_outlive_a_turn() -> None:
    """A recurrent state can only go back to them, for a later prompt that parts there."""
    engine = _open("hybrid", prefix_bytes=1 << 30)
    long = Request(_prompt(60, 1), 30, HOT, cache_points=(24,))
    _take_turns(engine, (long, REQUESTS[1]))
    later = _alone_with(engine, Request((*long.prompt_ids[:30], 9, 9), 3))
    assert later.stream.usage.cached_tokens == 24
    engine.close()


@cache
def _text_engine() -> Engine:
    options = {"max_ctx": 200, "draft": "none", "chunk": 8, "threads": 1, "parallel": 4}
    return Engine.open(str(tiny_path("qwen3")), **options)


def test_grammars_take_turns() -> None:
    engine = _text_engine()
    schema = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 3, "maxItems": 5}
    formats = ResponseFormat(FormatKind.JSON_SCHEMA, schema)

    def start(number: int) -> Any:
        sampling = SamplingParams(temperature=2.0, seed=number)
        return engine.complete(
            f"Colours, number {number}:", response_format=formats, sampling=sampling, max_tokens=60
        )

    expected = [start(number) for number in range(3)]
    texts = ["".join(delta.text for delta in generation) for generation in expected]
    assert all(3 <= len(json.loads(text)) <= 5 for text in texts)
    engine.tokens.reset()
    generations = [start(number) for number in range(3)]
    live = list(generations)
    for generation in generations:
        generation.pause_when(lambda: True)
    while live:
        generation = live.pop(0)
        if any(delta.kind is DeltaKind.PAUSE for delta in generation):
            live.append(generation)
    assert [generation.text for generation in generations] == texts


def test_requests_with_a_common_beginning_wait_for_one_that_reads_it() -> None:
    """They would all read it otherwise."""
    for kind in ("dense", "hybrid"):
        engine = _open(kind, prefix_bytes=1 << 20)
        common = _prompt(80, 7)
        requests = [Request((*common, i), 5, replace(HOT, seed=i)) for i in range(4)]
        expected = [_alone(engine, request).tokens for request in requests]
        engine.reset()
        before = engine.target.num_forwards
        replies = _take_turns(engine, requests)
        assert [reply.tokens for reply in replies] == expected
        cached = [reply.stream.usage.cached_tokens for reply in replies]
        assert cached[0] == 0 and min(cached[1:]) >= 80 - 12 - 16
        num_rounds = sum(reply.stream.usage.rounds.num_rounds for reply in replies)
        num_chunks = engine.target.num_forwards - before - num_rounds
        assert num_chunks <= 11 + 3 * 5
        engine.close()


@pytest.fixture
def engine() -> Iterator[TokenEngine]:
    engine = _open()
    yield engine
    engine.close()


def _park_one(engine: TokenEngine, num_pauses: int) -> tuple[Reply, Reply]:
    """A request that others have taken the device from, and the one that has it."""
    parked, other = (Reply.start(engine, request) for request in REQUESTS[:2])
    for reply in (parked, other):
        reply.stream.should_pause = lambda: True
    for _ in range(num_pauses):
        assert parked.advance()
    assert other.advance() and engine.parked_bytes > 0
    return parked, other


@pytest.mark.parametrize("num_pauses", [2, 12], ids=["in the prompt", "in the reply"])
def test_cancelling_a_parked_request(engine: TokenEngine, num_pauses: int) -> None:
    expected = _alone(engine, REQUESTS[1]).tokens
    engine.reset()
    for close in (False, True):
        parked, other = _park_one(engine, num_pauses)
        before = engine.target.num_forwards
        if close:
            parked.stream.close()
        else:
            parked.stream.cancel()
            assert not parked.advance()
        assert parked.stream.finish_reason is FinishReason.CANCELLED
        assert engine.target.num_forwards == before and engine.parked_bytes == 0
        while other.advance():
            continue
        assert other.tokens == expected
        engine.reset()


def test_a_prompt_that_is_cancelled_frees_the_engine_within_a_chunk(engine: TokenEngine) -> None:
    stream = engine.generate(REQUESTS[0])
    chunks: list[int] = []

    def cancel() -> None:
        chunks.append(stream.usage.read_tokens)
        stream.cancel()

    stream.on_chunk = cancel
    assert list(stream) == [] and chunks == [8]
    assert stream.finish_reason is FinishReason.CANCELLED
    assert len(list(engine.generate(REQUESTS[1]))) == 40


def test_progress_of_a_prompt_is_shown_chunk_by_chunk(engine: TokenEngine) -> None:
    stream = engine.generate(REQUESTS[0])
    seen: list[int] = []
    stream.on_chunk = lambda: seen.append(stream.usage.read_tokens)
    next(stream)
    assert seen == [*range(8, 59, 8), 59]
    stream.close()


def test_a_closed_engine_raises_in_parked_requests() -> None:
    engine = _open()
    parked, other = _park_one(engine, 3)
    engine.close()
    for reply in (parked, other):
        with pytest.raises(EngineError, match="closed"):
            reply.advance()
    assert engine.parked_bytes == 0


def test_a_failing_request_does_not_harm_parked_ones(
    engine: TokenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _alone(engine, REQUESTS[0]).facts
    engine.reset()
    parked, other = _park_one(engine, 9)

    def fail(**_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine.target, "forward", fail)
        other.advance()
    while parked.advance():
        continue
    assert parked.facts == expected


def test_a_request_that_could_not_be_copied_says_so(
    engine: TokenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (Reply.start(engine, request) for request in REQUESTS[:2])
    first.stream.should_pause = lambda: True
    assert first.advance()

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(engine.target.state.kv, "copy", fail)
        second.advance()
    with pytest.raises(EngineError, match="could not be kept"):
        first.advance()
    assert len(list(engine.generate(REQUESTS[1]))) == 40


def test_live_requests_are_bounded_and_so_is_their_memory() -> None:
    for kind in KINDS:
        engine = _open(kind, parallel=3)
        longest = [Request(_prompt(199, i), 1) for i in range(4)]
        replies = [Reply.start(engine, request) for request in longest]
        for reply in replies:
            reply.stream.should_pause = lambda: True
        for _ in range(24):
            for reply in replies[:3]:
                assert reply.advance()
            assert engine.parked_bytes <= engine.plan.parked_bytes
        assert engine.parked_bytes > engine.plan.parked_bytes / 5
        with pytest.raises(EngineError, match="3 replies of this engine are unfinished"):
            replies[3].advance()
        for reply in replies[:3]:
            while reply.advance():
                continue
            assert len(reply.tokens) == 1
        engine.close()


def test_reset_and_offload_leave_parked_requests_as_they_are(engine: TokenEngine) -> None:
    expected = [_alone(engine, request).facts for request in REQUESTS[:2]]
    engine.reset()
    replies = _park_one(engine, 9)
    engine.offload()
    engine.reset()
    for reply in replies:
        while reply.advance():
            continue
    assert [reply.facts for reply in replies] == expected
