"""Whole rounds on a GPU, real or emulated: the text of plain decoding, and a state that fits it."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import gettempdir

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

from draftree.bench.synthetic import write_pair
from draftree.config import EngineConfig, GpuInfo
from draftree.core import FinishReason, Request, SamplingParams
from draftree.decode.decoder import Round
from draftree.decode.device_decoder import DeviceDecoder
from draftree.engine import parts as parts_module
from draftree.engine.engine import TokenEngine
from draftree.kernels.cuda import compile as compile_module
from draftree.kernels.cuda.compile import Gpu
from draftree.prefill.chunked import prefill
from draftree.state.sequence import Snapshot
from tests.decode.scripted import ScriptedRounds
from tests.made import make_draft
from tests.tiny import tiny_path

PROMPT = (5, 9, 200, 31, 7, 77)
HOT = SamplingParams(temperature=3.0, seed=4)  # the noise decides, and any draft knows the noise
SAMPLINGS = {
    "greedy": SamplingParams(),
    "warm": SamplingParams(temperature=0.8, seed=3),
    "filtered": SamplingParams(temperature=1.0, top_p=0.9, min_p=0.01, seed=3),
    "hot": HOT,
}


@pytest.fixture
def open_engine(any_gpu: Gpu, monkeypatch: pytest.MonkeyPatch):
    """TokenEngine on that GPU, with the tiny hybrid model and its draft of random weights."""
    gpu = GpuInfo(0, "a GPU", 2**36)
    monkeypatch.setattr(parts_module, "find_gpu", lambda device: gpu)
    monkeypatch.setattr(compile_module, "gpu", lambda index: any_gpu)

    def open_one(budget: int | str, qtype: str = "F16") -> TokenEngine:
        config = EngineConfig(budget=budget, max_ctx=256, chunk=64)
        return TokenEngine.open(tiny_path("qwen35-mtp"), config, draft=make_draft(qtype))

    return open_one


def request(sampling: SamplingParams, count: int, prompt: tuple[int, ...] = PROMPT) -> Request:
    return Request(prompt, count, sampling)


def test_drafting_changes_no_text(open_engine, any_gpu: Gpu) -> None:
    count = 200 if any_gpu.is_real else 7
    plain = open_engine(0)
    expected = {}
    for name, sampling in SAMPLINGS.items():
        stream = plain.generate(request(sampling, count))
        expected[name] = [event.token for event in stream]
        assert stream.usage.rounds.off_reason == "the budget is 0"
        assert plain.target.state.tokens == [*PROMPT, *expected[name][:-1]]
    assert len({tuple(text) for text in expected.values()}) == len(SAMPLINGS)
    for budget in (8, 22, 40) if any_gpu.is_real else (22,):
        engine = open_engine(budget)
        for name, sampling in SAMPLINGS.items():
            stream = engine.generate(request(sampling, count))
            assert [event.token for event in stream] == expected[name], (budget, name)
            assert engine.target.state.tokens == [*PROMPT, *expected[name][:-1]]
            if name == "hot":
                assert stream.usage.acceptance_length > 1.2


def test_a_draft_of_four_bits(open_engine) -> None:
    texts, lengths = [], []
    for budget in (0, 22):
        stream = open_engine(budget, "Q4_1").generate(request(HOT, 10))
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


def decode(engine: TokenEngine, rounds, sampling: SamplingParams, count: int, *, use_draft: bool):
    """Tokens after the prompt, and tokens a round."""
    engine.reset()
    prefill(engine.target, PROMPT[:-1], engine.plan.chunk)
    decoder = DeviceDecoder(
        *(engine.target, None, rounds, request(sampling, count)),
        use_draft=use_draft,
    )
    decoder.start(PROMPT[-1])
    tokens: list[int] = []
    while len(tokens) < count:
        tokens += [emitted.token for emitted in decoder.step(count - len(tokens))]
    decoder.finish()
    return tokens, count / decoder.stats.num_rounds


def equal_parts(a: Snapshot, b: Snapshot) -> bool:
    pairs = [
        (x, y) for p, q in zip(a.parts, b.parts, strict=True) for x, y in zip(p, q, strict=True)
    ]
    return a.tokens == b.tokens and all(np.array_equal(x, y) for x, y in pairs) and len(pairs) > 0


def check_oracle(engine: TokenEngine, budgets: tuple[int, ...], count: int) -> float:
    """Deep paths change nothing either; the mean number of tokens a round."""
    lengths = []
    for name, sampling in SAMPLINGS.items():
        plain, _ = decode(engine, engine.rounds_of(0), sampling, count, use_draft=False)
        state = engine.target.state.snapshot()
        for budget in budgets:
            rounds = ScriptedRounds(engine, budget, (*PROMPT, *plain), budget)
            tokens, length = decode(engine, rounds, sampling, count, use_draft=True)
            assert tokens == plain, (name, budget)
            assert equal_parts(engine.target.state.snapshot(), state), "the states differ"
            lengths.append(length)
    return sum(lengths) / len(lengths)


def test_a_draft_that_knows_the_text(open_engine, any_gpu: Gpu) -> None:
    engine = open_engine(40)
    if any_gpu.is_real:
        assert check_oracle(engine, (8, 22, 40), 200) > 3.0
    else:
        assert check_oracle(engine, (22,), 12) > 2.0


@pytest.mark.gpu
def test_the_flagship_shapes(real_gpu: Gpu) -> None:
    """64 layers of random weights as large as real ones: 24 GB on the GPU and on the disk."""
    target, draft = write_pair("27b", Path(gettempdir()) / "draftree-synth")
    config = EngineConfig(device="cuda", budget=40, max_ctx=1024, gpu_memory=22.35)
    engine = TokenEngine.open(target, config, draft=draft)
    assert check_oracle(engine, (8, 22, 40), 224) > 3.0


def test_what_only_the_host_can_do_gives_the_same_text(open_engine) -> None:
    """Log-probabilities take the way through the host, whose noise is the same."""
    engine = open_engine(8)
    device = [e.token for e in engine.generate(request(HOT, 6))]
    host = engine.generate(replace(request(HOT, 6), logprobs=1))
    assert [e.token for e in host] == device


def test_a_stream_left_early_does_no_harm(open_engine) -> None:
    engine = open_engine(8)
    whole = [event.token for event in engine.generate(request(HOT, 8))]
    stream = engine.generate(request(HOT, 8))
    assert [event.token for event in islice(stream, 2)] == whole[:2]
    stream.close()
    tokens = engine.target.state.tokens
    assert (
        tokens[: len(PROMPT)] == list(PROMPT) and tokens[len(PROMPT) :] == whole[: len(tokens) - 6]
    )
    assert [event.token for event in engine.generate(request(HOT, 8))] == whole


def test_stop_tokens_end_on_the_device(open_engine) -> None:
    engine = open_engine(8)
    whole = [event.token for event in engine.generate(request(HOT, 8))]
    stop = next(t for i, t in enumerate(whole) if i > 0 and t not in whole[:i])
    stream = engine.generate(replace(request(HOT, 8), stop_ids=frozenset({stop})))
    assert [event.token for event in stream] == whole[: whole.index(stop)]
    assert stream.finish_reason is FinishReason.STOP


def test_rounds_can_be_watched(open_engine) -> None:
    engine, seen = open_engine(8), []
    engine.watch = seen.append
    text = [event.token for event in engine.generate(request(HOT, 6))]
    assert all(isinstance(r, Round) and r.tree.num_nodes <= 9 for r in seen)
    told = [t for r in seen for t in (*(r.tree.tokens[n] for n in r.path[1:]), r.bonus)]
    assert told == text
