"""Requests that are swapped out: cancelled, closed, failing, bounded, and told how far they are."""

from collections.abc import Iterator

import pytest

from draftree.core import FinishReason, Request
from draftree.engine.engine import TokenEngine
from draftree.errors import EngineError
from tests.engine.turns import KINDS, REQUESTS, Reply, alone, make_prompt, open_engine


@pytest.fixture
def engine() -> Iterator[TokenEngine]:
    engine = open_engine()
    yield engine
    engine.close()


def _swap_one_out(engine: TokenEngine, num_pauses: int) -> tuple[Reply, Reply]:
    """A request that others have taken the device from, and the one that has it."""
    swapped, other = (Reply.start(engine, request) for request in REQUESTS[:2])
    for reply in (swapped, other):
        reply.stream.should_pause = lambda: True
    for _ in range(num_pauses):
        assert swapped.advance()
    assert other.advance() and engine.swapped_bytes > 0
    return swapped, other


@pytest.mark.parametrize("num_pauses", [2, 12], ids=["in the prompt", "in the reply"])
def test_cancelling_a_swapped_request(engine: TokenEngine, num_pauses: int) -> None:
    expected = alone(engine, REQUESTS[1]).tokens
    engine.reset()
    for close in (False, True):
        swapped, other = _swap_one_out(engine, num_pauses)
        before = engine.target.num_forwards
        if close:
            swapped.stream.close()
        else:
            swapped.stream.cancel()
            assert not swapped.advance()
        assert swapped.stream.finish_reason is FinishReason.CANCELLED
        assert engine.target.num_forwards == before and engine.swapped_bytes == 0
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


def test_a_closed_engine_raises_in_swapped_requests() -> None:
    engine = open_engine()
    swapped, other = _swap_one_out(engine, 3)
    engine.close()
    for reply in (swapped, other):
        with pytest.raises(EngineError, match="closed"):
            reply.advance()
    assert engine.swapped_bytes == 0


def test_a_failing_request_does_not_harm_swapped_ones(
    engine: TokenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone(engine, REQUESTS[0]).facts
    engine.reset()
    swapped, other = _swap_one_out(engine, 9)

    def fail(**_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine.target, "forward", fail)
        other.advance()
    while swapped.advance():
        continue
    assert swapped.facts == expected


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
        engine = open_engine(kind, parallel=3)
        longest = [Request(make_prompt(199, i), 1) for i in range(4)]
        replies = [Reply.start(engine, request) for request in longest]
        for reply in replies:
            reply.stream.should_pause = lambda: True
        for _ in range(24):
            for reply in replies[:3]:
                assert reply.advance()
            assert engine.swapped_bytes <= engine.plan.swapped_bytes
        assert engine.swapped_bytes > engine.plan.swapped_bytes / 5
        with pytest.raises(EngineError, match="3 replies of this engine are unfinished"):
            replies[3].advance()
        for reply in replies[:3]:
            while reply.advance():
                continue
            assert len(reply.tokens) == 1
        engine.close()


def test_reset_and_offload_leave_swapped_requests_as_they_are(engine: TokenEngine) -> None:
    expected = [alone(engine, request).facts for request in REQUESTS[:2]]
    engine.reset()
    replies = _swap_one_out(engine, 9)
    engine.offload()
    engine.reset()
    for reply in replies:
        while reply.advance():
            continue
    assert [reply.facts for reply in replies] == expected
