"""Requests that take turns give what each of them gives alone, bit for bit."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from draftree.chat import DeltaKind, Engine
from draftree.core import Request, SamplingParams
from draftree.text.grammar import FormatKind, ResponseFormat
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


@pytest.mark.parametrize("prefix_bytes", [0, 60_000, 1 << 30], ids=["none", "full", "large"])
@pytest.mark.parametrize("kind", KINDS)
def test_interleaved_requests_give_what_they_give_alone(kind: str, prefix_bytes: int) -> None:
    engine, fresh = open_engine(kind, prefix_bytes=prefix_bytes), open_engine(kind)
    expected = [alone(fresh, request).facts for request in REQUESTS]
    for seed in (None, 1, 2):
        engine.reset()
        order = None if seed is None else np.random.default_rng(seed)
        replies = take_turns(engine, REQUESTS, order)
        assert [reply.facts for reply in replies] == expected
        assert replies[0].num_pauses > 8, "the prompt alone has 8 chunks"
        assert engine.swapped_bytes == 0 and engine.kept_bytes <= prefix_bytes
    fresh.close()
    engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_interleaved_requests_on_a_gpu(kind: str) -> None:
    """Rounds on the device end before a pause and begin again after it, and chunks that are longer
    than what is batch-invariant are cut in the same places.
    """
    options = {"device": "cuda", "math": "auto", "max_ctx": 600, "chunk": 96}
    engine, fresh = open_engine(kind, **options), open_engine(kind, **options)
    requests = [*REQUESTS, Request(make_prompt(500, 9), 20, HOT), Request(make_prompt(300, 8), 20)]
    expected = [alone(fresh, request).facts for request in requests]
    for first in (0, 2):
        engine.reset()
        replies = take_turns(engine, requests[first : first + 4], np.random.default_rng(first))
        assert [reply.facts for reply in replies] == expected[first : first + 4]
    fresh.close()
    engine.close()


def test_automatic_budgets_and_lookup() -> None:
    """Rounds depend on times there, the text does not."""
    engine = open_engine(budget="auto", ngram="on")
    expected = [alone(engine, request).tokens for request in REQUESTS]
    engine.reset()
    assert [reply.tokens for reply in take_turns(engine, REQUESTS)] == expected
    engine.close()


def test_passes_are_those_of_a_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device whose bits depend on how a prompt is cut, cuts must not move."""
    engine = open_engine()
    passes: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    begin, state = engine.target.state.begin, engine.target.state

    def note(tree: Any, *, is_committed: bool = False) -> None:
        if is_committed:
            passes.setdefault(current, []).append((state.committed, tree.num_nodes))
        begin(tree, is_committed=is_committed)

    monkeypatch.setattr(state, "begin", note)
    for request in REQUESTS:
        current = request.prompt_ids
        alone(engine, request)
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
    engine = open_engine()
    expected = alone(engine, REQUESTS[0]).facts
    engine.reset()
    monkeypatch.setattr(engine.target.state.kv, "copy", lambda *_: pytest.fail("copied"))
    (reply,) = take_turns(engine, REQUESTS[:1])
    assert reply.facts == expected and reply.num_pauses > 8
    assert reply.stream.usage.switch_ms < 1000
    engine.close()


def test_only_what_is_new_is_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine("dense", chunk=64)
    copied: list[tuple[int, int]] = []
    copy = engine.target.state.kv.copy
    monkeypatch.setattr(
        engine.target.state.kv, "copy", lambda a, b: copied.append((a, b)) or copy(a, b)
    )
    long, short = Request(make_prompt(129, 1), 70), Request(make_prompt(2, 2), 30)
    take_turns(engine, (long, short))
    of_long = sorted({(start, end) for start, end in copied if end > 40})
    assert of_long[0] == (0, 64) and of_long[1] == (64, 129)  # a step follows the last chunk
    assert all(start >= 128 and end - start <= 64 + 8 for start, end in of_long[2:])
    assert len(of_long) > 5
    engine.close()


def test_checkpoints_outlive_a_turn() -> None:
    """A recurrent state can only go back to them, for a later prompt that parts there."""
    engine = open_engine("hybrid", prefix_bytes=1 << 30)
    long = Request(make_prompt(60, 1), 30, HOT, cache_points=(24,))
    take_turns(engine, (long, REQUESTS[1]))
    later = alone_with(engine, Request((*long.prompt_ids[:30], 9, 9), 3))
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
        engine = open_engine(kind, prefix_bytes=1 << 20)
        common = make_prompt(80, 7)
        requests = [Request((*common, i), 5, replace(HOT, seed=i)) for i in range(4)]
        expected = [alone(engine, request).tokens for request in requests]
        engine.reset()
        before = engine.target.num_forwards
        replies = take_turns(engine, requests)
        assert [reply.tokens for reply in replies] == expected
        cached = [reply.stream.usage.cached_tokens for reply in replies]
        assert cached[0] == 0 and min(cached[1:]) >= 80 - 12 - 16
        num_rounds = sum(reply.stream.usage.rounds.num_rounds for reply in replies)
        num_chunks = engine.target.num_forwards - before - num_rounds
        assert num_chunks <= 11 + 3 * 5
        engine.close()
