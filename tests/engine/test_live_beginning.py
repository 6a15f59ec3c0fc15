"""A reply whose beginning its grammar gives: it is read with the prompt, and the text is that of
plain decoding, which asks the model for every token.
"""

from contextlib import closing
from dataclasses import replace

import pytest

from draftree.config import GpuInfo
from draftree.core import FinishReason, Request, SamplingParams, TokenSource
from draftree.engine import live
from draftree.engine.engine import TokenEngine
from tests.decode.rule import RuleGrammar
from tests.engine.turns import HOT, KINDS, Reply, alone, alone_with, make_prompt, open_engine

VOCAB_SIZE = 512  # of the tiny models
PENALISED = SamplingParams(2.0, repetition_penalty=1.3, frequency_penalty=0.5, seed=7)


def _find_grammar(num_forced: int, length: int | None = None) -> RuleGrammar:
    for seed in range(200):
        grammar = RuleGrammar(VOCAB_SIZE, seed, length=length)
        if len(grammar.new_matcher().propose_forced()) == num_forced:
            return grammar
    raise AssertionError("no seed gives such a grammar")


LONG = _find_grammar(3)
REQUESTS = (
    Request(make_prompt(60, 1), 30, HOT, grammar=LONG),
    Request(make_prompt(3, 2), 20, grammar=LONG),
    Request(make_prompt(41, 4), 12, PENALISED, logit_bias=((5, 2.0),), grammar=LONG),
    Request(make_prompt(17, 5), 2, grammar=LONG),  # ends in the middle of what is forced
    Request(make_prompt(17, 6), 9, grammar=_find_grammar(3, length=3)),  # all of it is forced
    Request(make_prompt(17, 7), 9, HOT, logprobs=2, grammar=LONG),
)


@pytest.mark.parametrize("chunk", [8, 96])
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_that_of_plain_decoding(kind: str, chunk: int) -> None:
    plain_engine = open_engine(kind, chunk=chunk, budget=0)
    with closing(open_engine(kind, chunk=chunk)) as engine, closing(plain_engine):
        for request in REQUESTS:
            reply, plain = alone(engine, request), alone(plain_engine, request)
            assert reply.tokens == plain.tokens
            assert [event.position for event in reply.events] == [e.position for e in plain.events]
            assert reply.stream.finish_reason is plain.stream.finish_reason
            assert reply.stream.usage.completion_tokens == len(reply.tokens)
            assert {event.source for event in plain.events} == {TokenSource.PLAIN}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_on_a_gpu(kind: str) -> None:
    options = {"device": "cuda", "math": "auto", "chunk": 96}
    plain_engine = open_engine(kind, budget=0, **options)
    with closing(open_engine(kind, **options)) as engine, closing(plain_engine):
        for request in REQUESTS:
            assert alone(engine, request).tokens == alone(plain_engine, request).tokens


def _watch_passes(engine: TokenEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    prefill = live.prefill

    def count(target: object, tokens: tuple[int, ...], *rest: object) -> None:
        sizes.append(len(tokens))
        prefill(target, tokens, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(live, "prefill", count)
    return sizes


def test_it_joins_the_last_pass_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is room among the rows of which each has the bits that it has alone."""
    with closing(open_engine(chunk=96)) as engine:
        sizes = _watch_passes(engine, monkeypatch)
        request = REQUESTS[1]
        reply = Reply.start(engine, request)
        first = next(reply.stream)
        assert sizes == [2 + 3] and engine.target.num_forwards == 1
        assert (first.source, first.round_index) == (TokenSource.GRAMMAR, 1)
        assert reply.stream.usage.first_token_ms > 0.0
        reply.advance()
        assert reply.stream.usage.rounds.num_rounds > 1
        for length, expected in ((62, [61 + 3]), (63, [62, 3]), (110, [96, 13 + 3])):
            sizes.clear()
            alone(engine, replace(request, prompt_ids=make_prompt(length, 3), max_tokens=4))
            assert sizes == expected
        assert reply.stream.usage.read_tokens == 2


def test_a_gpu_reads_what_little_is_left_in_short_passes() -> None:
    with closing(open_engine(chunk=96)) as engine:
        here = engine.plan
    on_gpu = replace(here, gpu=GpuInfo(0, "a GPU", 0))
    assert [live.choose_rows(here, left) for left in (5, 70, 500)] == [96, 96, 96]
    assert [live.choose_rows(on_gpu, left) for left in (5, 70, 128, 129)] == [64, 64, 64, 96]
    assert live.choose_rows(replace(on_gpu, chunk=24), 70) == 24


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_of_one_pass_looks_for_nothing_else(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_engine(kind, prefix_bytes=1 << 28)) as engine:
        known = make_prompt(40, 1)
        known += tuple(alone(engine, Request(known, 4)).tokens[:-1])
        found, find = [], engine._prefix.find
        monkeypatch.setattr(engine._prefix, "find", lambda *a: found.append(a) or find(*a))
        for length, count in ((20, 0), (70, 1)):
            more = (*known, *make_prompt(length, 2))
            alone_with(engine, Request(more, 1))
            known = more[:-1]
            assert len(found) == count


def test_a_reply_that_it_fills_takes_no_round() -> None:
    with closing(open_engine(chunk=96)) as engine:
        num_before = engine.target.num_forwards
        reply = alone(engine, REQUESTS[3])
        assert engine.target.num_forwards == num_before + 1
        assert reply.stream.finish_reason is FinishReason.LENGTH
        assert alone(engine, REQUESTS[4]).stream.finish_reason is FinishReason.STOP


def test_others_may_come_between() -> None:
    with closing(open_engine()) as engine:
        for request in REQUESTS:
            whole = alone(engine, request)
            reply = Reply.start(engine, request)
            reply.stream.should_pause = lambda: True
            while reply.advance():
                alone_between(engine)
            assert reply.facts == whole.facts


def alone_between(engine: TokenEngine) -> None:
    for _ in engine.generate(Request(make_prompt(5, 6), 2)):
        pass


def test_what_a_resumed_reply_has_said_is_not_said_again() -> None:
    with closing(open_engine()) as engine:
        for request in REQUESTS[:3]:
            whole = alone(engine, request)
            for length in (1, 2, 3, 7):
                engine.reset()
                reply = Reply.start(engine, request)
                reply.stream.resume(whole.tokens[:length])
                assert not reply.advance() and reply.tokens == whole.tokens


def test_a_prompt_that_is_known_reads_only_what_is_forced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with closing(open_engine("dense", chunk=96, prefix_bytes=1 << 20)) as engine:
        request = REQUESTS[0]
        alone(engine, request)
        sizes = _watch_passes(engine, monkeypatch)
        again = Reply.start(engine, request)
        next(again.stream)
        assert sizes == [3] and again.stream.usage.cached_tokens == 59
        again.stream.close()
