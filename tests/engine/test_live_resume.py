"""A reply whose beginning another engine wrote goes on with the same tokens, whatever is asked."""

from contextlib import closing

import pytest

from draftree.chat import Engine
from draftree.core import FinishReason, Request, SamplingParams
from draftree.engine.engine import TokenEngine
from draftree.text.grammar import FormatKind, ResponseFormat
from tests.engine.turns import HOT, KINDS, Reply, alone, make_prompt, open_engine
from tests.tiny import tiny_path

PENALTIES = SamplingParams(
    2.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, seed=7
)
REQUESTS = (
    Request(make_prompt(60, 1), 40, HOT),
    Request(make_prompt(3, 2), 40),
    Request(make_prompt(41, 4), 30, PENALTIES, logit_bias=((5, 2.0),)),
)


def resume(engine: TokenEngine, request: Request, begun: list[int], *, pauses: bool) -> Reply:
    engine.reset()
    reply = Reply.start(engine, request)
    reply.stream.begun = begun
    if pauses:
        reply.stream.should_pause = lambda: True
    while reply.advance():
        alone(engine, Request(make_prompt(5, 6), 2)) if pauses else None
    return reply


def check(engine: TokenEngine, request: Request, lengths: tuple[int, ...]) -> None:
    whole = alone(engine, request)
    for length in lengths:
        reply = resume(engine, request, whole.tokens[:length], pauses=False)
        assert reply.tokens == whole.tokens == reply.stream.tokens
        assert [event.position for event in reply.events] == [e.position for e in whole.events]
        assert reply.stream.finish_reason is whole.stream.finish_reason
        assert reply.stream.usage.completion_tokens == whole.stream.usage.completion_tokens
        assert reply.stream.usage.prompt_tokens == len(request.prompt_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_from_anywhere(kind: str) -> None:
    with closing(open_engine(kind)) as engine:
        for request in REQUESTS:
            check(engine, request, (0, 1, 8, 9, request.max_tokens - 1))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_on_a_gpu(kind: str) -> None:
    """Chunks of a prompt may be longer than what is batch-invariant, those of a reply may not."""
    options = {"device": "cuda", "math": "auto", "max_ctx": 700, "chunk": 96}
    with closing(open_engine(kind, **options)) as engine:
        for request in (*REQUESTS, Request(make_prompt(300, 9), 300, HOT)):
            check(engine, request, (1, 8, request.max_tokens // 2, request.max_tokens - 1))


def test_what_is_read_is_not_decoded() -> None:
    with closing(open_engine("dense")) as engine:
        whole = alone(engine, REQUESTS[1])
        reply = resume(engine, REQUESTS[1], whole.tokens[:30], pauses=False)
        rounds = [one.stream.usage.rounds.num_rounds for one in (whole, reply)]
    assert (len(whole.tokens), *rounds) == (40, 40, 10)


def test_others_may_come_between() -> None:
    with closing(open_engine()) as engine:
        for request in REQUESTS:
            whole = alone(engine, request)
            reply = resume(engine, request, whole.tokens[:20], pauses=True)
            assert reply.tokens == whole.tokens and reply.num_pauses > 3


def test_log_probabilities_are_computed_again() -> None:
    request = Request(make_prompt(33, 3), 20, HOT, logprobs=3)
    with closing(open_engine()) as engine:
        whole = alone(engine, request)
        reply = resume(engine, request, whole.tokens[:10], pauses=False)
    assert reply.events == whole.events and whole.stream.tokens == []


@pytest.mark.parametrize("is_ended", [False, True])
def test_a_grammar_goes_on_where_it_stood(is_ended: bool) -> None:
    """Also where the reply was whole but for the news that it is."""
    form = ResponseFormat(FormatKind.REGEX, "[a-f]{12}(x|y)z")
    ask = [{"role": "user", "content": "Hi"}]
    sampling = SamplingParams(temperature=2.0, seed=3)
    options = {"max_ctx": 256, "draft": "none", "threads": 1}
    with closing(Engine.open(str(tiny_path("qwen3")), **options)) as engine:
        runs = [
            engine.chat(ask, max_tokens=40, sampling=sampling, response_format=form)
            for _ in range(2)
        ]
        text = "".join(delta.text for delta in runs[0])
        told = list(runs[0].stream.tokens)
        runs[1].stream.resume(told if is_ended else told[:5])
        assert "".join(delta.text for delta in runs[1]) == text and len(text) == 14
        assert runs[1].finish_reason is runs[0].finish_reason is FinishReason.STOP
