"""Requests whose plain steps share passes give what each of them gives alone, bit for bit."""

from typing import Any

import numpy as np
import pytest

from draftree.config import EngineConfig
from draftree.core import FinishReason, Request
from draftree.engine.engine import TokenEngine
from draftree.errors import EngineError
from tests.engine.turns import (
    HOT,
    KINDS,
    REQUESTS,
    Reply,
    alone,
    alone_with,
    make_prompt,
    open_engine,
    take_turns,
)
from tests.tiny import tiny_path


@pytest.fixture(autouse=True)
def _one_pass_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftree.engine.batch._FRAME_S", 0.0)
    monkeypatch.setattr("draftree.engine.batch._SLICE_S", 0.0)


def _said(reply: Reply) -> list[Any]:
    return [(event.token, event.position, event.scores) for event in reply.events]


def _begin(engine: TokenEngine, *requests: Request) -> list[Reply]:
    """All of them with pauses, as far as their first tokens."""
    replies = [Reply.start(engine, request) for request in requests]
    for reply in replies:
        reply.stream.should_pause = lambda: True
    while not all(len(reply.events) > 2 for reply in replies):
        for reply in replies:
            assert reply.advance()
    return replies


@pytest.mark.parametrize("kind", KINDS)
def test_batched_requests_give_what_they_give_alone(kind: str) -> None:
    engine, fresh = open_engine(kind, batching="always"), open_engine(kind)
    expected = [_said(alone(fresh, request)) for request in REQUESTS]
    for seed in (None, 1, 2):
        engine.reset()
        order = None if seed is None else np.random.default_rng(seed)
        replies = take_turns(engine, REQUESTS, order)
        assert [_said(reply) for reply in replies] == expected
        assert min(reply.stream.usage.rounds.num_batched for reply in replies) > 3
        assert engine.swapped_bytes == 0
    fresh.close()
    engine.close()


def test_passes_are_shared() -> None:
    engine = open_engine("dense", batching="always")
    requests = [Request(make_prompt(8, seed), 40) for seed in range(4)]
    replies, before = _begin(engine, *requests), engine.target.num_forwards
    num_said = sum(len(reply.events) for reply in replies)
    while sum(reply.advance() for reply in replies):
        pass
    num_written = sum(len(reply.events) for reply in replies) - num_said
    assert num_written > 120
    assert engine.target.num_forwards - before < num_written / 3
    engine.close()


