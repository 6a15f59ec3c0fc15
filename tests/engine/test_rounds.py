"""Whole rounds on a GPU, real or emulated: the text of plain decoding, and a state that fits it."""

from dataclasses import replace
from itertools import islice

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from draftree.config import Card, EngineConfig  # noqa: E402
from draftree.core import FinishReason, Request, SamplingParams  # noqa: E402
from draftree.decode.speculative import Round  # noqa: E402
from draftree.engine import engine as engine_module  # noqa: E402
from draftree.engine.engine import TokenEngine  # noqa: E402
from draftree.kernels.cuda import compile as compile_module  # noqa: E402
from draftree.kernels.cuda.compile import Gpu  # noqa: E402
from tests.made import make_draft  # noqa: E402
from tests.tiny import tiny_path  # noqa: E402

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
    card = Card(0, "a card", 2**36)
    monkeypatch.setattr(engine_module, "find_card", lambda device: card)
    monkeypatch.setattr(compile_module, "gpu", lambda index: any_gpu)

    def open_one(budget: int | str) -> TokenEngine:
        config = EngineConfig(budget=budget, max_ctx=256, chunk=64)
        return TokenEngine.open(tiny_path("qwen35-mtp"), config, draft=make_draft())

    return open_one


def request(sampling: SamplingParams, count: int, prompt: tuple[int, ...] = PROMPT) -> Request:
    return Request(prompt, count, sampling)


def test_drafting_changes_no_text(open_engine, any_gpu: Gpu) -> None:
    count = 200 if any_gpu.is_real else 10
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
    assert tokens[: len(PROMPT)] == list(PROMPT) and tokens[len(PROMPT) :] == whole[: len(tokens) - 6]
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
