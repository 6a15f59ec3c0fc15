"""Requests one after another on one engine give what a fresh engine gives, whatever came before."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from draftree.config import EngineConfig
from draftree.core import FinishReason, Request, RoundStats, SamplingParams, TokenSource
from draftree.decode.speculative import Round
from draftree.engine.engine import TokenEngine, TokenStream
from draftree.errors import CapacityError
from draftree.models.target import Target
from tests.golden import golden
from tests.tiny import tiny_path

MAX_CTX = 200
WARM = SamplingParams(temperature=0.7, seed=4)


def _open(**options: int | str) -> TokenEngine:
    """Model and draft of the golden files; a fixed budget makes every round repeatable."""
    settings = {"budget": 15, "ngram": "off", "max_ctx": MAX_CTX, "threads": 1, "math": "exact"}
    config = EngineConfig(**{**settings, **options})
    return TokenEngine.open(tiny_path("qwen35"), config, golden("dflash/tiny-dflash-A-F16.gguf"))


def _open_plain(**options: int | str) -> TokenEngine:
    settings = {"max_ctx": MAX_CTX, "threads": 1, "math": "exact"}
    return TokenEngine.open(tiny_path("llama"), EngineConfig(**{**settings, **options}))


@pytest.fixture(scope="module")
def engine() -> Iterator[TokenEngine]:
    """One engine for all tests, in whatever state the last one left it."""
    engine = _open()
    yield engine
    engine.close()


@cache
def _prompt() -> tuple[int, ...]:
    return tuple(np.load(golden("qwen35/logits.npz"))["g33.prompt"].tolist())


@dataclass(frozen=True)
class Reply:
    ids: tuple[int, ...]
    cached_tokens: int
    num_rounds: int
    accepted_by_depth: tuple[int, ...]

    def is_like(self, other: "Reply") -> bool:
        """The same text from the same rounds: then the draft saw the same context."""
        mine = (self.ids, self.num_rounds, self.accepted_by_depth)
        return mine == (other.ids, other.num_rounds, other.accepted_by_depth)


def _read(stream: TokenStream) -> Reply:
    ids = tuple(event.token for event in stream)
    usage, rounds = stream.usage, stream.usage.rounds
    return Reply(ids, usage.cached_tokens, rounds.num_rounds, tuple(rounds.accepted_by_depth))


def _reply(
    engine: TokenEngine,
    prompt: tuple[int, ...],
    count: int = 24,
    sampling: SamplingParams = WARM,
) -> Reply:
    return _read(engine.generate(Request(prompt, count, sampling)))


@cache
def _fresh_reply(
    prompt: tuple[int, ...], count: int = 24, sampling: SamplingParams = WARM
) -> Reply:
    engine = _open()
    try:
        reply = _reply(engine, prompt, count, sampling)
    finally:
        engine.close()
    assert reply.cached_tokens == 0
    return reply


def test_a_longer_conversation_is_not_prefilled_again(engine: TokenEngine) -> None:
    first = _reply(engine, _prompt())
    longer = (*_prompt(), *first.ids, 7, 8, 9)
    before = engine.target.num_forwards
    second = _reply(engine, longer)
    # the reply's last token is the first that the target has not read
    assert second.cached_tokens == len(_prompt()) + len(first.ids) - 1
    assert engine.target.num_forwards - before == second.num_rounds + 1  # one chunk of what is new
    assert first.is_like(_fresh_reply(_prompt()))
    assert second.is_like(_fresh_reply(longer))


def test_another_conversation_starts_afresh(engine: TokenEngine) -> None:
    other = tuple(reversed(_prompt()))
    _reply(engine, _prompt())
    reply = _reply(engine, other)
    assert reply.cached_tokens == 0 and reply.is_like(_fresh_reply(other))
    again = _reply(engine, _prompt())
    assert again.cached_tokens == 0 and again.is_like(_fresh_reply(_prompt()))


def test_the_same_prompt_again(engine: TokenEngine) -> None:
    for sampling in (WARM, SamplingParams(), WARM):
        expected = _fresh_reply(_prompt(), 24, sampling)
        assert _reply(engine, _prompt(), 24, sampling).is_like(expected)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_request_after_a_cancelled_one(engine: TokenEngine, count: int) -> None:
    """Cancelled before it began, or after some tokens, in the middle of what a round gave."""
    expected = _fresh_reply(_prompt())
    stream = engine.generate(Request(_prompt(), 24, WARM))
    seen = tuple(next(stream).token for _ in range(count))
    stream.close()
    assert stream.finish_reason == FinishReason.CANCELLED
    assert list(stream) == [] and seen == expected.ids[:count]
    longer = (*_prompt(), *seen, 5)
    assert _reply(engine, longer).is_like(_fresh_reply(longer))
    assert _reply(engine, _prompt()).is_like(expected)


def test_a_stream_that_was_dropped_does_not_block_the_next(engine: TokenEngine) -> None:
    for _ in engine.generate(Request(_prompt(), 24, WARM)):
        break
    replies: list[Reply] = []
    thread = threading.Thread(target=lambda: replies.append(_reply(engine, _prompt())), daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert replies and replies[0].is_like(_fresh_reply(_prompt()))


@pytest.mark.parametrize("budget", [0, 15])
def test_a_request_after_one_that_broke_off_inside_a_pass(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, forward = _open(budget=budget), Target.forward
    expected = _reply(engine, _prompt())

    def interrupted(self: Target, rows: range) -> None:
        forward(self, rows)
        raise KeyboardInterrupt

    for num_tokens in (0, 3):  # in prefill, in decoding
        stream = engine.generate(Request(_prompt(), 24, WARM))
        for _ in range(num_tokens):
            next(stream)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Target, "forward", interrupted)
            list(stream)
        assert _reply(engine, _prompt()).is_like(expected)
    engine.close()


def test_requests_wait_for_each_other(engine: TokenEngine) -> None:
    prompts = [_prompt()[start:] for start in (0, 3, 6)]
    expected = [_fresh_reply(prompt) for prompt in prompts]
    found: dict[int, Reply] = {}

    def work(i: int) -> None:
        found[i] = _reply(engine, prompts[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert all(found[i].is_like(expected[i]) for i in range(3))


def test_bad_requests_are_refused_before_anything_runs(engine: TokenEngine) -> None:
    before = engine.target.num_forwards
    with pytest.raises(ValueError, match="prompt is empty"):
        engine.generate(Request((), 4))
    with pytest.raises(ValueError, match="max_tokens"):
        engine.generate(Request((1,), 0))
    for token in (-1, 1024):
        with pytest.raises(ValueError, match=f"token {token} is not in the vocabulary of 1024"):
            engine.generate(Request((1, token, 2), 4))
    with pytest.raises(CapacityError, match=f"{MAX_CTX} tokens.*planned for {MAX_CTX}"):
        engine.generate(Request((1,) * MAX_CTX, 4))
    assert engine.target.num_forwards == before
    assert _reply(engine, _prompt()).is_like(_fresh_reply(_prompt()))


def test_the_end_of_the_context_ends_the_reply(engine: TokenEngine) -> None:
    prompt = (_prompt() * 7)[: MAX_CTX - 10]
    stream = engine.generate(Request(prompt, 100, WARM))
    events = list(stream)
    assert [event.position for event in events] == list(range(MAX_CTX - 10, MAX_CTX))
    assert stream.finish_reason == FinishReason.LENGTH
    longest = engine.generate(Request((1,) * (MAX_CTX - 1), 100))
    assert len(list(longest)) == 1 and longest.finish_reason == FinishReason.LENGTH


def test_max_tokens_ends_the_reply(engine: TokenEngine) -> None:
    expected = _fresh_reply(_prompt()).ids
    for count in (1, 2, 7):
        stream = engine.generate(Request(_prompt(), count, WARM))
        assert tuple(event.token for event in stream) == expected[:count]
        assert stream.finish_reason == FinishReason.LENGTH
        assert stream.usage.completion_tokens == count


def test_a_stop_token_ends_the_reply_and_is_not_part_of_it(engine: TokenEngine) -> None:
    expected = _fresh_reply(_prompt()).ids
    stop = next(token for i, token in enumerate(expected) if i > 4 and token not in expected[:i])
    stream = engine.generate(Request(_prompt(), 24, WARM, frozenset({stop})))
    ids = tuple(event.token for event in stream)
    assert ids == expected[: expected.index(stop)]
    assert stream.finish_reason == FinishReason.STOP
    assert stream.usage.completion_tokens == len(ids) + 1  # the stop token was decoded too
    longer = (*_prompt(), *ids, stop, 5, 6)
    assert _reply(engine, longer).is_like(_fresh_reply(longer))


@pytest.mark.parametrize("budget", [1, 3, 22, "auto"])
@pytest.mark.parametrize("options", [{}, {"chunk": 1}, {"chunk": 5, "features_len": 8}])
def test_options_do_not_change_the_text(budget: int | str, options: dict[str, int]) -> None:
    engine = _open(budget=budget, ngram="on", **options)
    for sampling in (SamplingParams(), WARM):
        expected = _fresh_reply(_prompt(), 24, sampling).ids
        assert _reply(engine, _prompt(), 24, sampling).ids == expected
    engine.close()


def test_a_shorter_block_is_the_start_of_the_draft() -> None:
    engine, rounds = _open(block=6), []
    engine.watch = rounds.append
    assert _reply(engine, _prompt()).ids == _fresh_reply(_prompt()).ids
    assert max(max(one.tree.depths) for one in rounds) == 5
    engine.close()


def test_a_small_store_of_features_loses_none() -> None:
    engine = _open(features_len=4)
    first = _reply(engine, _prompt())
    assert first.is_like(_fresh_reply(_prompt()))
    engine.close()


def test_why_speculation_is_off() -> None:
    reasons = {}
    for name, engine in {
        "no budget": _open(budget=0),
        "no draft": _open_plain(budget=15, ngram="off"),
        "lookup": _open_plain(budget=15, ngram="on"),
    }.items():
        stream = engine.generate(Request((1, 2, 3), 8))
        sources = {event.source for event in stream}
        rounds: RoundStats = stream.usage.rounds
        assert (sources == {TokenSource.PLAIN}) or rounds.off_reason is None
        assert rounds.num_rounds + rounds.num_accepted == stream.usage.completion_tokens == 8
        reasons[name] = rounds.off_reason
        engine.close()
    assert reasons == {
        "no budget": "the budget is 0",
        "no draft": "there is no draft for this model",
        "lookup": None,
    }


def test_events_usage_and_watch(engine: TokenEngine) -> None:
    seen: list[Round] = []
    engine.watch = seen.append
    stream = engine.generate(Request(_prompt(), 24, SamplingParams()))
    events = list(stream)
    engine.watch = None
    usage = stream.usage
    assert [event.position for event in events] == list(range(33, 57))
    assert [event.round_index for event in events] == [
        i + 1 for i, one in enumerate(seen) for _ in one.path
    ]
    assert usage.prompt_tokens == 33 and usage.completion_tokens == 24
    assert usage.rounds.num_rounds == len(seen) < 24
    assert usage.acceptance_length == pytest.approx(24 / len(seen))
    assert 0 < usage.prefill_ms < usage.first_token_ms <= usage.prefill_ms + usage.decode_ms
    assert usage.tokens_per_second > 0
