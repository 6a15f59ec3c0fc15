"""Requests one after another on one engine give what a fresh engine gives, whatever came before."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from draftree.config import EngineConfig
from draftree.core import FinishReason, Request, RoundStats, SamplingParams, TokenSource
from draftree.decode.decoder import Round
from draftree.engine.engine import TokenEngine
from draftree.errors import CapacityError
from draftree.models.target import Target
from tests.made import make_draft, make_quantised
from tests.tiny import tiny_path

MAX_CTX = 200
PROMPT = tuple(np.random.default_rng(3).integers(0, 512, 33).tolist())
# the noise decides, and any draft knows the noise: rounds of all lengths
HOT = SamplingParams(temperature=3.0, seed=4)


def _open(**options: int | str) -> TokenEngine:
    """A hybrid model and a draft; a fixed budget makes every round repeatable."""
    settings = {"budget": 15, "ngram": "off", "max_ctx": MAX_CTX, "threads": 1}
    settings |= {"math": "exact", "prefix_bytes": 0}
    config = EngineConfig(**{**settings, **options})
    return TokenEngine.open(tiny_path("qwen35-mtp"), config, make_draft())


def _open_plain(**options: int | str) -> TokenEngine:
    settings = {"max_ctx": MAX_CTX, "threads": 1, "math": "exact"}
    return TokenEngine.open(tiny_path("llama"), EngineConfig(**{**settings, **options}))


@pytest.fixture(scope="module")
def engine() -> Iterator[TokenEngine]:
    """One engine for all tests, in whatever state the last one left it."""
    engine = _open()
    yield engine
    engine.close()


@dataclass(frozen=True)
class Reply:
    ids: tuple[int, ...]
    cached_tokens: int
    rounds: tuple[Round, ...]  # the trees show what the draft proposed, so what context it had

    def is_like(self, other: "Reply") -> bool:
        """The same text from the same rounds."""
        return (self.ids, self.rounds) == (other.ids, other.rounds)


def _reply(
    engine: TokenEngine,
    prompt: tuple[int, ...],
    count: int = 24,
    sampling: SamplingParams = HOT,
) -> Reply:
    rounds: list[Round] = []
    engine.watch = rounds.append
    stream = engine.generate(Request(prompt, count, sampling))
    ids = tuple(event.token for event in stream)
    engine.watch = None
    assert stream.usage.rounds.num_rounds == len(rounds) or not rounds
    return Reply(ids, stream.usage.cached_tokens, tuple(rounds))


@cache
def _fresh_reply(prompt: tuple[int, ...], count: int = 24, sampling: SamplingParams = HOT) -> Reply:
    engine = _open()
    try:
        reply = _reply(engine, prompt, count, sampling)
    finally:
        engine.close()
    assert reply.cached_tokens == 0
    return reply


def test_the_rounds_differ_in_length() -> None:
    """Otherwise equal rounds would say little."""
    accepted = [len(one.path) - 1 for one in _fresh_reply(PROMPT).rounds]
    assert min(accepted) == 0 and max(accepted) >= 2 and len(set(accepted)) >= 3, accepted


def test_a_longer_conversation_is_not_prefilled_again(engine: TokenEngine) -> None:
    first = _reply(engine, PROMPT)
    longer = (*PROMPT, *first.ids, 7, 8, 9)
    before = engine.target.num_forwards
    second = _reply(engine, longer)
    # the reply's last token is the first that the target has not read
    assert second.cached_tokens == len(PROMPT) + len(first.ids) - 1
    assert engine.target.num_forwards - before == len(second.rounds) + 1  # one chunk of what is new
    assert first.is_like(_fresh_reply(PROMPT))
    assert second.is_like(_fresh_reply(longer))


def test_another_conversation_starts_afresh(engine: TokenEngine) -> None:
    other = tuple(reversed(PROMPT))
    _reply(engine, PROMPT)
    reply = _reply(engine, other)
    assert reply.cached_tokens == 0 and reply.is_like(_fresh_reply(other))
    again = _reply(engine, PROMPT)
    assert again.cached_tokens == 0 and again.is_like(_fresh_reply(PROMPT))


def test_the_same_prompt_again(engine: TokenEngine) -> None:
    for sampling in (HOT, SamplingParams(), HOT):
        expected = _fresh_reply(PROMPT, 24, sampling)
        assert _reply(engine, PROMPT, 24, sampling).is_like(expected)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_request_after_a_cancelled_one(engine: TokenEngine, count: int) -> None:
    """Cancelled before it began, or after some tokens, in the middle of what a round gave."""
    expected = _fresh_reply(PROMPT)
    stream = engine.generate(Request(PROMPT, 24, HOT))
    seen = tuple(next(stream).token for _ in range(count))
    stream.close()
    assert stream.finish_reason == FinishReason.CANCELLED
    assert list(stream) == [] and seen == expected.ids[:count]
    longer = (*PROMPT, *seen, 5)
    assert _reply(engine, longer).is_like(_fresh_reply(longer))
    assert _reply(engine, PROMPT).is_like(expected)


def test_a_stream_that_was_dropped_does_not_block_the_next(engine: TokenEngine) -> None:
    for _ in engine.generate(Request(PROMPT, 24, HOT)):
        break
    replies: list[Reply] = []
    thread = threading.Thread(target=lambda: replies.append(_reply(engine, PROMPT)), daemon=True)
    thread.start()
    thread.join(timeout=600)
    assert replies, "the next request waits for ever"
    assert replies[0].is_like(_fresh_reply(PROMPT))


@pytest.mark.parametrize("budget", [0, 15])
def test_a_request_after_one_that_broke_off_inside_a_pass(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, forward = _open(budget=budget), Target.forward
    expected = _reply(engine, PROMPT)

    def interrupted(self: Target, rows: range) -> None:
        forward(self, rows)
        raise KeyboardInterrupt

    for num_tokens in (0, 3):  # in prefill, in decoding
        stream = engine.generate(Request(PROMPT, 24, HOT))
        for _ in range(num_tokens):
            next(stream)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Target, "forward", interrupted)
            list(stream)
        assert _reply(engine, PROMPT).is_like(expected)
    engine.close()


def test_requests_wait_for_each_other(engine: TokenEngine) -> None:
    prompts = [PROMPT[start:] for start in (0, 3, 6)]
    expected = [_fresh_reply(prompt).ids for prompt in prompts]
    found: dict[int, tuple[int, ...]] = {}

    def work(i: int) -> None:
        found[i] = tuple(e.token for e in engine.generate(Request(prompts[i], 24, HOT)))

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=600)
    assert [found.get(i) for i in range(3)] == expected


def test_bad_requests_are_refused_before_anything_runs(engine: TokenEngine) -> None:
    before = engine.target.num_forwards
    with pytest.raises(ValueError, match="prompt is empty"):
        engine.generate(Request((), 4))
    with pytest.raises(ValueError, match="max_tokens"):
        engine.generate(Request((1,), 0))
    for value in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ValueError, match="logit_bias must be finite"):
            engine.generate(Request((1,), 4, logit_bias=((3, value),)))
    for token in (-1, 512):
        with pytest.raises(ValueError, match=f"token {token} is not in the vocabulary of 512"):
            engine.generate(Request((1, token, 2), 4))
    with pytest.raises(CapacityError, match=f"{MAX_CTX} tokens.*planned for {MAX_CTX}"):
        engine.generate(Request((1,) * MAX_CTX, 4))
    assert engine.target.num_forwards == before
    assert _reply(engine, PROMPT).is_like(_fresh_reply(PROMPT))


def test_the_end_of_the_context_ends_the_reply(engine: TokenEngine) -> None:
    prompt = (PROMPT * 7)[: MAX_CTX - 10]
    stream = engine.generate(Request(prompt, 100, HOT))
    events = list(stream)
    assert [event.position for event in events] == list(range(MAX_CTX - 10, MAX_CTX))
    assert stream.finish_reason == FinishReason.LENGTH
    longest = engine.generate(Request((1,) * (MAX_CTX - 1), 100))
    assert len(list(longest)) == 1 and longest.finish_reason == FinishReason.LENGTH


def test_max_tokens_ends_the_reply(engine: TokenEngine) -> None:
    expected = _fresh_reply(PROMPT).ids
    for count in (1, 2, 7):
        stream = engine.generate(Request(PROMPT, count, HOT))
        assert tuple(event.token for event in stream) == expected[:count]
        assert stream.finish_reason == FinishReason.LENGTH
        assert stream.usage.completion_tokens == count


def test_a_stop_token_ends_the_reply_and_is_not_part_of_it(engine: TokenEngine) -> None:
    expected = _fresh_reply(PROMPT).ids
    stop = next(token for i, token in enumerate(expected) if i > 4 and token not in expected[:i])
    stream = engine.generate(Request(PROMPT, 24, HOT, frozenset({stop})))
    ids = tuple(event.token for event in stream)
    assert ids == expected[: expected.index(stop)]
    assert stream.finish_reason == FinishReason.STOP
    assert stream.usage.completion_tokens == len(ids) + 1  # the stop token was decoded too
    longer = (*PROMPT, *ids, stop, 5, 6)
    assert _reply(engine, longer).is_like(_fresh_reply(longer))


@pytest.mark.parametrize("budget", [1, 3, 22, "auto"])
@pytest.mark.parametrize("options", [{}, {"chunk": 1}, {"chunk": 5}])
def test_options_do_not_change_the_text(budget: int | str, options: dict[str, int]) -> None:
    engine = _open(budget=budget, ngram="on", **options)
    for sampling in (SamplingParams(), HOT):
        expected = _fresh_reply(PROMPT, 24, sampling).ids
        assert _reply(engine, PROMPT, 24, sampling).ids == expected
    engine.close()


def test_a_shorter_block_makes_shallower_trees() -> None:
    engine = _open(block=6, width=1)
    reply = _reply(engine, PROMPT)
    assert reply.ids == _fresh_reply(PROMPT).ids
    assert max(max(one.tree.depths) for one in reply.rounds) == 5
    engine.close()


@pytest.mark.parametrize("block", [1, 17])
def test_a_block_that_the_draft_cannot_fill_is_refused(block: int) -> None:
    with pytest.raises(ValueError, match="block must be between 2 and the 16"):
        _open(block=block)


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
    stream = engine.generate(Request(PROMPT, 60, SamplingParams(temperature=0.9, seed=1)))
    events = list(stream)
    engine.watch = None
    usage = stream.usage
    assert [event.position for event in events] == list(range(33, 93))
    assert [event.round_index for event in events] == [
        i + 1 for i, one in enumerate(seen) for _ in one.path
    ]
    assert usage.prompt_tokens == 33 and usage.completion_tokens == 60
    assert usage.rounds.num_rounds == len(seen) < 60
    assert usage.acceptance_length == pytest.approx(60 / len(seen))
    assert 0 < usage.prefill_ms < usage.first_token_ms <= usage.prefill_ms + usage.decode_ms
    assert usage.tokens_per_second > 0


@pytest.mark.parametrize("path", [tiny_path("qwen35-mtp"), make_quantised()], ids=["f16", "blocks"])
def test_any_number_of_threads(path: Path) -> None:
    texts = set()
    for num_threads in (1, 2, 3):
        config = EngineConfig(
            device="cpu", budget=15, max_ctx=200, threads=num_threads, ngram="off"
        )
        engine = TokenEngine.open(path, config, make_draft())
        texts.add(_reply(engine, PROMPT).ids)
        engine.close()
    assert len(texts) == 1