@pytest.mark.parametrize("most_features", [1024, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_who_is_left_goes_on_alone(kind: str, most_features: int) -> None:
    """Its draft has read what was written in the batch, or as much of its end as was kept."""
    engine = open_engine(kind, batching="always")
    batch = engine._use.batch
    assert batch is not None
    batch.most_features = most_features
    short, long = Request(make_prompt(20, 1), 12), Request(make_prompt(30, 2), 60, HOT)
    expected = [_said(alone(engine, request)) for request in (short, long)]
    engine.reset()
    replies = take_turns(engine, (short, long))
    assert [_said(reply) for reply in replies] == expected
    stats = replies[1].stream.usage.rounds
    assert 5 < stats.num_batched < 30
    if "drafted" in kind:
        assert stats.num_drafted > 0
        drafter = engine.drafter
        assert drafter is not None and drafter.position == engine.target.state.committed
        assert (drafter.first > 30) == (most_features == 4)
    engine.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["close", "cancel", "stop"])
def test_one_ends_before_the_others(kind: str, how: str) -> None:
    """Its row goes to another one; what it said is known to the next request."""
    engine, fresh = open_engine(kind, batching="always", prefix_bytes=1 << 30), open_engine(kind)
    requests = [Request(make_prompt(20 + 3 * seed, seed), 40, HOT) for seed in range(3)]
    expected = [_said(alone(fresh, request)) for request in requests]
    if how == "stop":
        stop = next(t for t, *_ in expected[0][6:] if t not in [s for s, *_ in expected[0][:6]])
        requests[0] = Request(requests[0].prompt_ids, 40, HOT, stop_ids=frozenset({stop}))
        expected[0] = _said(alone(fresh, requests[0]))
    replies = _begin(engine, *requests)
    first = replies[0]
    if how == "close":
        first.stream.close()
    elif how == "cancel":
        first.stream.cancel()
    live = replies[1:] if how == "close" else list(replies)
    while live:
        live = [reply for reply in live if reply.advance()]
    assert [_said(reply) for reply in replies[1:]] == expected[1:]
    said = _said(first)
    assert said == expected[0][: len(said)] and (how != "stop" or said == expected[0])
    wanted = {"close": "cancelled", "cancel": "cancelled", "stop": "stop"}[how]
    assert first.stream.finish_reason is FinishReason(wanted)
    again = Request((*replies[1].stream.tokens[:0], *requests[1].prompt_ids, *replies[1].tokens), 9)
    after = alone_with(engine, again)
    assert after.stream.usage.cached_tokens >= len(requests[1].prompt_ids)
    assert _said(after) == _said(alone(fresh, again))
    fresh.close()
    engine.close()


def test_nobody_waits_for_a_caller_that_does_not_read() -> None:
    engine = open_engine("dense", batching="always")
    requests = [Request(make_prompt(8, seed), 30) for seed in range(2)]
    expected = [_said(alone(engine, request)) for request in requests]
    engine.reset()
    idle, busy = _begin(engine, *requests)
    for _ in range(200):
        if not busy.advance():
            break
    assert _said(busy) == expected[1]
    while idle.advance():
        pass
    assert _said(idle) == expected[0]
    engine.close()


def test_a_reply_dropped_in_another_thread_leaves_its_row() -> None:
    """A stream may be closed while somebody else has the turn; then it only says so."""
    engine = open_engine("dense", batching="always")
    requests = [Request(make_prompt(8, seed), 30) for seed in range(3)]
    expected = [_said(alone(engine, request)) for request in requests]
    engine.reset()
    replies = _begin(engine, *requests)
    replies[0].stream.should_pause = None  # it was paused, and goes no further
    replies[0].stream.close()
    assert len(engine._use.batch._joined) == 3  # type: ignore[union-attr]
    live = replies[1:]
    while live:
        live = [reply for reply in live if reply.advance()]
    assert [_said(reply) for reply in replies[1:]] == expected[1:]
    engine.close()


def test_a_pass_that_fails_loses_all_who_shared_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine("dense", batching="always")
    requests = [Request(make_prompt(8, seed), 30) for seed in range(3)]
    expected = _said(alone(engine, requests[0]))
    engine.reset()
    replies = _begin(engine, *requests)
    with monkeypatch.context() as patch:
        patch.setattr(engine._use.batch._target, "forward", _fail)  # type: ignore[union-attr]
        with pytest.raises(MemoryError):
            for _ in range(3):
                replies[0].advance()
    for reply in replies[1:]:
        with pytest.raises(EngineError, match="ask again"):
            for _ in range(3):
                reply.advance()
    assert _said(alone(engine, requests[0])) == expected
    engine.close()


def _fail(anchors: Any) -> None:
    raise MemoryError("no room")


def test_without_pauses_nobody_joins() -> None:
    engine = open_engine("dense", batching="always")
    reply = alone(engine, REQUESTS[0])
    assert reply.stream.usage.rounds.num_batched == 0
    engine.close()


def test_windows_and_sinks() -> None:
    """Each sequence keeps the beginning that its own request names."""
    options = {"batching": "always", "window": 128, "max_ctx": 400, "chunk": 64}
    engine = open_engine("dense", **options)
    requests = [
        Request(make_prompt(150 + sinks, sinks), 30, sink_len=sinks) for sinks in (0, 9, 40)
    ]
    expected = [_said(alone(engine, request)) for request in requests]
    engine.reset()
    replies = take_turns(engine, requests)
    assert [_said(reply) for reply in replies] == expected
    assert min(reply.stream.usage.rounds.num_batched for reply in replies) > 3
    engine.close()


@pytest.mark.parametrize("kv", ["f16", "q8_0", "q4"])
def test_formats_of_keys_and_quantised_products(kv: str) -> None:
    """With what keys have in common, where a format takes it from them."""
    config = EngineConfig(
        max_ctx=200,
        threads=1,
        budget=0,
        kv_k=kv,
        kv_v=kv,
        parallel=4,
        batching="always",
    )
    engine = TokenEngine.open(tiny_path("qwen3"), config)
    expected = [_said(alone(engine, request)) for request in REQUESTS]
    engine.reset()
    assert [_said(reply) for reply in take_turns(engine, REQUESTS)] == expected
    engine.close()


def test_the_plan_says_how_many_may_join() -> None:
    with _opened(batching="off") as engine:
        assert engine.plan.batch == 0
    with _opened(batching="auto", parallel=1) as engine:
        assert engine.plan.batch == 0
    with _opened(batching="auto", parallel=3) as engine:
        assert engine.plan.batch == 3


def test_more_requests_than_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine("dense", batching="always")
    expected = [_said(alone(engine, request)) for request in REQUESTS]
    batch = engine._use.batch
    assert batch is not None
    batch._size = 2
    engine.reset()
    replies = take_turns(engine, REQUESTS)
    assert [_said(reply) for reply in replies] == expected
    assert len(batch._target.states) == 2
    engine.close()


def test_a_pass_that_fails_harms_nobody_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is not in the batch may have the device's sequence when somebody else's pass fails."""
    engine = open_engine("dense", batching="always")
    batch = engine._use.batch
    assert batch is not None
    batch._size = 2
    requests = [Request(make_prompt(8 + seed, seed), 40) for seed in range(4)]
    expected = [_said(alone(engine, request)) for request in requests]
    engine.reset()
    replies = _begin(engine, *requests)
    for _ in range(4):
        for reply in replies:
            reply.advance()
    others = [r for r in replies if r.stream not in [d._stream for d in batch._joined]]
    assert len(others) == 2
    for reply in (*others, others[1]):
        reply.advance()
    with monkeypatch.context() as patch:
        patch.setattr(batch._target, "forward", _fail)
        with pytest.raises(MemoryError):
            for _ in range(3):
                next(r for r in replies if r not in others).advance()
    for reply in others:
        while reply.advance():
            pass
        assert _said(reply) == expected[replies.index(reply)]
    engine.close()


@pytest.mark.parametrize("kind", ["hybrid", "hybrid, drafted"])
def test_checkpoints_are_those_of_a_request_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it joins and leaves."""
    cached = []
    for batching in ("off", "always"):
        engine = open_engine(kind, batching=batching, prefix_bytes=1 << 30, chunk=16)
        prompts = make_prompt(100, 1), make_prompt(100, 2)
        requests = [Request(prompt, 60, cache_points=(30, 60)) for prompt in prompts]
        replies, number = [Reply.start(engine, request) for request in requests], 0
        if batching == "always":
            _leave_often(engine, monkeypatch)
        for reply in replies:
            reply.stream.should_pause = lambda: True
        while sum([reply.advance() for reply in replies]):
            number += 1
        assert sorted(engine.target.state.checkpoints)[:1] == [30]
        assert len(engine.target.state.checkpoints) <= 4
        later = Request((*prompts[1][:99], 7, 8, 9, *make_prompt(30, 5)), 4)
        cached.append(alone_with(engine, later).stream.usage.cached_tokens)
        engine.close()
    assert cached[0] == cached[1] > 80


def _leave_often(engine: TokenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every few steps nobody is wanted in the batch for a while."""
    batch = engine._use.batch
    assert batch is not None
    is_wanted, count = batch.is_wanted, 0

    def is_wanted_now(decoder: Any) -> bool:
        nonlocal count
        count += 1
        return is_wanted(decoder) and count // 16 % 2 == 0

    monkeypatch.setattr(batch, "is_wanted", is_wanted_now)


def test_a_draft_that_began_anew_keeps_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of turns copies what there is of it."""
    engine = open_engine("dense, drafted", batching="always")
    batch, drafter = engine._use.batch, engine.drafter
    assert batch is not None and drafter is not None
    batch.most_features = 8
    replies = _begin(engine, *[Request(make_prompt(40, seed), 60, HOT) for seed in (1, 2)])
    for _ in range(10):
        for reply in replies:
            reply.advance()
    monkeypatch.setattr(batch, "is_wanted", lambda decoder: False)
    for _ in range(3):
        for reply in replies:
            reply.advance()
    firsts = []
    for reply in replies:
        reply.advance()
        firsts.append(drafter.first)
        assert drafter.position - drafter.first >= 8
    for reply, first in zip(replies, firsts, strict=True):
        reply.advance()
        assert drafter.first == first, "nothing more was lost"
    engine.close()


def test_one_that_cannot_go_back_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine("dense", batching="always")
    requests = [Request(make_prompt(8, seed), 12 + 20 * seed) for seed in range(3)]
    expected = [_said(alone(engine, request)) for request in requests]
    engine.reset()
    replies = _begin(engine, *requests)
    with monkeypatch.context() as patch:
        patch.setattr(engine._slots, "take_back", lambda *_: _fail(()))
        with pytest.raises(MemoryError):
            while replies[0].advance():
                pass
    assert len(engine._use.batch._writing) == 2  # type: ignore[union-attr]
    for reply, wanted in zip(replies[1:], expected[1:], strict=True):
        while reply.advance():
            pass
        assert _said(reply) == wanted
    engine.close()


class _opened:
    def __init__(self, **options: Any) -> None:
        self._engine = open_engine("dense", **options)

    def __enter__(self) -> TokenEngine:
        return self._engine

    def __exit__(self, *_: object) -> None:
        self._engine.close()
