"""Requests decoded on a GPU, real or emulated, by the host and by the device: they must agree."""

import numpy as np

from draftree.core import Request, SamplingParams
from draftree.decode.decoder import Emitted
from draftree.decode.device_decoder import DeviceDecoder
from draftree.decode.device_tree import DeviceTreeDecoder
from draftree.decode.plain import PlainDecoder
from draftree.decode.sampler import Sampler
from draftree.engine.engine import TokenEngine
from draftree.prefill.chunked import prefill
from draftree.state.sequence import Snapshot
from tests.decode.scripted import ScriptedRounds

PROMPT = (5, 9, 200, 31, 7, 77)
OTHER = Request((1, 2, 3), 5, SamplingParams(frequency_penalty=1.0), logit_bias=((7, 20.0),))
FEW_NODES = (7,)  # budgets of trees that are one tile of a product, cheap where a GPU is emulated
HOT = SamplingParams(temperature=3.0, seed=4)  # the noise decides, and any draft knows the noise


def request(sampling: SamplingParams, count: int, prompt: tuple[int, ...] = PROMPT) -> Request:
    return Request(prompt, count, sampling)


def is_over(emitted: list[Emitted], asked: Request) -> bool:
    return bool(emitted) and (emitted[-1].is_last or emitted[-1].token in asked.stop_ids)


def decode(
    engine: TokenEngine,
    rounds,
    asked: Request,
    *,
    use_draft: bool,
    budget: int = 0,
    pause_every: int = 0,
):
    """What follows the prompt, and tokens a round. pause_every: after that many steps another
    request has its turn on the device.
    """
    engine.reset()
    prefill(engine.target, asked.prompt_ids[:-1], engine.plan.chunk)
    args = engine.target, None, rounds, asked
    if asked.grammar is None:
        decoder = DeviceDecoder(*args, use_draft=use_draft)
    else:
        decoder = DeviceTreeDecoder(*args, use_draft=use_draft, budget=budget)
    decoder.start(asked.prompt_ids[-1])
    emitted: list[Emitted] = []
    num_steps = 0
    while len(emitted) < asked.max_tokens and not is_over(emitted, asked):
        emitted += decoder.step(asked.max_tokens - len(emitted))
        num_steps += 1
        if pause_every and num_steps % pause_every == 0:
            decoder.pause()
            rounds.begin(OTHER, 3, 0)
            rounds.begin_segment(1, 0)
    decoder.finish()
    return emitted, len(emitted) / decoder.stats.num_rounds


def decode_on_host(engine: TokenEngine, asked: Request) -> list[Emitted]:
    """Plain decoding, whose choices the host makes."""
    engine.reset()
    prefill(engine.target, asked.prompt_ids[:-1], engine.plan.chunk)
    sampler = Sampler.for_request(asked, engine.model_config.vocab_size)
    decoder = PlainDecoder(engine.target, sampler)
    decoder.start(asked.prompt_ids[-1])
    emitted: list[Emitted] = []
    while len(emitted) < asked.max_tokens and not is_over(emitted, asked):
        emitted += decoder.step(1)
    return emitted


def check_alike(found: list[Emitted], wanted: list[Emitted], *, is_exact: bool) -> None:
    assert [(one.token, one.is_last) for one in found] == [(e.token, e.is_last) for e in wanted]
    if is_exact:
        assert [one.scores for one in found] == [one.scores for one in wanted]
        return
    for a, b in zip(found, wanted, strict=True):
        assert (a.scores is None) == (b.scores is None)
        if a.scores is not None and b.scores is not None:
            assert abs(a.scores.logprob - b.scores.logprob) < 1e-5
            assert [t for t, _ in a.scores.top] == [t for t, _ in b.scores.top]
            pairs = zip(a.scores.top, b.scores.top, strict=True)
            assert all(abs(p - q) < 1e-5 for (_, p), (_, q) in pairs)


def check_kind(engine: TokenEngine, asked: Request, budgets: tuple[int, ...]) -> float:
    """Host and device, with and without a draft that knows the text: one text, one set of scores.
    Returns the mean number of tokens a round.
    """
    wanted, lengths = decode_on_host(engine, asked), []
    pauses = (2,) if budgets == FEW_NODES else (0, 1)  # steps with and without, in one text or two
    states = [engine.target.state.snapshot()]
    plain, _ = decode(engine, engine.rounds_of(0), asked, use_draft=False)
    states.append(engine.target.state.snapshot())
    check_alike(plain, wanted, is_exact=False)
    text = (*asked.prompt_ids, *(one.token for one in plain))
    for budget in budgets:
        for steps in pauses:
            args = engine, ScriptedRounds(engine, budget, text, budget), asked
            found, length = decode(*args, use_draft=True, budget=budget, pause_every=steps)
            check_alike(found, plain, is_exact=True)
            states.append(engine.target.state.snapshot())
            lengths.append(length)
    assert all(equal_parts(state, states[0]) for state in states[1:]), "the states differ"
    return sum(lengths) / len(lengths)


def emitted_tokens(emitted: list[Emitted]) -> list[int]:
    return [one.token for one in emitted]


def equal_parts(a: Snapshot, b: Snapshot) -> bool:
    pairs = [
        (x, y) for p, q in zip(a.parts, b.parts, strict=True) for x, y in zip(p, q, strict=True)
    ]
    return a.tokens == b.tokens and all(np.array_equal(x, y) for x, y in pairs) and len(pairs) > 0
