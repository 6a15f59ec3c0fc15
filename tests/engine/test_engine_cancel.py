"""Another thread may end a request: after a round, or between two chunks of its prompt."""

from collections.abc import Iterator
from typing import Any

import pytest

from draftree.config import EngineConfig
from draftree.core import FinishReason, Request, SamplingParams
from draftree.engine.engine import TokenEngine
from tests.made import make_draft
from tests.tiny import tiny_path

PROMPT = tuple(range(1, 91))
REQUEST = Request(PROMPT, max_tokens=60, sampling=SamplingParams(temperature=3.0, seed=4))


@pytest.fixture(scope="module")
def engine() -> Iterator[TokenEngine]:
    config = EngineConfig(
        budget=15, ngram="off", max_ctx=200, threads=1, math="exact", chunk=16, prefix_bytes=0
    )
    engine = TokenEngine.open(tiny_path("qwen35-mtp"), config, make_draft())
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def whole(engine: TokenEngine) -> list[int]:
    return [event.token for event in engine.generate(REQUEST)]


def test_cancelling_ends_after_the_round(engine: TokenEngine, whole: list[int]) -> None:
    stream = engine.generate(REQUEST)
    events = [next(stream)]
    stream.cancel()
    events += stream
    assert {event.round_index for event in events} == {1}
    assert [event.token for event in events] == whole[: len(events)]
    assert stream.finish_reason is FinishReason.CANCELLED


def test_cancelling_ends_the_prompt_after_a_chunk(
    engine: TokenEngine, whole: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    list(engine.generate(Request((7, 8), max_tokens=1)))  # leaves nothing of the prompt behind
    stream = engine.generate(REQUEST)
    before, forward = engine.target.num_forwards, engine.target.forward

    def cancel_and_forward(**options: Any) -> Any:
        stream.cancel()
        return forward(**options)

    with monkeypatch.context() as patch:
        patch.setattr(engine.target, "forward", cancel_and_forward)
        assert list(stream) == []
    assert engine.target.num_forwards == before + 1
    assert stream.finish_reason is FinishReason.CANCELLED
    assert [event.token for event in engine.generate(REQUEST)] == whole


def test_rounds_are_announced_when_their_events_are_read(engine: TokenEngine) -> None:
    stream = engine.generate(REQUEST)
    seen: list[int] = []
    announced: list[int] = []
    stream.on_round = lambda: announced.append(seen[-1])
    for event in stream:
        assert not announced or announced[-1] < event.round_index
        seen.append(event.round_index)
    assert announced == sorted(set(seen))
