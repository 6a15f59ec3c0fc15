"""Whole rounds on a GPU, real or emulated: the text of plain decoding, and a state that fits it."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from tempfile import gettempdir

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

from draftree.bench.synthetic import write_pair
from draftree.config import EngineConfig
from draftree.core import FinishReason, Request, SamplingParams
from draftree.decode.decoder import Round
from draftree.decode.device_decoder import DeviceDecoder
from draftree.drafts.dflash import BlockDrafter
from draftree.engine.engine import TokenEngine
from draftree.kernels.cuda.compile import Gpu
from tests.decode.device_oracle import (
    FEW_NODES,
    HOT,
    PROMPT,
    check_kind,
    decode,
    emitted_tokens,
    equal_parts,
    request,
)
from tests.decode.scripted import ScriptedRounds
from tests.examples import mark_long

SAMPLINGS = {
    "greedy": SamplingParams(),
    "warm": SamplingParams(temperature=0.8, seed=3),
    "filtered": SamplingParams(temperature=1.0, top_p=0.9, min_p=0.01, seed=3),
    "hot": HOT,
}


def test_drafting_changes_no_text(open_engine, any_gpu: Gpu) -> None:
    count = 200 if any_gpu.is_real else 5
    plain = open_engine(0)
    expected = {}
    samplings = {name: SAMPLINGS[name] for name in SAMPLINGS if any_gpu.is_real or name != "warm"}
    for name, sampling in samplings.items():
        stream = plain.generate(request(sampling, count))
        expected[name] = [event.token for event in stream]
        assert stream.usage.rounds.off_reason == "the budget is 0"
        assert plain.target.state.tokens == [*PROMPT, *expected[name][:-1]]
    assert len({tuple(text) for text in expected.values()}) == len(samplings)
    for budget in (8, 22, 40) if any_gpu.is_real else FEW_NODES:
        engine = open_engine(budget)
        for name, sampling in samplings.items():
            stream = engine.generate(request(sampling, count))
            assert [event.token for event in stream] == expected[name], (budget, name)
            assert engine.target.state.tokens == [*PROMPT, *expected[name][:-1]]
            if name == "hot":
                assert stream.usage.acceptance_length > 1.2


@pytest.mark.parametrize("sampling", mark_long(("greedy", "warm"), but=("warm",)))
def test_the_host_runs_rounds_that_the_device_cannot(
    open_engine, sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(SAMPLINGS[sampling], 7)
    expected = [event.token for event in open_engine(0).generate(asked)]
    monkeypatch.setattr(BlockDrafter, "programs", lambda self: None)
    stream = open_engine(7).generate(asked)
    assert [event.token for event in stream] == expected
    rounds = stream.usage.rounds
    assert rounds.host_reason == "a GPU cannot run whole rounds with this kind of draft"
    assert rounds.num_drafted > 0 and rounds.draft_ms > 0.0


def test_a_draft_of_four_bits(open_engine) -> None:
    texts, lengths = [], []
    for budget in (0, 22):
        stream = open_engine(budget, "Q4_1").generate(request(HOT, 6))
        texts.append([event.token for event in stream])
        lengths.append(stream.usage.acceptance_length)
    assert texts[0] == texts[1] and lengths[1] > 1.2 > lengths[0]


def test_prompts_of_a_middling_length(open_engine) -> None:
    """More rows than any tree has, fewer than prefill takes: the same bits whatever the budget."""
    prompt = tuple(int(t) for t in np.random.default_rng(2).integers(0, 250, 50))
    texts, states = [], []
    for budget in (0, 8):
        engine = open_engine(budget)
        stream = engine.generate(request(SamplingParams(), 2, prompt))
        texts.append([event.token for event in stream])
        states.append(engine.target.state.snapshot())
    assert texts[0] == texts[1] and equal_parts(*states)


def check_oracle(
    engine: TokenEngine, budgets: tuple[int, ...], count: int, names: Iterable[str] = SAMPLINGS
) -> float:
    """Deep paths change nothing either; the mean number of tokens a round."""
    lengths = []
    for name in names:
        asked = request(SAMPLINGS[name], count)
        plain, _ = decode(engine, engine.rounds_of(0), asked, use_draft=False)
        state = engine.target.state.snapshot()
        text = (*PROMPT, *(one.token for one in plain))
        for budget in budgets:
            rounds = ScriptedRounds(engine, budget, text, budget)
            emitted, length = decode(engine, rounds, asked, use_draft=True)
            assert emitted_tokens(emitted) == emitted_tokens(plain), (name, budget)
            assert equal_parts(engine.target.state.snapshot(), state), "the states differ"
            lengths.append(length)
    return sum(lengths) / len(lengths)


def test_a_draft_that_knows_the_text(open_engine, any_gpu: Gpu) -> None:
    engine = open_engine(40)
    if any_gpu.is_real:
        assert check_oracle(engine, (8, 22, 40), 200) > 3.0
    else:
        assert check_oracle(engine, (22,), 10, ("filtered",)) > 2.0


@pytest.mark.gpu
def test_the_flagship_shapes(real_gpu: Gpu) -> None:
    """64 layers of random weights as large as real ones: 24 GB on the GPU and on the disk."""
    target, draft = write_pair("27b", Path(gettempdir()) / "draftree-synth")
    config = EngineConfig(device="cuda", budget=40, max_ctx=1024, gpu_memory=22.35)
    engine = TokenEngine.open(target, config, draft=draft)
    assert check_oracle(engine, (8, 22, 40), 224) > 3.0


# Penalties that make tokens come back, so that a tree's own text counts.
REPEATING = SamplingParams(
    repetition_penalty=1.2, presence_penalty=-3.0, frequency_penalty=0.9, seed=5
)
KINDS = {
    "penalties": {"sampling": REPEATING},
    "hot penalties": {"sampling": replace(REPEATING, temperature=1.5)},
    "bias": {"sampling": HOT, "logit_bias": ((3, 2.0), (17, 1.5))},
    "scores": {"sampling": SAMPLINGS["warm"], "logprobs": 3},
    "all": {
        "sampling": replace(REPEATING, temperature=1.0, top_p=0.9, min_p=0.01),
        "logit_bias": ((7, 3.0), (200, -50.0)),
        "logprobs": 20,
        "stop_ids": frozenset(range(210, 250)),
    },
}


@pytest.mark.parametrize("kind", mark_long(KINDS, but=("penalties", "scores", "all")))
def test_every_kind_of_request(open_engine, any_gpu: Gpu, kind: str) -> None:
    asked = Request(PROMPT, 100 if any_gpu.is_real else 9, **KINDS[kind])
    assert check_kind(open_engine(22), asked, (8, 22) if any_gpu.is_real else FEW_NODES) > 1.5


def test_kinds_take_turns_on_one_engine(open_engine) -> None:
    """What one request leaves on the device is nothing to the next."""
    engine, texts = open_engine(7), {}
    for name in (None, "all", "bias", None, "all"):
        options = KINDS[name] if name is not None else {"sampling": HOT}
        events = list(engine.generate(Request(PROMPT, 3, **options)))
        decoder = engine._use.decoders.new(Request(PROMPT, 4, **options), None)
        assert isinstance(decoder, DeviceDecoder)
        found = [(event.token, event.scores) for event in events]
        assert texts.setdefault(name, found) == found
        assert all((scores is not None) == ("logprobs" in options) for _, scores in found)


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": ((7, 90.0),)},
        {"sampling": SamplingParams(presence_penalty=-10.0, frequency_penalty=-10.0)},
    ],
    ids=["bias", "penalties"],
)
def test_a_draft_expects_what_the_request_wants(open_engine, options) -> None:
    """Soon one token is all that follows, which the draft of random weights cannot know."""
    stream = open_engine(7).generate(Request(PROMPT, 16, **options))
    tokens = [event.token for event in stream]
    assert len(set(tokens)) <= 4 and stream.usage.acceptance_length > 1.6


def test_log_probabilities_without_alternatives(open_engine) -> None:
    events = list(open_engine(7).generate(replace(request(HOT, 3), logprobs=0)))
    assert all(e.scores is not None and e.scores.top == () for e in events)


def test_a_stream_left_early_does_no_harm(open_engine) -> None:
    engine = open_engine(7)
    whole = [event.token for event in engine.generate(request(HOT, 6))]
    stream = engine.generate(request(HOT, 6))
    assert [event.token for event in islice(stream, 2)] == whole[:2]
    stream.close()
    tokens = engine.target.state.tokens
    assert (
        tokens[: len(PROMPT)] == list(PROMPT) and tokens[len(PROMPT) :] == whole[: len(tokens) - 6]
    )
    assert [event.token for event in engine.generate(request(HOT, 6))] == whole


def test_stop_tokens_end_on_the_device(open_engine) -> None:
    engine = open_engine(7)
    whole = [event.token for event in engine.generate(request(HOT, 6))]
    stop = next(t for i, t in enumerate(whole) if i > 0 and t not in whole[:i])
    stream = engine.generate(replace(request(HOT, 6), stop_ids=frozenset({stop})))
    assert [event.token for event in stream] == whole[: whole.index(stop)]
    assert stream.finish_reason is FinishReason.STOP


def test_rounds_can_be_watched(open_engine) -> None:
    engine, seen = open_engine(7), []
    engine.watch = seen.append
    text = [event.token for event in engine.generate(request(HOT, 6))]
    assert all(isinstance(r, Round) and r.tree.num_nodes <= 9 for r in seen)
    told = [t for r in seen for t in (*(r.tree.tokens[n] for n in r.path[1:]), r.bonus)]
    assert told == text


def test_rounds_of_changing_sizes(open_engine, any_gpu: Gpu, monkeypatch) -> None:
    """An automatic budget: whatever size each round has, the text is that of plain decoding."""
    count = 200 if any_gpu.is_real else 8
    plain = [event.token for event in open_engine(0).generate(request(HOT, count))]
    turns, seen = cycle((8, 1, 16, 8, 16)), []
    monkeypatch.setattr("draftree.config._GPU_BUDGET", 9)
    engine = open_engine("auto")
    monkeypatch.setattr(
        DeviceDecoder, "_next_size", lambda self: seen.append(next(turns)) or seen[-1]
    )
    stream = engine.generate(request(HOT, count))
    assert [event.token for event in stream] == plain
    assert stream.usage.acceptance_length > 1.2 and {1, 8, 16} <= set(seen)
